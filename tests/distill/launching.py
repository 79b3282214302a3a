"""Tiny training runs in processes of their own (:mod:`distill.train_tiny`)."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
IMPORTS = os.pathsep.join([str(TESTS), *filter(None, sys.path)])


def launch(
    *args, processes: int = 1, file_size: int | None = None, script: str = "train_tiny.py", seconds: float = 300
) -> subprocess.CompletedProcess:  # fmt: skip
    """Run ``train_tiny.main(*args)`` in one process, or in several by torchrun.

    Args:
        script: another script in this folder.
        file_size: largest number of bytes that a file may have.
        seconds: limit, after which it is ended.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(TESTS / "distill" / script)]

    def limit():
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    options = {"timeout": seconds, "env": os.environ | {"PYTHONPATH": IMPORTS}, "preexec_fn": limit}
    return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, **options)


def last_loss(run: subprocess.CompletedProcess) -> float:
    """Return the last loss of a run."""
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-3000:]
    return float(lines[0].split()[1])
