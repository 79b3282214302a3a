"""Models and policies that the engine is compared with the oracle on: small budgets, blocks of 16 slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.judge import Judge

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.testing import OraclePolicy, write_random_scorer

SINKS, WINDOW, TOPK = 4, 16, 36
BUDGET = SINKS + WINDOW + TOPK
SCORERS = {"kvpop": "mlstm", "kvpop-mlp": "mlp", "kvpop-linear": "linear"}
MATRIX = [(kind, policy) for kind in ("qwen3", "llama") for policy in (*SCORERS, "streaming-llm")]
MATRIX += [
    ("qwen3", "h2o"),
    ("llama", "tova"),
    ("llama", "momentkv"),
    ("qwen3", "snapkv"),
    ("llama", "pyramidkv"),
    ("qwen3", "adakv"),
]
EVERY = {"snapkv": 4, "pyramidkv": 4, "adakv": 4}
"""Policy -> tokens between decisions, where it is not one; of snapkv with a window of one more."""
SPARE = {"adakv": 1}
"""Policy -> blocks more from where the budget is outgrown."""
GATES = {
    "trimkv": ("trimkv", {}),
    "trimkv-kv": ("trimkv", {"reads": "kv", "gated": True}),
    "dms": ("dms", {"evict": 1.5}),
    "dms-query": ("dms", {"reads": "query", "evict": 0.5}),
}
"""Name of a case -> policy, which is also the scorer's kind, and what its gate is like. That of dms evicts most tokens: in a first
layer equal tokens have equal logits up to rounding, so that few decisions may be left to the budget."""
MATRIX += [("qwen3", "trimkv"), ("llama", "dms-query")]
TRAINING_FREE = {
    "l2norm": ("key norm", 0, 1),
    "tova": ("newest mass", 0, 1),
    "h2o": ("mean mass", 0, BUDGET // 2),
    "momentkv": ("moment residual", 1, 1),
    "snapkv": ("votes", 0, 5),
    "pyramidkv": ("votes", 0, 5),
    "adakv": ("votes", 0, 5),
}
"""Policy -> the oracle's scorer, and the default sinks and window. l2norm is not in the matrix: in a first layer equal tokens
have keys of equal norm, which only their rounding tells apart; test_variants judges it on the engine's own keys."""
STATE, MOMENTS = {"kvpop": 32 * 32 + 32 + 1}, 32 * 32 + 2 * 32
"""float32 words a head of the mLSTM and of moments."""


def state_blocks(policy: str, corrected: bool = False, divided: bool = False) -> int:
    """A block has 16 * (2 * 32 * 4 + 8) bytes a head; a share takes a word for every page of two heads, and two."""
    words = 2 + 2 * (cdiv(BUDGET, 16) + 1) if divided or policy == "adakv" else 0
    words += STATE.get(policy, 0) + (MOMENTS if corrected or policy == "momentkv" else 0)
    return cdiv(4 * words, 16 * (2 * 32 * 4 + 8))


class Case(NamedTuple):
    """A model folder, the engine's ``kv_policy``, and the oracle's idea of it."""

    model: str
    settings: dict
    judge: Judge


def allocated(plain: OraclePolicy, allocator: str) -> OraclePolicy:
    """The same with unequal shares: more tokens in lower layers, two layers whose k are to each other as 39 to 1
    (PyramidKV, beta 20), or divided among the heads of a layer."""
    if allocator == "ada":
        return replace(plain, divided=True)
    last = plain.topk // 20 + (plain.topk % 20 > 10)
    return replace(plain, topk=(2 * plain.topk - last, last))


def make_case(model: str, folder: Path, policy: str, **options) -> Case:
    """``options`` of :func:`write_random_scorer`, ``every``, tokens between decisions, and ``correction``; ``folder`` is where
    the scorer goes."""
    own = {"pyramidkv": "pyramid", "adakv": "ada"}
    if (allocator := options.pop("allocator", own.get(policy))) is not None:
        plain = make_case(model, folder, "snapkv" if policy in own else policy, **options)
        asked = plain.settings | {"policy": policy} | ({} if policy in own else {"allocator": allocator})
        return Case(model, asked, Judge(model, allocated(plain.judge.policy, allocator)))
    every, correction = options.pop("every", EVERY.get(policy, 1)), options.pop("correction", None)
    if correction is not None:
        plain = make_case(model, folder, policy, every=every, **options)
        oracle = replace(plain.judge.policy, corrected=correction == "moment")
        return Case(model, plain.settings | {"correction": correction}, Judge(model, oracle))
    grid = {"decide_every": every} if every > 1 else {}
    if policy == "streaming-llm" and every > 1:
        settings = {"policy": policy, "budget": BUDGET, "sinks": SINKS, "window": WINDOW} | grid
        oracle = OraclePolicy("recency", SINKS, WINDOW, TOPK - every + 1, interval=every)
        return Case(model, settings, Judge(model, oracle))
    if policy == "streaming-llm":
        sinks = options.get("sinks", SINKS)  # the oracle has another window on purpose: it must not matter
        settings = {"policy": policy, "budget": BUDGET, "sinks": sinks, "window": WINDOW}
        return Case(model, settings, Judge(model, OraclePolicy.streaming(sinks, BUDGET - sinks - 1, 1)))
    if policy in TRAINING_FREE:
        scorer, sinks, window = TRAINING_FREE[policy]
        sinks, window = options.get("sinks", sinks), options.get("window", window)
        oracle = OraclePolicy(scorer, sinks, window, BUDGET - sinks - window - every + 1, interval=every)
        oracle = replace(oracle, corrected=policy == "momentkv")
        return Case(model, {"policy": policy, "budget": BUDGET} | options | grid, Judge(model, oracle))
    policy, own = GATES.get(policy, (policy, {}))
    shape = {"sinks": SINKS, "window": WINDOW, "topk": TOPK} | own | options
    write_random_scorer(folder, model, SCORERS.get(policy, policy), **shape)
    oracle = OraclePolicy.from_scorer(folder, topk=shape["topk"] - every + 1, interval=every)
    return Case(model, {"policy": policy, "scorer": str(folder)} | grid, Judge(model, oracle))
