"""Models and policies that the engine is compared with the oracle on: small budgets, blocks of 16 slots."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.judge import Judge

from kvpop_vllm.testing import OraclePolicy, write_random_scorer

SINKS, WINDOW, TOPK = 4, 16, 36
BUDGET = SINKS + WINDOW + TOPK
SCORERS = {"kvpop": "mlstm", "kvpop-mlp": "mlp", "kvpop-linear": "linear"}
MATRIX = [(kind, policy) for kind in ("qwen3", "llama") for policy in (*SCORERS, "streaming-llm")]
STATE_BLOCKS = {"kvpop": 2}
"""The mLSTM's state is 32 * 32 + 32 + 1 float32 a head, a block 16 * (2 * 32 * 4 + 8) bytes; the others have none."""


class Case(NamedTuple):
    """A model folder, the engine's ``kv_policy``, and the oracle's idea of it."""

    model: str
    settings: dict
    judge: Judge


def make_case(model: str, folder: Path, policy: str, **options) -> Case:
    """``options`` of :func:`write_random_scorer`, and ``every``, tokens between decisions; ``folder`` is where the scorer
    goes."""
    every = options.pop("every", 1)
    grid = {"decide_every": every} if every > 1 else {}
    if policy == "streaming-llm" and every > 1:
        settings = {"policy": policy, "budget": BUDGET, "sinks": SINKS, "window": WINDOW} | grid
        oracle = OraclePolicy("recency", SINKS, WINDOW, TOPK - every + 1, interval=every)
        return Case(model, settings, Judge(model, oracle))
    if policy == "streaming-llm":
        sinks = options.get("sinks", SINKS)  # the oracle has another window on purpose: it must not matter
        settings = {"policy": policy, "budget": BUDGET, "sinks": sinks, "window": WINDOW}
        return Case(model, settings, Judge(model, OraclePolicy.streaming(sinks, BUDGET - sinks - 1, 1)))
    shape = {"sinks": SINKS, "window": WINDOW, "topk": TOPK} | options
    write_random_scorer(folder, model, SCORERS[policy], **shape)
    oracle = OraclePolicy.from_scorer(folder, topk=TOPK - every + 1, interval=every)
    return Case(model, {"policy": policy, "scorer": str(folder)} | grid, Judge(model, oracle))
