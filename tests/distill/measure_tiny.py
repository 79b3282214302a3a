"""A step of a tiny run in bfloat16 with an online teacher, which prints the bytes of the first process by kind.

Usage: ``measure_tiny.py MODEL OUT``. No process may load the whole model.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPES
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from kvpop_vllm.distill import run, trainer
from kvpop_vllm.distill.sharding import Process

RECIPE = dataclasses.replace(RECIPES["low"], kl_top=32)


def _refuse(*args, **options):
    raise AssertionError("a process loads the whole model")


def main(model, out):
    torch.set_num_threads(1)
    run.load_model = trainer.load_model = _refuse
    with Process.start() as process:
        teacher = run.OnlineTeacher(model, RECIPE, process)
        training = trainer.Trainer(model, RECIPE, out, Rows(LENGTH), teacher=teacher, process=process, quiet=True)
        for group in training.optimiser.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        training.optimiser.step()
        tracker = FSDPMemTracker(training.student, training.optimiser)
        tracker.track_inputs(tuple(parameter.to_local() for parameter in teacher.parameters()))
        step = training.one_pass

        def one_pass(*args):
            tracker.reset_mod_stats()  # it counts one pass at a time
            return step(*args)

        training.one_pass = one_pass
        with tracker:
            training.backward(0)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        if process.rank == 0:
            print("BYTES", json.dumps({str(getattr(kind, "value", kind)): count for kind, count in peak.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
