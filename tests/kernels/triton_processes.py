"""Triton decides when it is imported whether it interprets: tests of its kernels run in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Compute capability -> bytes of shared memory that a block may have."""


def run_interpreted(*tests: str) -> None:
    """Runs tests, all of them, in a process whose kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert re.search(r"\d+ passed", outcome.stdout) and "deselected" not in outcome.stdout


def compile_few(cache: Path, *options: str) -> dict:
    """What ``triton_resources.py`` says of kernels of a few rules, compiled through their own launches in a process that has no
    interpreter; cache: an empty folder."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(ROOT / "tests/kernels/triton_resources.py"), *options, "--json", "few"]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.splitlines()[-1])
