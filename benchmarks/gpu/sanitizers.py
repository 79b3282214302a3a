"""Few cases of `decode_step` and `prefill_chunk` under compute-sanitizer, which reports errors in the log."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import SkipTest

from gpu.sections import Bench, Case

TOOLS = "memcheck", "racecheck"
"""Tools of compute-sanitizer; racecheck watches shared memory only, not what several warps write to pages."""
FOUND = re.compile(r"=========\s+(Invalid|Error|Race|Program hit)")
LEAST = 45.0
"""Seconds that must be left for a tool to begin."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    for tool in () if bench.few else TOOLS:
        yield Case(f"decode_step and prefill_chunk under {tool}", partial(sanitized, tool=tool))


def sanitized(bench: Bench, tool: str) -> Iterator[dict]:
    """Run the few cases under a tool, which `timeout` kills with its children when the time is over.

    Raises:
        SkipTest: the tool does not exist, or there is not enough time.
    """
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise SkipTest("compute-sanitizer is not on this machine")
    if (left := bench.left()) < LEAST:
        raise SkipTest(f"{left:.0f} s are left, and it needs {LEAST:.0f}")
    limit = max(LEAST, left - LEAST) if tool == TOOLS[0] else left
    with tempfile.TemporaryDirectory() as folder:
        command = ["timeout", "--signal=KILL", str(limit), program, "--tool", tool, "--error-exitcode", "9"]
        command += [
            sys.executable,
            "-m",
            "gpu.sections",
            "serving-kernels",
            "prefill-kernels",
            "--watched",
            "--out",
            folder,
        ]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else memory next to a tensor is valid too
        environment["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        done = subprocess.run(command, env=environment, **pipes)
    assert not FOUND.search(done.stdout), f"{tool}: {done.stdout[-1500:]}"
    if done.returncode in (-9, 137):
        raise SkipTest(f"not done in the {limit:.0f} s that it had")
    assert done.returncode == 0, f"{tool}: {done.stdout[-1500:]}"
    yield bench.row(f"errors under {tool}", 0, "count")
