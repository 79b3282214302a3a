"""A tiny training run as a process of its own, which prints the last loss.

Usage: ``train_tiny.py MODEL OUT {frozen|base|low|gates} [DIE_AT_STEP [SIGNAL]]``.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import torch
from distill.rows import Rows, teacher_of

from kvpop_vllm.distill.recipes import DEMO, TRIMKV
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.model_hook import load_model

LENGTH = 96
RECIPE = dataclasses.replace(
    DEMO,
    batch=2,
    length=LENGTH,
    positions=300,
    window=[8, 12],
    topk=[20, 10],
    steps=8,
    boundary=1.0,
    listwise=0.0,
    samples=32,
    warmup=2,
    dtype="float32",
    lr_new=1e-2,
    fit_decays=True,
    fit_decay_rows=2,
)
RECIPES = {
    "frozen": RECIPE,
    "base": dataclasses.replace(
        RECIPE, batch=4, fit_decays=False, train_base=True, ce=0.5, activation_checkpointing=True
    ),
}
RECIPES["low"] = dataclasses.replace(RECIPES["base"], dtype="bfloat16", ce=0.0)
"""Recipe as in the paper: scorers and base, bfloat16 with float32 ranking, KL, layers recomputed."""
RECIPES["gates"] = dataclasses.replace(
    TRIMKV, batch=2, length=LENGTH, topk=[23], steps=8, warmup=2, dtype="float32", gate_width=16, gate_bias=5.0
)


class Mortal(Rows):
    """Rows that send a process a signal, SIGKILL by default, when it asks for a given row."""

    last, signal = None, signal.SIGKILL

    def __getitem__(self, row):
        if row == self.last:
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(row)


def main(model, out, kind, die_at=None, sent="SIGKILL"):
    torch.set_num_threads(1)
    process, recipe = Process.start(), RECIPES[kind]
    rows = Mortal(LENGTH)
    rows.last, rows.signal = None if die_at is None else int(die_at) * recipe.batch, signal.Signals[sent]
    teacher = teacher_of(load_model(model, torch.float32)) if recipe.distils else None
    result = Trainer(
        model,
        recipe,
        out,
        rows,
        teacher=teacher,
        process=process,
        save_every=3,
        quiet=True,
    ).run()
    if process.rank == 0:
        print("RESULT", repr(result["loss"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
