"""`make gpu` on a machine without a GPU: the same script, interpreted, at reduced shapes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import gpu
import pytest
import record
from gpu import Case, Skipped

ROOT = Path(__file__).parents[2]
FEW = "recency", "mlstm", "moments"


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Output, rows and log of the command, run from the repository alone."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--interpret", "--out", str(out), "--commit", "abc"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    outcome = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    with (out / "gpu.csv").open(newline="") as file:
        return outcome.stdout, list(csv.DictReader(file)), (out / "gpu.log").read_text()


def test_all_is_right_and_nothing_is_timed(interpreted):
    said, rows, log = interpreted
    assert said == log and "stays as slow" not in said
    assert said.splitlines()[-1] == "16 cases done, 0 cases wrong, 0 cases skipped, 0 cases not reached"
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
    assert steps.keys() == {f"decode_step is right, {name}" for name in FEW}
    assert min(steps.values()) >= 12
    chunks = {row["case"]: row["value"] for row in rows if row["measure"] == "chunks with equal sets"}
    assert chunks == {f"prefill_chunk is right, {name}": "2" for name in ("mlstm", "own decays")}
    assert [row["value"] for row in rows if row["measure"] == "sets that differ"] == ["0"]
    assert [row["value"] for row in rows if row["measure"] == "tokens that differ"] == ["0", "0"]
    assert [row["value"] for row in rows if row["measure"] == "caches that go on"] == ["1", "2"]
    steps = {row["case"]: float(row["value"]) for row in rows if row["section"] == "distillation"}
    assert steps.keys() == {"a step is right, scorers", "a step is right, scorers and base"}
    assert 0 < min(steps.values()) and max(steps.values()) < 1e-3  # 0 would mean that the same kernels ran


def test_a_case_that_breaks_costs_no_other(small, said, results):
    def run(case, measure):
        return gpu.run_case(small, "section", Case(case, measure, needs=("b",)), *results)

    def breaks(bench):
        yield bench.row("before", 1.0, "ms", floor=0.5)
        raise AssertionError("error 3 exceeds 2")

    assert run("a", breaks) == "wrong" and small.wrong == {"a"}
    assert any("section, a: WRONG AssertionError: error 3 exceeds 2" in line for line in said)
    assert run("b", lambda bench: iter([bench.row("after", 2.0, "ms")])) == "done"
    small.until = time.monotonic() - 1
    assert small.left() < 0 and run("c", breaks) == "not reached" and said[-1] == "section, c: not reached"
    small.wrong.add("b")
    assert run("d", breaks) == "skipped" and said[-1] == "section, d: not timed, as it is wrong that b"
    rows = list(csv.DictReader(results[0].open(newline="")))
    assert [(row["case"], row["measure"], row["value"], row["floor"], row["over_floor"]) for row in rows] == [
        ("a", "before", "1", "0.5", "2.000"), ("b", "after", "2", "", ""),
    ]  # fmt: skip


def test_a_sanitizer_has_a_share_of_the_time():
    assert gpu.SHARES.keys() == gpu.SECTIONS.keys() and list(gpu.SECTIONS)[-1] == "sanitizers"
    shares = sum(share for name, share in gpu.SHARES.items() if name != "sanitizers")
    assert gpu.parse_arguments([]).minutes == 7.5 and 60 * 7.5 * (1 - shares / 8) > 60


def test_a_section_that_breaks_between_its_cases_costs_no_other(monkeypatch, small, said, results):
    def breaks(bench):
        yield Case("a", lambda bench: iter(()))
        raise KeyError("hidden_size")

    def skips(bench):
        def run(bench):
            raise Skipped("there is no such tool")
            yield

        yield Case("b", run)
        yield Case("c", lambda bench: iter(()))
        yield Case("times", run, needs=("b",))  # not of reduced shapes

    monkeypatch.setitem(gpu.SECTIONS, "second", "no_such_module:generation")
    sections = {"first": breaks, "second": gpu.imported("second"), "third": skips}
    assert gpu.run_sections(small, sections, {"first": 30.0}, *results) == 1
    assert any(line.startswith("first: WRONG between its cases") and "KeyError: 'hidden_size'" in line for line in said)
    assert any(line.startswith("second: WRONG between its cases") and "ModuleNotFoundError" in line for line in said)
    assert "third, b: skipped, there is no such tool" in said
    assert said[-1] == "2 cases done, 2 cases wrong, 1 cases skipped, 0 cases not reached"


def test_a_tool_is_ended_with_all_it_started_and_begun_only_where_there_is_time(
    monkeypatch, on_cpu, said, results, tmp_path
):
    import gpu_serving as serving

    tool, child = tmp_path / "compute-sanitizer", tmp_path / "child"
    tool.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {child}; wait\n")
    tool.chmod(0o755)

    def outcome(left):
        on_cpu.until = time.monotonic() + left
        return gpu.run_case(on_cpu, "s", Case("c", partial(serving.sanitized, tool="memcheck")), *results)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert outcome(40) == "skipped" and not child.exists() and said[-1].endswith("s are left, and it needs 45")
    monkeypatch.setattr(serving, "LEAST", 0.5)
    begin = time.monotonic()
    assert outcome(1.5) == "skipped" and said[-1].endswith("not done in the 1 s that it had")
    assert time.monotonic() - begin < 20
    ended = Path(f"/proc/{child.read_text().strip()}/stat")
    for _ in range(100):
        if not ended.exists() or ended.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the tool started goes on")
    tool.write_text("#!/bin/sh\necho '========= Invalid __global__ read of size 4 bytes'; sleep 600\n")
    assert outcome(1.5) == "wrong" and any("ended before it was done: ========= Invalid" in line for line in said)
    monkeypatch.setenv("PATH", "/nowhere")
    assert outcome(60) == "skipped" and said[-1].endswith("compute-sanitizer is not on this machine")


def test_launches_are_queued_before_the_clock_starts_and_graphs_share_a_stream(monkeypatch):
    import gpu_clock as clock

    cuda, run = MagicMock(), MagicMock()
    cuda.attach_mock(run, "run")
    cuda.Event.return_value.elapsed_time.return_value = 2000.0
    for name in ("Event", "Stream", "stream", "CUDAGraph", "graph", "current_stream", "_sleep"):
        monkeypatch.setattr(f"torch.cuda.{name}", getattr(cuda, name))
    clock.side_stream.cache_clear()
    assert clock._once(run) == 2.0
    order = [name for name, *_ in cuda.mock_calls if name in ("_sleep", "Event().record", "run")]
    assert order == ["_sleep", "Event().record", "run", "Event().record"]
    run.reset_mock()
    for _ in range(2):
        clock.graph_of(run)
    assert [call.kwargs for call in cuda.graph.call_args_list] == [{"stream": clock.side_stream()}] * 2
    clock.side_stream.cache_clear()
    assert run.call_count == 4 and cuda.Stream.call_count == 1


def test_prompts_of_rules_that_are_dear(on_cpu, monkeypatch):
    """Expensive rules, with decays per token or taken token by token, run on CPU kernels at a small shape."""
    import gpu_prefill as prefill

    chunk, calls = prefill.ops.prefill_chunk, []

    def counted(q, *place, impl, **named):
        calls.append((len(q), place[4]))
        return chunk(q, *place, impl="auto", **named)

    small = dict(HEADS=4, KV_HEADS=2, SIZE=32, WINDOW=8, LENGTH=96, CHUNK=4, bandwidth=lambda: 1e12)
    for name, value in (small | {"seconds": lambda run, rounds: run().numel() and 0.008}).items():
        monkeypatch.setattr(prefill, name, value)
    monkeypatch.setattr(prefill.ops, "prefill_chunk", counted)
    [row] = prefill.ages_times(on_cpu, 32)
    assert (row["measure"], row["value"]) == ("a layer, S 96", "8") and calls == [(96, 0)] * 2
    calls.clear()
    [row] = prefill.mass_times(on_cpu, 32)
    assert (row["measure"], row["value"]) == ("a token, a layer", "2") and calls == [(32, 0), (4, 32), (4, 36)]
    names = [case.name for case in prefill.prefill_kernels(on_cpu)]
    assert names[-2:] == ["prefill_chunk, own decays, B 2048", "prefill_chunk, mean mass, B 2048"]


def test_the_kernels_are_those_of_this_folder_and_the_tests_are_too(interpreted):
    """The script uses the kernels and tests of its own checkout, whatever else is installed."""
    code = (
        f"import sys, types; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); sys.modules['kernels'] = types.ModuleType('kernels')\n"
        "import gpu; gpu.take_kernels_from(gpu.ROOT); import kvpop_vllm.kernels.triton as t\n"
        "with gpu.tests_of(gpu.ROOT): import kernels.naive as n\n"
        "print(t.__file__, n.__file__, hasattr(sys.modules['kernels'], '__path__'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(ROOT / "triton_kernels/__init__.py"), str(ROOT / "tests/kernels/naive.py"), "False"]


def test_a_record_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record.commit() == "none"


def test_what_cannot_be_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here: give --interpret"):
        gpu.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
