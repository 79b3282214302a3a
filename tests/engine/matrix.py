"""Models and policies on which the engine is compared with the oracle: small budgets, blocks of 16 slots."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.judge import Judge
from policies.matrix import MOMENTS, ROWS, allocated, random_scorer_folder, random_statistics_folder, shared_by

from kvpop_vllm import policies
from kvpop_vllm.cache.pages import cdiv
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import OraclePolicy

SINKS, WINDOW, TOPK = 4, 16, 36
BUDGET = SINKS + WINDOW + TOPK
LONGEST = 4096
"""Positions of the tiny models."""
MATRIX = [(kind, name) for name, row in ROWS.items() for kind in row.engines]


def state_blocks(policy: str, corrected: bool = False) -> int:
    """Return the number of state blocks of a request; a block has 16 * (2 * 32 * 4 + 8) bytes per head."""
    row = ROWS[policy]
    words = row.state + (MOMENTS if corrected or row.corrected else 0)
    return cdiv(4 * words, 16 * (2 * 32 * 4 + 8))


class Case(NamedTuple):
    """A model folder, the engine's ``kv_policy`` settings, the judge with the matching oracle, block counts, and the allocator."""

    model: str
    settings: dict
    judge: Judge
    state_blocks: int
    allocator: str


def make_case(model: str, folder: Path, policy: str, **options) -> Case:
    """Build a case and write the folder that the policy needs.

    Arguments are those of :func:`policy_of`, and ``judged``, the class of the judge.
    """
    judged = options.pop("judged", Judge)
    settings, oracle, protect, allocator = policy_of(model, folder, policy, **options)
    judge = judged(model, oracle, protect=protect)
    return Case(model, settings, judge, state_blocks(policy, oracle.corrected), allocator)


def policy_of(model: str, folder: Path, policy: str, **options) -> tuple[dict, OraclePolicy, bool | int, str]:
    """Return ``kv_policy`` settings, the oracle's policy, the protected tokens of a prompt and the allocator.

    The folder that the policy needs is written.

    Args:
        model: folder of the model.
        folder: folder for the scorer, or for statistics of the model.
        policy: a name of ROWS.
        options: options of :func:`write_random_scorer` or roles, ``allocator`` (a name or a file of shares),
            ``correction``, ``protect_prompt``, and ``budget``.
    """
    row, protect, budget = ROWS[policy], options.pop("protect_prompt", 0), options.pop("budget", BUDGET)
    window = WINDOW * budget // BUDGET
    default_allocator = row.own_allocator if row.allocator == "uniform" else row.allocator
    allocator, correction = options.pop("allocator", default_allocator), options.pop("correction", None)
    settings, statistics = {"policy": row.policy or policy}, None
    if row.calibrated:
        statistics = str(random_statistics_folder(folder, ModelShape.of(model, LONGEST)))
        settings["calibration"] = statistics
    if allocator != row.own_allocator:
        settings |= shared_by(allocator, statistics)
    if correction is not None:
        settings["correction"] = correction
    if not row.compresses and (protect or policies.get(row.policy or policy).default_protect):
        settings["protect_prompt"] = "all" if protect is True else protect
    if row.learned:
        shape = {"sinks": SINKS, "window": window, "topk": budget - SINKS - window} | row.options | options
        layers = ModelShape.of(model, LONGEST).layers
        random_scorer_folder(folder, model, row.scorer, **shape | ({"layers": layers} if layers else {}))
        oracle = OraclePolicy.from_scorer(folder, topk=shape["topk"], **row.early)
        settings |= {"scorer": str(folder)} | row.early
    else:
        roles = {"sinks": row.sinks, "window": budget // 2 if row.window < 0 else row.window} | options
        settings |= {"budget": budget} | options
        if row.set_by_tests:
            roles = {"sinks": SINKS, "window": window} | options
            settings |= roles
        if policy == "streaming-llm" and allocator == "uniform":
            # the oracle has another window on purpose: it must not matter
            roles["window"] = budget - roles["sinks"] - 1
        topk = budget - roles["sinks"] - roles["window"]
        oracle = OraclePolicy(row.scorer, **roles, topk=topk, statistics=statistics)
    oracle = replace(oracle, corrected=row.corrected if correction is None else correction == "moment")
    return settings, allocated(oracle, allocator), protect, allocator
