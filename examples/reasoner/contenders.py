"""Policies of the comparison, trained and training-free, with their windows, budgets and shares."""

import re
from typing import NamedTuple

FREE = "streaming-llm", "random", "h2o", "tova", "momentkv", "l2norm", "rkv", "vase", "triattention"
"""Policies that need no training."""
COMPRESSING = ("snapkv",)
"""Policies that need no training and cannot protect prompts."""
COMPRESSIONS = {4: (2, 4), 8: (6, 8), 16: (12, 16)}
"""Compressions: those at which windows are chosen, each with those at which they are used."""
WINDOWS = {16: (4, 8, 16), 32: (4, 8, 16), 64: (4, 8)}
"""Windows of training-free policies, each with the compressions at which it leaves slots."""
CALIBRATED = {4: (2, 4), 8: (6, 8), 12: (12, 16)}
"""Compressions: those at which shares are measured, each with those at which they are used."""
CALIBRATION_ROWS = 32
"""Validation problems that shares are measured on; as many others judge them."""
SHARES = re.compile(r"(?:shares|bytes)-\d+-(.*)")
"""Names of records of policies with shares, with the compression at which they were measured and the policy."""
STATISTICS = "triattention"
"""Policy that cannot do without a calibration."""
WIDE = {STATISTICS: (4,), "vase": (4, 8)}
"""Policies whose own windows leave slots at some of :data:`CALIBRATED` alone."""
WITHOUT_SHARES = "trimkv", "dms", "dense-longer"
"""Trained policies that have no shares: gates, and a base that nothing is evicted from."""
VARIANT = re.compile(r"(?P<policy>.+?)(-shares-(?P<shares>\d+))?(-seed-(?P<seed>\d+))?")
"""Names of trained policies.

A key of :data:`TRAINED`, the compression whose shares it is trained with, and another seed of the training.
"""


class Use(NamedTuple):
    """Compressions at which shares of heads are used.

    Attributes:
        measured: compression at which they are measured.
        equal: ``k`` or ``bytes``, whichever is equal between policies, None for both.
        compressions: those at which they are used.
    """

    measured: int
    equal: str | None
    compressions: tuple[int, ...]


OF_SCORERS = Use(8, None, (2, 4, 6, 8)), Use(12, None, (12, 16))
"""Uses of shares of trained scorers, which lose next to nothing at 4 times less with half as many slots."""
OF_STATES = (
    Use(8, "k", (2, 4, 6, 8)),
    Use(8, "bytes", (2, 4)),
    Use(12, "k", (12, 16)),
    Use(12, "bytes", (6, 8)),
)
"""Uses of shares of scorers with a state.

At equal bytes the page of a state and the pages of unequal heads leave 6 and 8 times less about as many slots as 11 times
less has. They leave none at 12 and 16 times.
"""

COMMON = "--no-pack --length 1600 --batch 1 --dtype float32 --no-activation-checkpointing --validate-every 100"
BUDGETS = "--window 16 --topk 162 70 116 47 70"
"""Budgets of 1/6, 1/12 (twice), 1/8 and 1/16 of a worked solution, which problems take in turn."""
FROZEN_BUDGETS = "--window 32 --topk 236 100 146 100 184 --target-power 2"
"""Budgets of 1/4, 1/8 (twice), 1/6 and 1/5, for bases that do not learn to do with less. A written line has 29 or 32 words."""
SCORER = "--groups mean --decay-min 0.99 --decay-max 0.9999 --lr-new 1e-2 --lr-new-end 1e-3"
LISTWISE = f"--boundary 0 --listwise 1 --lists 64 {SCORER}"
BASE = "--train-base --lr-base 5e-4 --lr-base-end 2e-5 --kl-top 64"
GATES = "--lr-new 2e-3 --lr-new-end 2e-4 --kl-top 64"
TRAINED = {
    "kvpop": f"{BUDGETS} {LISTWISE} {BASE} --skip",
    "kvpop-frozen-base": f"{FROZEN_BUDGETS} {LISTWISE} --no-train-base --skip",
    "kvpop-boundary-loss": f"{BUDGETS} {SCORER} {BASE} --skip",
    "kvpop-immediate": f"{BUDGETS} {LISTWISE} {BASE} --skip --no-delayed",
    "kvpop-mlp": f"{BUDGETS} {LISTWISE} {BASE} --scorer mlp",
    "kvpop-mlp-frozen-base": f"{FROZEN_BUDGETS} {LISTWISE} --no-train-base --scorer mlp",
    "kvpop-linear": f"{BUDGETS} {LISTWISE} {BASE} --scorer linear",
    "streaming-plus": f"{BUDGETS} {BASE} --phase streaming-plus",
    "trimkv": f"--recipe trimkv --topk 180 --gate-width 64 {GATES}",
    "dms": f"--recipe dms --window 16 --topk 116 --compression 8 {GATES} {BASE}",
    "dense-longer": "--phase uptrain --lr-base 5e-4 --lr-base-end 2e-5",
}
"""Options of `kvpop distill` for each trained policy.

streaming-plus is streaming-llm on a base trained for it. dense-longer is a base that was trained as long without eviction.
"""


def takes_shares(name: str) -> bool:
    """Return whether a trained policy can have shares."""
    return VARIANT.fullmatch(name)["policy"] not in WITHOUT_SHARES


def is_scorer(name: str) -> bool:
    """Return whether a policy is a trained scorer. Gates have a recipe, and bases alone a phase."""
    trained = VARIANT.fullmatch(name)["policy"] in TRAINED
    return trained and not {"--recipe", "--phase"} & {*training_options(name)}


def trains_base(name: str) -> bool:
    """Return whether the base model is trained with a policy."""
    return bool({"--train-base", "--phase"} & {*training_options(name)})


def training_options(name: str) -> list[str]:
    """Return the options of `kvpop distill` for a trained policy, without those for shares. See :data:`VARIANT`."""
    variant = VARIANT.fullmatch(name)
    return TRAINED[variant["policy"]].split() + (["--seed", variant["seed"]] if variant["seed"] else [])


def uses_of(name: str) -> tuple[Use, ...]:
    """Return where a policy's shares are used."""
    if is_scorer(name):
        return OF_SCORERS if "--scorer" in training_options(name) else OF_STATES
    return tuple(Use(measured, None, CALIBRATED[measured]) for measured in WIDE.get(name, CALIBRATED))


def calibrated_at(name: str) -> list[int]:
    """Return the compressions at which a policy's shares are measured."""
    return list(dict.fromkeys(use.measured for use in uses_of(name)))


def all_compressions() -> tuple[int, ...]:
    """Return the compressions of all tables."""
    return sum(COMPRESSIONS.values(), ())
