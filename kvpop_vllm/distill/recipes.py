"""The named recipes."""

from __future__ import annotations

from kvpop_vllm.distill.recipe import Recipe

PAPER = Recipe()
"""KVpop Table 3, whose base is trained too: `--train-base`. Its 2 billion tokens and the text's 2,000 steps differ: 2,000 steps of
128 rows of 16,384 tokens are 4.2 billion. The steps are taken, as schedules are given in them."""

DEMO = Recipe(
    length=2048,
    positions=8192,
    batch=1,
    steps=480,
    skip=True,
    window=[256, 64, 64, 128],
    topk=[764, 60, 188, 380],
    decay_min=0.9965,
    decay_max=0.9999,
    calibrate=True,
    calibrate_min=0.98,
    calibrate_max=0.9999,
    samples=512,
    warmup=20,
    lr_new=1e-2,
    lr_new_end=8e-4,
    activation_checkpointing=False,
)
"""Scorers of the frozen 135M demo model in an hour and a quarter on two CPU cores; budgets from a half to a sixteenth of S. Few rows,
so a rate ten times the paper's, and every row asked at many positions, which costs next to nothing. The decays that it trains with lie
lower than the paper's, as its budgets of 2,048 and 4,096 lie above these, and are calibrated at the end (LOG "decay")."""

TRIMKV = Recipe(
    phase="trimkv",
    batch=16,
    sinks=0,
    window=[1],
    topk=[511],
    ce=1.0,
    lr_new=2e-4,
    lr_new_end=2e-5,
    weight_decay=1e-2,
)
"""TRIM-KV's gates on the frozen base, capacity 512 tokens, rows of 16,384: its rate, weight decay and rows per step. How many steps,
how long to warm up and how the rate ends are ours; the KL is to the teacher's 256 best tokens, where the paper takes all."""

DMS = Recipe(
    phase="dms",
    batch=64,
    steps=700,
    sinks=1,
    window=[256],
    topk=[1791],
    lr_new=1e-4,
    lr_new_end=1e-5,
    weight_decay=0.0,
)
"""DMS's separate projections, to a compression of 8, one more every 100 steps, window 256, tau 0.1. The paper trains the whole
model: `--train-base`. Rates, batch, sink and budget are ours."""

RECIPES = {"paper": PAPER, "demo": DEMO, "trimkv": TRIMKV, "dms": DMS}
