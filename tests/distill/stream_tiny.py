"""A tiny training run on a stream, as a process of its own, which prints the last loss.

Usage: ``stream_tiny.py MODEL OUT DATA [DIE_AT_ROW]``.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import torch
from distill.byte_tokenizer import byte_tokenizer
from distill.train_tiny import LENGTH, RECIPES

from kvpop_vllm.distill import stream
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer

RECIPE = dataclasses.replace(RECIPES["frozen"], batch=12, steps=6, fit_decays=False)


class Mortal(stream.StreamedRows):
    """Rows that kill a process when it asks for a given one."""

    last = None

    def __getitem__(self, row):
        if row == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


def main(model, out, data, die_at=None):
    torch.set_num_threads(1)
    stream.BLOCK = {"train": 16}
    with Process.start() as process:
        rows = Mortal([f"hf:{data}"], byte_tokenizer(), LENGTH)
        rows.last = die_at and int(die_at)
        result = Trainer(model, RECIPE, out, rows, process=process, save_every=4, quiet=True).run()
        if process.rank == 0:
            print("RESULT", repr(result["loss"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
