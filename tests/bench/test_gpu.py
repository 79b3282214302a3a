"""`make gpu` on a machine without a GPU: interpreted, and its times at tiny shapes by the CPU's kernels."""

import csv
import dataclasses
import gc
import math
import os
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest

import pytest
import record
import torch
from gpu import rehearse, sections
from gpu.sections import Bench, Case

from kvpop_vllm.kernels import dispatch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log():
    """Lines of the log."""
    return []


@pytest.fixture
def bench(log):
    """Bench as on a GPU, except for the device and the dtype."""
    return Bench("cpu", torch.float32, False, False, time.monotonic() + 600, log.append)


@pytest.fixture
def results(tmp_path):
    """CSV file, and the columns that all its rows share."""
    return tmp_path / "gpu.csv", dict.fromkeys(("machine", "commit", "torch", "triton"), "x")


@pytest.mark.slow
def test_all_is_right_and_nothing_is_timed(tmp_path):
    """The command runs from the repository alone, with its kernels and tests, whatever else is installed."""
    (tmp_path / "kernels.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "gpu.sections", "--interpret", "--out", str(tmp_path), "--commit", "a"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT / 'benchmarks'}"
    outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    assert outcome.stdout == (tmp_path / "gpu.log").read_text()
    assert outcome.stdout.splitlines()[-1] == (
        "17 cases done, 0 cases done before, 0 cases wrong, 1 cases skipped, 0 cases not reached"
    )
    rows = list(csv.DictReader((tmp_path / "gpu.csv").open(newline="")))
    common = {tuple(row[name] for name in ("machine", "commit", "dtype")) for row in rows}
    assert common == {("interpreter", "a", "float32")} and "ms" not in {row["unit"] for row in rows}
    errors = {row["measure"].split(",")[0]: float(row["value"]) for row in rows if "largest error" in row["measure"]}
    gradients = {f"mlstm {name}" for name in ("h", "dq", "dk", "dv", "di", "df")}
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv", "mass"} | gradients and max(errors.values()) < 4
    steps = [
        float(row["value"]) for row in rows if row["section"] == "distillation" and row["measure"] != sections.TIME
    ]
    assert len(steps) == 2 and 0 < min(steps) and max(steps) < 1e-3  # 0 would mean that the same kernels ran


def test_an_error_costs_no_other_case_and_no_other_section(monkeypatch, bench, log, results):
    def breaks(bench):
        yield bench.row("before", 1.0, "ms", floor=0.5)
        raise AssertionError("error 3 exceeds 2")

    def works(bench):
        yield bench.row("after", 2.0, "ms")

    def doubts(bench):
        bench.check(False, "outputs are not finite")
        yield from works(bench)

    def skips(bench):
        raise SkipTest("there is no such tool")
        yield

    def first(bench):
        yield Case("a", breaks)
        yield Case("needs a", works, needs=("a",))
        yield Case("doubts", doubts)
        yield Case("b", works, needs=("c",))
        raise KeyError("hidden_size")

    def third(bench):
        yield Case("skips", skips)
        bench.until = time.monotonic() - 1
        yield Case("late", breaks)

    for name, cases in {"first": first, "third": third}.items():
        monkeypatch.setitem(sys.modules, f"gpu.{name}", SimpleNamespace(cases=cases))
    assert sections.run_sections(bench, dict.fromkeys(("first", "second", "third"), 60.0), *results) == 1
    for line in (
        "first, a: WRONG AssertionError: error 3 exceeds 2",
        "first, needs a: after 2 ms (unverified)",
        "first, doubts: after 2 ms (unverified)",
        "first: WRONG KeyError: 'hidden_size'",
        "second: WRONG ModuleNotFoundError: No module named 'gpu.second'",
        "third, skips: skipped, there is no such tool",
        "third, late: not reached",
    ):
        assert line in log
    assert any(line.startswith("first, needs a: unverified, a is not right") for line in log)
    assert any(line.startswith("first, doubts: unverified, outputs are not finite") for line in log)
    assert log[-1] == "1 cases done, 0 cases done before, 5 cases wrong, 1 cases skipped, 1 cases not reached"
    rows = [row for row in csv.DictReader(results[0].open(newline="")) if row["measure"] != sections.TIME]
    names = "case", "verified", "measure", "value", "floor", "over_floor"
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("a", "yes", "before", "1", "0.5", "2.000"), ("needs a", "no", "after", "2", "", ""),
        ("doubts", "no", "after", "2", "", ""), ("b", "yes", "after", "2", "", ""),
    ]  # fmt: skip

    log.clear()
    bench.outcomes.clear()
    bench.until = time.monotonic() + 60
    assert sections.run_sections(bench, {"first": 60.0}, *results) == 1
    assert log[-1] == "0 cases done, 1 cases done before, 4 cases wrong, 0 cases skipped, 0 cases not reached"
    later = results[1] | {"commit": "y"}
    sections.run_sections(bench, {"first": 60.0}, results[0], later)
    assert log[-1].startswith("1 cases done, 1 cases done before"), "of another commit"


