"""A tiny training run as a process of its own, which prints the last loss.

Usage: ``train_tiny.py MODEL OUT {frozen|base|low|gates} [DIE_AT_STEP [SIGNAL [launcher]]]``.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time

import torch
from distill.rows import Rows, teacher_of

from kvpop_vllm.distill.recipes import DEMO, TRIMKV
from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer, Validation
from kvpop_vllm.model_hook import load_model

LENGTH = 96
RECIPE = dataclasses.replace(
    DEMO,
    **{"batch": 2, "length": LENGTH, "positions": 300, "window": [8, 12], "topk": [20, 10], "steps": 8, "warmup": 2},
    **{"boundary": 1.0, "listwise": 0.0, "samples": 32, "lr_new": 1e-2, "fit_decays": True, "fit_decay_rows": 2},
    dtype="float32",
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


VALIDATION = Validation(4, [Rows(LENGTH, first=5000)[row] for row in range(3)], [0] * 3)
"""Held-out rows, which two or four processes cannot share evenly."""


def train(model, out, recipe=RECIPE, rows=None, **options):
    """Return a trainer of the model in float32, which is its own teacher, with a checkpoint every three steps."""
    teacher = teacher_of(load_model(model, torch.float32)) if recipe.distils else None
    trainer_options = {"teacher": teacher, "save_every": 3, "quiet": True} | options
    return Trainer(model, recipe, out, rows or Rows(recipe.length), **trainer_options)


class Mortal(Rows):
    """Rows that send a process, or its launcher, a signal, SIGKILL by default, when it asks for a given row.

    After one to the launcher the process waits until the launcher has sent it on.
    """

    last, signal, launcher, trainer = None, signal.SIGKILL, False, None

    def __getitem__(self, row):
        if row == self.last:
            os.kill(os.getppid() if self.launcher else os.getpid(), self.signal)
            while self.launcher and not self.trainer._asked_to_stop:
                time.sleep(0.01)
        return super().__getitem__(row)


def main(model, out, kind, die_at=None, sent="SIGKILL", to="process"):
    torch.set_num_threads(1)
    process, recipe = Process.start(), RECIPES[kind]
    rows = Mortal(LENGTH)
    rows.last, rows.signal = None if die_at is None else int(die_at) * recipe.batch, signal.Signals[sent]
    if kind == "low":
        teacher = OnlineTeacher(model, recipe, process)  # sharded if there are several processes
    else:
        teacher = teacher_of(load_model(model, torch.float32)) if recipe.distils else None
    rows.launcher = to == "launcher"
    options = {"teacher": teacher, "process": process, "validation": VALIDATION}
    rows.trainer = Trainer(model, recipe, out, rows, save_every=3, quiet=True, **options)
    result = rows.trainer.run()
    if process.rank == 0:
        print("RESULT", repr(result["loss"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
