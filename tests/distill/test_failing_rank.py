"""A process that fails among others: one line, no process left, and a next start that goes on; two gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distill.launching import IMPORTS, TESTS
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from distill.typed import RECIPE

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.testing import write_tiny_model

SPY = """
import os

open("imported", "a").write(os.environ["RANK"])


def track(step, metrics):
    open("tracked", "a").write(f"{step} ")
"""
"""Module of a tracker, which notes the process that imports it, and the steps."""
LIMIT = 300_000
"""More bytes than the file of tokens has, and fewer than a shard of a checkpoint."""
SECONDS = 60
"""Most seconds after which no process is left."""


def start(folder: Path, limit: int) -> subprocess.CompletedProcess:
    """Train the model by two processes, whose outputs go to ``folder/logs``."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=logs", "--redirects=3"]
    script = [str(TESTS / "distill/limited_rank.py"), str(limit), "distill", "--model=model", "--data=text.jsonl"]
    words = "--train-base --no-fit-decays --batch=2 --steps=6 --save-every=2 --threads=1 --tracker=spy:track".split()
    imports = os.pathsep.join([str(folder), IMPORTS])
    options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": imports}, "timeout": 500}
    return subprocess.run(
        [sys.executable, *torchrun, *script, "--out=out", *RECIPE, *words], capture_output=True, text=True, **options
    )


def processes_in(folder: Path) -> list[str]:
    """Return the ids of the processes that work in a folder."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            numbers += [process.name] if process.joinpath("cwd").resolve() == folder.resolve() else []
        except OSError:  # it has ended, or is another user's
            pass
    return numbers


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_all_and_the_next_start_goes_on(tmp_path):
    write_byte_tokenizer(write_tiny_model(tmp_path / "model", "qwen3", vocab=VOCABULARY))
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "spy.py").write_text(SPY)
    failed = start(tmp_path, LIMIT)
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert time.time() - log.stat().st_mtime < SECONDS and not processes_in(tmp_path)
    last = log.read_text().strip().splitlines()[-1]
    assert failed.returncode and last.startswith("kvpop: training stopped at step 2: step 2 cannot be saved in "), last
    assert not list((tmp_path / "out/run").glob("*-[0-9]*")), "a draft or a checkpoint is left"
    assert (tmp_path / "out/run/tokens.bin").stat().st_size < LIMIT
    again = start(tmp_path, 0)
    assert again.returncode == 0, again.stderr[-2000:]
    assert len(read_metrics(tmp_path / "out/run/metrics.jsonl")) == 6 and (tmp_path / "out/model/config.json").exists()
    assert (tmp_path / "imported").read_text() == "00", "one process alone has a tracker, in each of both runs"
    assert (tmp_path / "tracked").read_text() == "0 1 0 1 2 3 4 5 "
