"""Named recipes."""

from __future__ import annotations

from kvpop_vllm.distill.recipe import Recipe

PAPER = Recipe(train_base=True)
"""Recipe of KVpop Table 3, which trains the base too.

The table's 2 billion tokens and the text's 2,000 steps differ: 2,000 steps of 128 rows of 16,384 tokens are
4.2 billion. This recipe uses the steps, because the schedules are given in steps.
"""

WORKSHOP = Recipe(
    train_base=True,
    length=8192,
    ce=0.9,
    kl=0.1,
    window=[64],
    topk=[444, 1980],
    decay_step=64,
    gate_softcap=15.0,
    normalise=False,
    balance=False,
)
"""Recipe of the workshop paper that KVpop grew out of (its Table 2, second phase).

Its first phase is `--phase uptrain` with 5,000 steps. The paper gives no decay step and no bound of the gates:
these are ours.
"""

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
    fit_decays=True,
    fit_decay_min=0.98,
    fit_decay_max=0.9999,
    boundary=0.0,
    listwise=1.0,
    warmup=20,
    lr_new=1e-2,
    lr_new_end=8e-4,
    activation_checkpointing=False,
)
"""Recipe for scorers of the frozen 135M demo model, two hours on one CPU core.

Budgets are from a half to a sixteenth of S. The listwise loss, ours, was better on text than the paper's boundary loss
(`docs/log/2026-W48-4.md`). There are few rows, so the rate is ten times the paper's. The decays in training are lower
than the paper's, because its budgets of 2,048 and 4,096 are larger than these. They are fitted at the end
(`docs/log/2026-W47-6.md`).
"""

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
"""Recipe for TRIM-KV's gates on the frozen base, capacity 512 tokens, rows of 16,384.

Rate, weight decay and rows per step are the paper's. The number of steps, the warm-up and the final rate are
ours. The KL is to the teacher's top 256 tokens; the paper uses all tokens.
"""

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
"""Recipe for DMS's separate projections, to a compression of 8, one more every 100 steps.

The window is 256 and tau 0.1. The paper trains the whole model: `--train-base`. Rates, batch, sink and budget
are ours.
"""

KVZAP = Recipe(
    phase="kvzap",
    length=8192,
    batch=1,
    sinks=4,
    window=[128],
    topk=[3964],
    lr_new=5e-3,
    lr_new_end=5e-5,
    weight_decay=1e-2,
)
"""Recipe for KVzap's gates, an MLP of two layers with 512 hidden units, by regression under dense attention.

Width, window, rate and weight decay are the paper's, and so is the mean squared error of a logarithm. The paper fits
the scores of KVzip+, which has the model repeat its text; here the targets are those of our scorers, which need no
repetition. Rows, steps, warm-up, sinks and budget are ours.
"""

RECIPES = {"paper": PAPER, "workshop": WORKSHOP, "demo": DEMO, "trimkv": TRIMKV, "dms": DMS, "kvzap": KVZAP}
