"""The rehearsal of `make gpu` fails when it should: each test plants a fault in a copy of the checkout.

They run where `make gpu-rehearse` has been run, as `make nightly` does first: it makes the pretended device and
compiles the kernels.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
NEEDED = "benchmarks/gpu kvpop_vllm triton_kernels tests/kernels tests/engine examples/reasoner/model examples/scorers".split()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BUILD / "rehearsal" / "work" / "caches" / "triton").exists(), reason="`make gpu-rehearse` has not been run"
    ),
]


@pytest.fixture
def rehearse(tmp_path):
    """Replace texts in a copy of the checkout and rehearse parts; return the exit code and what was printed."""
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in NEEDED:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for path in (ROOT / "Makefile", *(ROOT / "benchmarks").glob("*.py")):
        shutil.copy(path, copy / path.relative_to(ROOT))
    work, original = copy / "build" / "gpu" / "rehearsal" / "work", BUILD / "rehearsal" / "work"
    work.mkdir(parents=True)
    for name in ("machine", "pretend", "headers", "site", "bundle"):
        (copy / "build" / "gpu" / name).symlink_to(BUILD / name)
    (work / "site").symlink_to(original / "site")
    for mark in original.glob("*.tar"):
        shutil.copy(mark, work)
    shutil.copytree(original / "caches", work / "caches")

    def run(*arguments, file=None, old="", new=""):
        if file:
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{file} has another number of {old!r}"
            (copy / file).write_text(text.replace(old, new))
        command = [sys.executable, copy / "benchmarks" / "gpu" / "rehearse.py", *arguments]
        outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        log = copy / "build" / "gpu" / "rehearsal" / "results" / "run.log"
        return outcome.returncode, outcome.stdout + outcome.stderr + (log.read_text() if log.exists() else "")

    return run


def test_the_checkout_as_it_is_passes(rehearse):
    code, printed = rehearse("correct")
    assert code == 0 and "[gpu-rehearse] passed" in printed, printed[-4000:]


def test_a_name_that_the_machines_torch_lacks(rehearse):
    old = "from kvpop_vllm.kernels.dispatch import TRITON_DTYPES\n"
    new = old + "from torch import later_than_2_11\n"
    code, printed = rehearse("correct", file="triton_kernels/decode_step.py", old=old, new=new)
    assert code == 1 and "cannot import name 'later_than_2_11' from 'torch'" in printed, printed[-4000:]


def test_a_kernel_that_does_not_compile_for_sm_90(rehearse):
    """Its instruction is one of newer GPUs, so only the assembler for sm_90 refuses it."""
    old = "        victim = tl.load(flags + 5)\n"
    assembly = '"tcgen05.fence::before_thread_sync; mov.u32 $0, $1;", "=r,r"'
    new = f"{old}        tl.inline_asm_elementwise({assembly}, [victim], tl.int32, False, 1)\n"
    code, printed = rehearse("correct", file="triton_kernels/_serving_retain.py", old=old, new=new)
    assert code == 1 and "PTXASError" in printed and "tcgen05" in printed, printed[-4000:]


def test_a_cpu_tensor_that_a_kernel_is_given(rehearse):
    old = "views = map(view, (q, k, v, gate_scores, positions, budgets, windows, keys, *of_prefix))"
    new = old.replace("positions", "positions.cpu()")
    code, printed = rehearse("correct", file="triton_kernels/decode_step.py", old=old, new=new)
    assert code == 1 and "cannot be accessed from Triton (cpu tensor?)" in printed, printed[-4000:]


def test_a_step_that_captures_no_graph(rehearse):
    old = 'cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=list(BATCHES)'
    new = old.replace("FULL_DECODE_ONLY", "NONE")
    code, printed = rehearse("stock-engine", file="benchmarks/gpu/run.py", old=old, new=new)
    assert "[stock-engine] done" in printed, printed[-4000:]
    assert code == 1 and "gpu.engine_times stock: no graph was captured" in printed
    assert "decode steps of 16 requests replayed no graph" in printed


def test_a_part_that_overruns(rehearse):
    old = "    options = parse_arguments(arguments)\n"
    new = f"{old}    time.sleep(3600)\n"
    code, printed = rehearse("correct", "--slack", "0.1", file="benchmarks/gpu/sections.py", old=old, new=new)
    assert code == 1 and "[correct] FAILED overran" in printed, printed[-4000:]


def test_a_name_that_vllm_lacks(rehearse):
    """The glue's imports are compared with the machine's vLLM, also those that nothing has run."""
    old = "import functools\n"
    new = f"{old}\n\ndef moved():\n    from vllm.v1.worker.gpu.model_runner import NoSuchRunner\n"
    code, printed = rehearse("correct", file="kvpop_vllm/vllm_glue/plugin.py", old=old, new=new)
    assert "[correct] done" in printed, printed[-4000:]
    assert code == 1 and "NoSuchRunner" in printed and "FAULT: vLLM lacks what is printed above" in printed