def test_a_sanitizer_is_ended_with_all_it_started(monkeypatch, bench, log, results, tmp_path):
    from gpu import sanitizers

    tool, child = tmp_path / "compute-sanitizer", tmp_path / "child"
    tool.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {child}; wait\n")
    tool.chmod(0o755)

    def outcome():
        bench.until = time.monotonic() + 4
        sections.run_case(bench, "s", Case("c", partial(sanitizers.sanitized, tool="racecheck")), *results)
        return dict(bench.outcomes)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert outcome() == {"skipped": 1} and not child.exists() and log[-1].endswith("s are left, and it needs 45")
    monkeypatch.setattr(sanitizers, "LEAST", 0.5)
    assert outcome() == {"skipped": 2} and "not done in the" in log[-1]
    ended = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not ended.exists() or ended.read_text().split()[2] == "Z"
    tool.write_text("#!/bin/sh\necho '========= Invalid __global__ read of size 4 bytes'; sleep 600\n")
    assert outcome() == {"skipped": 2, "wrong": 1} and any("========= Invalid" in line for line in log)


def test_times_at_tiny_shapes(bench, log, results, monkeypatch):
    """Whatever is timed on a GPU runs by the CPU's kernels, where only clocks, graphs and peers are stand-ins."""
    from gpu import distillation, generation, prefill, serving, tiles, training

    def timed(run):
        run()
        return 1.0

    for kind in ("serving", "training"):
        usual = lambda op, impl, tensor: dispatch.resolve(op, "auto", tensor)  # noqa: E731
        monkeypatch.setattr(f"kvpop_vllm.kernels.ops.{kind}.resolve", usual)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: 1 << 30)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (8 << 30, 8 << 30))
    paper = dataclasses.replace(distillation.PAPER, length=96, window=[8], topk=[20])
    shape = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, vocab_size=256)
    constants = {
        serving: dict(
            SEEN=6000, LAYERS=2, PROTECTED=70, PROFILED=(1,), DENSE=((70, 1),), graph_of=lambda run: run() or run
        ),
        prefill: dict(
            LENGTH=4096,
            CHUNK=4,
            LAYERS=2,
            PROMPTS=((1, 70), (3, 50)),
            compiled_flex=lambda *mask: prefill.dense,
            check_same=print,
        ),
        tiles: dict(LENGTH=4096, BATCHES=(1, 2), DECODING=[(16, 64, 4, 5)], PREFILLING=[(128, 64, 8, 5)]),
        training: dict(LENGTH=96, compiled_flex=lambda *mask: training.dense, check_same=print),
        generation: dict(CONTEXTS=(400, 3 << 30), QWEN3_8B=generation.QWEN3_8B.__class__(**shape, head_dim=32)),
        distillation: dict(
            LENGTH=96,
            LONG=96,
            MARGIN=math.inf,  # the memory is a stand-in too
            PAPER=paper,
            CONFIG=distillation.CONFIG.__class__(**shape),
            QWEN3_8B=distillation.QWEN3_8B | shape | {"head_dim": 32, "torch_dtype": "float32"},
        ),
    }
    common = dict(HEADS=4, KV_HEADS=2, SIZE=32, WINDOW=8, bandwidth=lambda: 1e9, milliseconds=timed)
    common |= dict(wall_milliseconds=timed, device_times=lambda run: {"_attend": timed(run)})
    for module, values in constants.items():
        for name, value in (common | values).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        for case in module.cases(bench):
            sizes = {word for word in case.name.replace(",", "").split() if word.isdigit()}
            if case.needs and not sizes & {"2", "4", "8", "16", "32", "64", "128", "256", "3580", "4096"}:
                sections.run_case(bench, module.__name__, case, *results)
    assert not bench.wrong, "\n".join(line for line in log if "WRONG" in line)
    for timed in ("gpu.tiles, decoding, 16x64 w4 s5: batch 2", "gpu.tiles, prefill, 128x64 w8 s5: S 4096"):
        assert any(line.startswith(timed) for line in log)
    assert bench.outcomes["skipped"] == 2  # caches that do not fit


def test_a_replay_keeps_the_tensors_of_its_graph(monkeypatch):
    """Memory that a caller lets go of must not be given to others while a graph reads it."""
    from gpu.clock import graph_of

    class Tensor:
        pass

    tensor = Tensor()
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr("torch.cuda.graph", lambda graph: nullcontext())
    replay, alive = graph_of(lambda tensor=tensor: tensor), weakref.ref(tensor)
    del tensor
    gc.collect()
    replay()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


def test_launches_beyond_those_of_stock_vllm_are_a_fault(monkeypatch):
    """They are counted for each engine and prompt, against stock's of the same process; decode steps have no limit."""

    def process(**launches):
        kinds = {"prefill": (2, 80), "decode": (2, 2)}
        steps = [
            dict(engine=name, budget="", kind=kind, requests=n, tokens=tokens, counts=[{"launches": count}] * 5)
            for name, count in launches.items()
            for kind, (n, tokens) in kinds.items()
        ]
        return {"steps": steps}

    monkeypatch.setattr(rehearse, "MOST_LAUNCHES", {"kvpop": 10})
    assert rehearse.launch_faults([process(stock=100, kvpop=110), process(kvpop=900)]) == []
    (fault,) = rehearse.launch_faults([process(stock=100, kvpop=111)])
    assert fault == "kvpop: a step of 2 prompts, 80 tokens, launches 11 more than stock"


def test_what_cannot_be_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here: give --interpret"):
        sections.main(["--out", str(tmp_path)])
    monkeypatch.setenv("PATH", "")
    assert record.commit() == "none" and not list(tmp_path.iterdir())
