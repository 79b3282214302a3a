"""`make gpu`'s parts: time limits, what is done, and how answers are compared. The processes are real, the GPU is not."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from gpu import run
from gpu.answers import CLOSE, compare

MACHINE = {"gpu": "a GPU", "vllm": None, "sources": "a", "python": "3.12", "capability": "9.0"}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begin a run with modules of its own; return the run."""
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    paths = {"WORK": "", "MODULES": "modules", "EMPTY": "empty", "CACHES": "caches"}
    for name, folder in paths.items():
        monkeypatch.setattr(run, name, tmp_path / "work" / folder)
    monkeypatch.setattr(run, "BUNDLE", tmp_path / "no bundle")
    monkeypatch.setattr(run, "place_package", lambda folder: folder.mkdir(exist_ok=True))

    def begin(machine=MACHINE, **modules):
        monkeypatch.setattr(run.Run, "_machine", lambda self: machine)
        (tmp_path / "work" / "modules").mkdir(exist_ok=True)
        for name, text in modules.items():
            (tmp_path / "work" / "modules" / f"{name}.py").write_text(text)
        return run.Run(tmp_path / "out", 1.0)

    return begin


def part(name, *commands, seconds=60, **options):
    """Return a part of these commands."""

    return run.Part(name, seconds, lambda of_run: iter(commands), **{"needs_vllm": False} | options)


