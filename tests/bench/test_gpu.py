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
    assert said == log and said.splitlines()[-1] == "all is well" and "WRONG" not in said
    assert {row["machine"] for row in rows} == {"interpreter"} and {row["commit"] for row in rows} == {"abc"}
    assert not [row for row in rows if row["unit"] == "ms"]
    kernels = {"sets that differ", "largest error", "steps with equal sets"}
    assert {row["measure"] for row in rows} == kernels and {row["dtype"] for row in rows} == {"float32"}
    named = {row["case"].split(",")[0] for row in rows}
    assert named >= {"running_topk", "out", "lse", "dq", "dk", "dv", "mass", "mlstm h", "mlstm df"}
    assert all(float(row["value"]) < 4 for row in rows if row["measure"] != "steps with equal sets")
    steps = {row["case"]: float(row["value"]) for row in rows if row["measure"] == "steps with equal sets"}
    assert steps.keys() == {"recency", "mlstm", "moments"} and min(steps.values()) >= 12


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def test_a_case_that_breaks_costs_no_other(script, tmp_path):
    said, rows = [], []
    bench = script.Bench("cpu", "torch.float32", True, False, time.monotonic() + 60, said.append)
    about = dict.fromkeys(("machine", "commit", "torch", "triton"), "x")

    def breaks():
        yield bench.row("a", "before", 1.0, "ms", floor=0.5)
        raise AssertionError("error 3 exceeds 2")

    assert script.run_case(bench, "section", "a", breaks, rows.extend, about)
    assert any("section, a: WRONG AssertionError: error 3 exceeds 2" in line for line in said)
    assert [(row["measure"], row["value"], row["floor"], row["over_floor"]) for row in rows] == [
        ("before", "1", "0.5", "2.000")
    ]
    assert not script.run_case(
        bench, "section", "b", lambda: iter([bench.row("b", "after", 2.0, "ms")]), rows.extend, about
    )
    assert [row["section"] for row in rows] == ["section"] * 2 and rows[1]["over_floor"] == ""
    late = script.Bench("cpu", "torch.float32", True, False, time.monotonic() - 1, said.append)
    assert not script.run_case(late, "section", "c", breaks, rows.extend, about)
    assert said[-1] == "section, c: not reached" and len(rows) == 2


def test_what_cannot_be_run_is_refused(script, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here: give --interpret"):
        script.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
