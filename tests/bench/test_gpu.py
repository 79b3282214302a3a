"""`make gpu` on a machine without one: the same script, interpreted, at reduced shapes."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Output and rows of a run as typed, from nothing but the repository."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--interpret", "--out", str(out), "--commit", "abc"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    outcome = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    with (out / "gpu.csv").open(newline="") as file:
        return outcome.stdout, list(csv.DictReader(file)), (out / "gpu.log").read_text()


def test_all_is_right_and_nothing_is_timed(interpreted):
    said, rows, log = interpreted
    assert said == log and said.splitlines()[-1] == "9 cases done, 0 cases wrong, 0 cases not reached"
    assert {row["machine"] for row in rows} == {"interpreter"} and {row["commit"] for row in rows} == {"abc"}
    assert not [row for row in rows if row["unit"] == "ms"]
    assert {row["dtype"] for row in rows} == {"float32"}
    errors = {row["measure"].split(",")[0]: float(row["value"]) for row in rows if "largest error" in row["measure"]}
    assert errors.keys() == {
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
        "mass",
        *(f"mlstm {n}" for n in ("h", "dq", "dk", "dv", "di", "df")),
    }
    assert max(errors.values()) < 4
    steps = {row["case"]: float(row["value"]) for row in rows if row["measure"] == "steps with equal sets"}
    assert steps.keys() == {f"decode_step is right, {name}" for name in ("recency", "mlstm", "moments")}
    assert min(steps.values()) >= 12
    chunks = {row["case"]: row["value"] for row in rows if row["measure"] == "chunks with equal sets"}
    assert chunks == {f"prefill_chunk is right, {name}": "2" for name in ("mlstm", "own decays")}
    assert [row["value"] for row in rows if row["measure"] == "sets that differ"] == ["0"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def test_a_case_that_breaks_costs_no_other(script, tmp_path):
    said, path = [], tmp_path / "gpu.csv"
    bench = script.Bench("cpu", "torch.float32", True, False, time.monotonic() + 60, said.append)
    about = dict.fromkeys(("machine", "commit", "torch", "triton"), "x")

    def run(case, measure, bench=bench):
        return script.run_case(bench, "section", case, measure, path, about)

    def breaks():
        yield bench.row("before", 1.0, "ms", floor=0.5)
        raise AssertionError("error 3 exceeds 2")

    assert run("a", breaks) == "wrong" and bench.wrong == {"a"}
    assert any("section, a: WRONG AssertionError: error 3 exceeds 2" in line for line in said)
    assert run("b", lambda: iter([bench.row("after", 2.0, "ms")])) == "done"
    late = script.Bench("cpu", "torch.float32", True, False, time.monotonic() - 1, said.append)
    assert run("c", breaks, late) == "not reached" and said[-1] == "section, c: not reached"
    rows = list(csv.DictReader(path.open(newline="")))
    assert [(row["case"], row["measure"], row["value"], row["floor"], row["over_floor"]) for row in rows] == [
        ("a", "before", "1", "0.5", "2.000"), ("b", "after", "2", "", ""),
    ]  # fmt: skip


def test_the_kernels_are_those_of_this_folder_and_the_tests_are_too(interpreted, script):
    """Whatever is installed: another checkout's kernels, another package of the name of the tests'."""
    code = (
        f"import sys, types; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); sys.modules['kernels'] = types.ModuleType('kernels')\n"
        "import gpu; gpu.take_kernels_from(gpu.ROOT); import kvpop_vllm.kernels.triton as t\n"
        "with gpu.tests_of(gpu.ROOT): import kernels.naive as n\n"
        "print(t.__file__, n.__file__, hasattr(sys.modules['kernels'], '__path__'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(ROOT / "triton_kernels/__init__.py"), str(ROOT / "tests/kernels/naive.py"), "False"]


def test_a_record_without_git(script, monkeypatch):
    record = importlib.import_module("record")
    monkeypatch.setenv("PATH", "")
    assert record.commit() == "none"


def test_what_cannot_be_run_is_refused(script, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here: give --interpret"):
        script.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
