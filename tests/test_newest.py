"""``make newest`` reads the bounds of ``pyproject.toml``, asks pip for releases, and says what broke."""

import shutil
import sys
from pathlib import Path

import newest
import pytest
from newest import ROOT, Outcome, Release
from test_cpu_env import write_wheel

from kvpop_vllm.supported import TRANSFORMERS, VLLM

PROJECT = newest.project_of(ROOT)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Have pip find three releases of a package in a folder, and nothing else."""
    for version in ("1.0", "1.5", "2.0"):
        wheel = write_wheel(tmp_path, "toy", version, ["absent"], {"toy.py": ""})
        wheel.rename(tmp_path / f"toy-{version}-py3-none-any.whl")
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(f"PIP_{name}", value)


def test_bounds_are_those_of_the_project():
    bounds = newest.dependencies(PROJECT)
    assert {"numpy", "packaging", "safetensors", "torch", "transformers"} < bounds.keys()
    assert bounds["vllm"] == VLLM and bounds["torch"] == ""


def test_the_newest_within_and_beyond_the_bounds(index):
    within = Release("toy", "1.5", ">=1,<2", False)
    assert newest.releases({"toy": ">=1,<2"}) == [within, Release("toy", "2.0", ">=1,<2", True)]
    assert newest.releases({"toy": ""}) == [Release("toy", "2.0", "", False)]
    with pytest.raises(SystemExit, match="^pip finds no toy>2$"):
        newest.releases({"toy": ">2"})


def test_environments_have_no_vllm_and_one_version_is_chosen():
    lines = newest.lines(PROJECT, {"torch": "2.13.0+cpu", "numpy": "9"})
    assert {"torch==2.13.0+cpu", "numpy==9", "packaging", "safetensors", "ninja", "gguf"} < set(lines)
    assert not [line for line in lines if line.startswith("vllm")]
    modules = newest.without_vllm(ROOT)
    assert {"tests/hf/test_cache.py", "tests/kernels/test_decode_step.py"} < set(modules)
    assert not {"tests/test_refusals.py", "tests/engine/test_doctor.py", "tests/hf/test_engine.py"} & set(modules)


@pytest.fixture
def tree(tmp_path):
    """Return a folder with the files that state bounds."""
    for name in newest.STATED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_bound_is_lifted_wherever_it_is_stated(tree):
    for name, bounds in (("vllm", VLLM), ("transformers", TRANSFORMERS)):
        newest.lift(tree, Release(name, "9.9", bounds, True))
        project, code = ((tree / file).read_text() for file in newest.STATED)
        assert f'"{name}==9.9"' in project and f'{name.upper()} = "==9.9"' in code and bounds not in project + code


def test_a_bound_that_is_not_stated_is_not_lifted(tree):
    """Else the other versions of the bounds would be tried, and nothing would say so."""
    with pytest.raises(SystemExit, match=r"^pyproject.toml states no bounds of torch, not <2$"):
        newest.lift(tree, Release("torch", "9.9", "<2", True))
    with pytest.raises(SystemExit, match=r"^pyproject.toml states \['>=0.*'\] of vllm, not <2$"):
        newest.lift(tree, Release("vllm", "9.9", "<2", True))
    supported = tree / newest.STATED[1]
    supported.write_text(supported.read_text().replace(VLLM, "<1"))
    with pytest.raises(SystemExit, match=r"^kvpop_vllm/supported.py states \['<1'\] of vllm, not >=0"):
        newest.lift(tree, Release("vllm", "9.9", VLLM, True))


def test_outcomes_are_those_of_pytest(tmp_path):
    marks = "import pytest\n@pytest.mark.slow\ndef test_d(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    (tmp_path / "test_it.py").write_text(marks + "def test_a(): pass\ndef test_b(): assert 0\n")
    (tmp_path / "test_other.py").write_text("import absent\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    log, tests = tmp_path / "it.log", ["test_it.py", "test_other.py"]
    result = newest.run_tests(Path(sys.executable), tmp_path, tests, log)
    assert not result.right and set(result.text.split(": ")[1].split(", ")) == {"test_it (1)", "test_other (1)"}
    assert result.text.startswith("2 failed, 1 passed, 1 skipped: ") and "No module named 'absent'" in log.read_text()


def test_a_report_without_failures(tmp_path):
    """The exit code counts too: pytest may break off."""
    report = tmp_path / "it.xml"
    assert newest.outcome(report, 4) == Outcome("pytest ended with code 4", False)
    report.write_text('<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>')
    assert newest.outcome(report, 0) == Outcome("1 passed, 0 skipped", True)
    assert not newest.outcome(report, 3).right


def test_table():
    outcomes = {
        Release("toy", "1.5", "<2", False): Outcome("3 passed, 0 skipped", True),
        Release("other", "2.0", "", True): Outcome("1 failed", False),
    }
    assert list(newest.table(outcomes)) == [
        "package  version  bounds          tests",
        "toy      1.5      <2      within  3 passed, 0 skipped",
        "other    2.0      none    beyond  ! 1 failed",
    ]
