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
FEW = "recency", "mlstm", "moments"


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
    assert said == log and said.splitlines()[-1] == "15 cases done, 0 cases wrong, 0 cases not reached"
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
    assert steps.keys() == {f"decode_step is right, {name}" for name in (*FEW, "heads that divide a budget")}
    assert min(steps.values()) >= 9
    chunks = {row["case"]: row["value"] for row in rows if row["measure"] == "chunks with equal sets"}
    assert chunks == {f"prefill_chunk is right, {name}": "2" for name in ("mlstm", "own decays")}
    assert [row["value"] for row in rows if row["measure"] == "sets that differ"] == ["0"]
    assert [row["value"] for row in rows if row["measure"] == "tokens that differ"] == ["0", "0"]
    assert [row["value"] for row in rows if row["measure"] == "caches that go on"] == ["4"]
    steps = {row["case"]: float(row["value"]) for row in rows if row["section"] == "distillation"}
    assert (
        steps.keys() == {"a step is right, scorers", "a step is right, scorers and base"} and max(steps.values()) < 1e-3
    )


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


def test_a_section_ends_when_its_share_does_and_one_that_is_broken_costs_no_other(script, monkeypatch):
    said = []
    bench = script.Bench("cpu", "torch.float32", True, False, time.monotonic() + 60, said.append)
    assert bench.left() > 50
    bench.until = time.monotonic() - 1
    assert bench.left() < 0
    assert script.SHARES.keys() == script.SECTIONS.keys() and list(script.SECTIONS)[-1] == "sanitizers"
    assert sum(share for name, share in script.SHARES.items() if name != "sanitizers") < 8
    monkeypatch.setitem(script.SECTIONS, "generation", "no_such_module:generation")
    assert script.imported(bench, "generation") is None
    assert said[0].startswith("generation: WRONG it cannot be imported: ModuleNotFoundError")


def test_what_is_said_of_contexts(script):
    """Growth, flat or not, and from where on KVpop is ahead of the faster dense cache."""
    generation = importlib.import_module("gpu_generation")

    def measured(*milliseconds, context):
        sizes = context, context, context // 4, 4096
        return {
            name: generation.Timed(None, size, 0, 0, None, each)
            for name, size, each in zip((*generation.DENSE, *generation.KVPOP), sizes, milliseconds, strict=True)
            if each
        }

    found = {
        131072: measured(30, 9, 7.5, 6.2, context=131072),
        16384: measured(8, 6, 6.1, 6.1, context=16384),
        65536: measured(18, 7.5, 6.9, 6.2, context=65536),
        32768: measured(12, 6.4, 6.5, 6.1, context=32768),
    }
    assert list(generation.in_short(found)) == [
        "dense: from 16384 to 131072 tokens the cache grows 8.00 times, latency 3.75 times: not flat",
        "dense, no mask: from 16384 to 131072 tokens the cache grows 8.00 times, latency 1.50 times: not flat",
        "kvpop, 75% off: from 16384 to 131072 tokens the cache grows 8.00 times, latency 1.23 times: not flat",
        "kvpop, B 4096: from 16384 to 131072 tokens the cache grows 1.00 times, latency 1.02 times: flat",
        "kvpop, 75% off: ahead of dense from 65536 tokens on",
        "kvpop, B 4096: ahead of dense from 32768 tokens on",
    ]
    found = {16384: measured(8, 6, 6.1, 6.1, context=16384), 32768: measured(0, 0, 6.5, 6.1, context=32768)}
    said = list(generation.in_short(found))
    assert said[0] == "dense: 1 contexts measured, which says nothing of growth"
    assert said[-1] == "kvpop, B 4096: not ahead of dense at the longest context measured"
    assert list(generation.in_short({}))[-1] == "kvpop, B 4096: not compared with dense"


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
