"""Tiny training runs in processes of their own (:mod:`distill.train_tiny`).

Importing torch and transformers takes ten times as long as such a run, so processes are forked from one that
has imported them.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

TESTS = Path(__file__).parents[1]
IMPORTS = os.pathsep.join([str(TESTS), *filter(None, sys.path)])


@dataclass
class Run:
    """Outcome of a run.

    Of several processes it holds the first one's output and any exit status that is not 0.
    """

    returncode: int
    stdout: str
    stderr: str

    @property
    def last_loss(self) -> float:
        lines = [line for line in self.stdout.splitlines() if line.startswith("RESULT")]
        assert lines, self.stderr[-3000:]
        return float(lines[0].split()[1])


def launch(*args, processes: int = 1, file_size: int | None = None) -> Run:
    """Run ``train_tiny.main(*args)`` in one process, or in several as torchrun would.

    Args:
        file_size: largest number of bytes that a file may have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distill.train_tiny"])
    with TemporaryDirectory() as said, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        free.close()
        running = []
        with patch.dict(os.environ, PYTHONPATH=IMPORTS):
            for rank in range(processes):
                own = {name: str(value) for name, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                told = list(map(str, args)), own if processes > 1 else {}, f"{said}/{rank}", file_size
                running.append(context.Process(target=_run, args=told))
                running[-1].start()
        try:
            for process in running:
                process.join(300)
                assert process.exitcode is not None, "it still runs"
        finally:
            for process in running:
                process.kill()
        codes = [process.exitcode for process in running]
        texts = [Path(f"{said}/0.{name}").read_text() for name in ("stdout", "stderr")]
    return Run(next((code for code in codes if code), 0), *texts)


def launch_torchrun(*args, processes: int) -> subprocess.CompletedProcess:
    """Run the same by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(TESTS / "distill/train_tiny.py"), *map(str, args)]
    environment = {"PYTHONPATH": IMPORTS, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def _run(args: list[str], environment: dict[str, str], said: str, file_size: int | None) -> None:
    from distill.train_tiny import main

    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    main(*args)