def test_a_part_that_overruns_is_ended_and_later_parts_run(start, tmp_path, capsys):
    child = "import os, pathlib, subprocess, time; p = subprocess.Popen(['sleep', '600']); "
    child += (
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(p.pid)); print('a row', flush=True); time.sleep(600)"
    )
    current = start(sleeps=child, works="print('works')", breaks="raise SystemExit(3)")
    begin = time.monotonic()
    assert not current.do(part("first", ["sleeps"], ["works"], seconds=10)) and time.monotonic() - begin < 60
    grandchild = Path("/proc", (tmp_path / "child").read_text(), "stat")
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":  # the signal takes effect a little later
        assert time.monotonic() - begin < 60, "what the process started is ended, too"
        time.sleep(0.1)
    assert not current.do(part("second", ["breaks"])) and current.do(part("third", ["works"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(",", 1)[0] for line in lines if line.startswith("[")] == [
        "[first] FAILED overran", "[second] FAILED exit code 3", "[third] done",
    ]  # fmt: skip
    assert "a row" in (tmp_path / "out" / "run.log").read_text()


def test_a_run_that_is_ended_ends_its_part(start, tmp_path, monkeypatch):
    write = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(os.getpid())); "
    current = start(sleeps=write + "time.sleep(600)")
    monkeypatch.setattr(run, "Run", lambda out, slack: current)
    monkeypatch.setattr(run, "PARTS", (part("first", ["sleeps"]),))
    monkeypatch.setattr("sys.argv", ["run.py"])

    def end():
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    usual = signal.getsignal(signal.SIGTERM)
    try:
        threading.Thread(target=end).start()
        with pytest.raises(SystemExit) as ended:
            run.main()
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert ended.value.code == 143 and not Path("/proc", (tmp_path / "child").read_text()).exists()


def test_a_part_that_cannot_start_costs_no_other(start, capsys):
    def breaks(of_run):
        raise OSError("no space")
        yield

    current = start(works="")
    assert not current.do(run.Part("breaks", 60, breaks, needs_vllm=False)) and current.do(part("next", ["works"]))
    assert "[breaks] FAILED no space, 0 s" in capsys.readouterr().out


def test_the_limit_of_all_parts_ends_a_part(start):
    current = start(sleeps="import time; time.sleep(600)")
    current.until = time.monotonic() + 1
    assert not current.do(part("last", ["sleeps"])) and time.monotonic() - current.until < 30
    assert sum(part.seconds for part in run.PARTS if not part.by_name_only) <= run.SECONDS == 480


def test_a_part_that_is_done_is_not_run_again(start, tmp_path, capsys):
    counts = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    assert start(counts=counts).do(part("first", ["counts"]))
    again = start()
    assert again.do(part("first", ["counts"])) and (tmp_path / "count").read_text() == "x"
    assert "[first] done before" in capsys.readouterr().out
    assert again.do(part("second", ["counts"])) and (tmp_path / "count").read_text() == "xx"


def test_results_of_other_code_are_not_mixed(start, tmp_path):
    assert not start(breaks="raise SystemExit(1)").do(part("first", ["breaks"]))
    with pytest.raises(SystemExit, match="out has results of other sources: move it away, or set OUT"):
        start(MACHINE | {"sources": "b"})


def test_without_vllm_its_parts_say_so(start, capsys):
    assert not start().do(part("engine", ["no_such_module"], needs_vllm=True))
    assert "[engine] not measured: install vLLM, or bring" in capsys.readouterr().out


def test_without_a_gpu_one_line_says_so(tmp_path, monkeypatch):
    for name in ("WORK", "MODULES", "EMPTY", "CACHES"):
        monkeypatch.setattr(run, name, tmp_path / name)
    monkeypatch.setattr(run, "BUNDLE", tmp_path / "no bundle")
    with pytest.raises(SystemExit, match="there is no GPU here that torch .* can use"):
        run.Run(tmp_path / "out", 1.0)


@pytest.mark.parametrize("foreign", [{"capability": "8.0"}, {"python": "3.11"}])
def test_a_bundle_for_another_gpu_or_python_is_refused(start, tmp_path, monkeypatch, foreign):
    monkeypatch.setattr(run, "has_vllm", lambda: False)
    (tmp_path / "no bundle").mkdir()
    start()
    with pytest.raises(SystemExit, match="is for Python 3.12 and compute capability 9.0, not .*: install vLLM"):
        start(MACHINE | foreign)


def test_where_vllm_is_installed_the_bundle_is_not_used(start, tmp_path, capsys):
    """This environment has vLLM, and the bundle is damaged, so using it would end the run."""
    (tmp_path / "no bundle").mkdir()
    for name in ("site.tar.xz", "site.tar.xz.sha256"):
        (tmp_path / "no bundle" / name).write_text("damaged")
    current = start(MACHINE | {"vllm": "0.33.0", "capability": "8.0"})
    assert f"[gpu] vLLM 0.33.0 is installed, so {tmp_path / 'no bundle'} is not used" in capsys.readouterr().out
    paths = [str(run.MODULES), str(run.ROOT / "benchmarks")]
    assert current.environment["PYTHONPATH"].split(":")[:2] == paths
    assert {name for name in current.environment if name.endswith(("CACHE_DIR", "CACHE_ROOT"))} <= set(os.environ)


def test_sections_run_by_name_only(start, tmp_path, monkeypatch, capsys):
    """Every section of the kernels is a part, which takes the name's module and ends before its limit."""
    current = start(MACHINE | {"vllm": "0.33.0"})
    monkeypatch.setattr(run, "Run", lambda out, slack: current)
    monkeypatch.setattr(current, "do", lambda part: print(part.name, *part.commands(current)) or True)
    monkeypatch.setattr(run, "TABLES", ())

    def parts(*arguments):
        monkeypatch.setattr("sys.argv", ["run.py", *arguments])
        capsys.readouterr()
        assert run.main() == 0
        return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[gpu]")]

    assert not {line.split()[0] for line in parts()} & run.SECTIONS.keys()
    out = tmp_path / "out"
    assert parts("tiles", "correct")[1:] == [f"tiles {['gpu.sections', 'tiles', '--minutes', '2.00', '--out', out]}"]
    for name, seconds in run.SECTIONS.items():
        (line,) = parts(name)
        assert line.startswith(f"{name} ['gpu.sections', '{name}'") and seconds - run.LAST_CASE >= 60
        assert importlib.util.find_spec(f"gpu.{name.removesuffix('-kernels')}")


def test_a_users_packages_are_found_after_ours(start, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    paths = start().environment["PYTHONPATH"].split(":")
    assert paths == [str(run.MODULES), str(run.ROOT / "benchmarks"), "/theirs"]
    monkeypatch.delenv("PYTHONPATH")
    assert start().environment["PYTHONPATH"].split(":") == paths[:2], "an empty entry is the current folder"


def test_answers_are_compared_up_to_near_ties():
    def record(*tokens, leads=None):
        return {"tokens": list(tokens), "leads": leads or [9.0] * len(tokens)}

    expected = [record(1, 2, 3), record(1, 2, 3, leads=[9, CLOSE / 2, 9]), record(1, 2, 3, leads=[CLOSE / 2, 9, 9])]
    assert compare(expected, expected) == {"same": 3, "near-tie": 0, "different": 0}
    actual = [record(1, 2), record(1, 7, 8), record(1, 7, 3)]
    assert compare(expected, actual) == {"same": 0, "near-tie": 1, "different": 2}
    with pytest.raises(ValueError):
        compare(expected, expected[:2])
