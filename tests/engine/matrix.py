"""Models and policies that the engine is compared with the oracle on: small budgets, blocks of 16 slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.judge import Judge
from policies.matrix import MOMENTS, ROWS, allocated

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.testing import OraclePolicy, write_random_scorer

SINKS, WINDOW, TOPK = 4, 16, 36
BUDGET = SINKS + WINDOW + TOPK
MATRIX = [(kind, name) for name, row in ROWS.items() for kind in row.engines]


def state_blocks(policy: str, corrected: bool = False, divided: bool = False) -> int:
    """A block has 16 * (2 * 32 * 4 + 8) bytes a head; a share takes a word for every page of two heads, and two."""
    row = ROWS[policy]
    words = 2 + 2 * (cdiv(BUDGET, 16) + 1) if divided or row.allocator == "ada" else 0
    words += row.state + (MOMENTS if corrected or row.corrected else 0)
    return cdiv(4 * words, 16 * (2 * 32 * 4 + 8))


class Case(NamedTuple):
    """A model folder, the engine's ``kv_policy``, and the oracle's idea of it."""

    model: str
    settings: dict
    judge: Judge


def make_case(model: str, folder: Path, policy: str, **options) -> Case:
    """``options`` of :func:`write_random_scorer`, ``every``, tokens between decisions, and ``correction``; ``folder`` is where
    the scorer goes."""
    row = ROWS[policy]
    name, every = row.policy or policy, options.pop("every", row.every)
    allocator, correction = options.pop("allocator", None), options.pop("correction", None)
    asked = {"allocator": allocator, "correction": correction, "decide_every": every if every > 1 else None}
    settings = {"policy": name} | {key: value for key, value in asked.items() if value is not None}
    if row.learned:
        shape = {"sinks": SINKS, "window": WINDOW, "topk": TOPK} | row.options | options
        write_random_scorer(folder, model, row.scorer, **shape)
        oracle = OraclePolicy.from_scorer(folder, topk=shape["topk"] - every + 1, interval=every)
        settings |= {"scorer": str(folder)}
    else:
        roles = {"sinks": row.sinks, "window": BUDGET // 2 if row.window < 0 else row.window} | options
        settings |= {"budget": BUDGET} | options
        if policy == "streaming-llm":
            roles = {"sinks": SINKS, "window": WINDOW} | options
            settings |= roles
            if every == 1:  # the oracle has another window on purpose: it must not matter
                roles["window"] = BUDGET - roles["sinks"] - 1
        topk = BUDGET - roles["sinks"] - roles["window"] - every + 1
        oracle = OraclePolicy(row.scorer, **roles, topk=topk, interval=every)
    oracle = replace(oracle, corrected=row.corrected if correction is None else correction == "moment")
    return Case(model, settings, Judge(model, allocated(oracle, allocator or row.allocator)))
