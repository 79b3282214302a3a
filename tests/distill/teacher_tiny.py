"""Teacher's logits of a few rows, three to a file, written by this process and the others of its group.

Usage: ``teacher_tiny.py MODEL OUT COUNT...``; each count in turn goes on with the folder.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPES

from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.teacher import row_bytes, settings_of, write_rows

RECIPE = dataclasses.replace(RECIPES["base"], kl_top=16)


def main(model, out, *counts):
    torch.set_num_threads(1)
    with Process.start() as process:
        ask, rows = OnlineTeacher(model, RECIPE, process), Rows(LENGTH)
        rows.seed = 0
        settings = settings_of(model, rows, RECIPE.kl_top, RECIPE.dtype)
        size = {"vocab_size": 256, "shard_bytes": 3 * row_bytes(settings, 256)}
        for count in counts:
            write_rows(ask, rows, out, settings, int(count), process=process, **size, quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
