"""Tests of the GPU backend with vLLM's own classes, in a process that they take for one with a GPU (cuda_platform.py).

Only the device itself is missing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("marks, fewest", [("not nightly", 51), ("nightly", 1)])
def test_in_a_process_with_a_gpu_that_is_not_there(marks, fewest):
    """Run the tests of test_cuda_*.py in a process with a pretended GPU."""
    files = sorted(map(str, Path(__file__).parent.glob("test_cuda_*.py")))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "engine.cuda_platform", "-m", marks]
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"KVPOP_PRETEND_CUDA": "1", "TRITON_INTERPRET": "1", "KVPOP_SLOW_UNTIL": "inf"}
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", *options, *files]
    outcome = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", outcome.stdout)[1]) >= fewest
