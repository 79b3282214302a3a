"""Tiny models, and one watched engine for each model and policy, shared by all tests of a module."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
from engine.driving import watched
from engine.judge import Judge

from kvpop_vllm.testing import OraclePolicy, write_random_scorer, write_tiny_model

SINKS, WINDOW, TOPK = 4, 16, 36
BUDGET = SINKS + WINDOW + TOPK
SCORERS = {"kvpop": "mlstm", "kvpop-mlp": "mlp", "kvpop-linear": "linear"}
STATE_BLOCKS = {"kvpop": 2}
"""The mLSTM's state is 32 * 32 + 32 + 1 float32 a head, a block 16 * (2 * 32 * 4 + 8) bytes; the others have none."""
MATRIX = [(kind, policy) for kind in ("qwen3", "llama") for policy in (*SCORERS, "streaming-llm")]


class Case(NamedTuple):
    """A model folder, the engine's ``kv_policy``, and the oracle's idea of it."""

    model: str
    settings: dict
    judge: Judge


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """``kind -> folder`` of a float32 model, written once."""

    @functools.cache
    def make(kind: str) -> str:
        return str(write_tiny_model(tmp_path_factory.mktemp(kind), kind))

    return make


@pytest.fixture(scope="session")
def case(tiny_model, tmp_path_factory):
    """``(kind, policy, scorer options) -> Case``, made once."""

    @functools.cache
    def make(kind: str, policy: str, **options) -> Case:
        model = tiny_model(kind)
        if policy == "streaming-llm":
            sinks = options.get("sinks", SINKS)  # the oracle has another window on purpose: it must not matter
            settings = {"policy": policy, "budget": BUDGET, "sinks": sinks, "window": WINDOW}
            return Case(model, settings, Judge(model, OraclePolicy.streaming(sinks, BUDGET - sinks - 1, 1)))
        shape = {"sinks": SINKS, "window": WINDOW, "topk": TOPK} | options
        folder = write_random_scorer(tmp_path_factory.mktemp("scorer"), model, SCORERS[policy], **shape)
        return Case(model, {"policy": policy, "scorer": str(folder)}, Judge(model, OraclePolicy.from_scorer(folder)))

    return make


@pytest.fixture(scope="module", params=MATRIX, ids="-".join)
def served(request, case):
    """A watched engine with room for everything."""
    found = case(*request.param)
    with watched(found.model, found.settings, found.judge) as engine:
        yield engine
        assert not engine.recorder.scheduler.requests


@pytest.fixture
def watch(case):
    """``(case, **options of LLM)`` -> context manager of a watched engine."""
    return lambda found, **options: watched(found.model, found.settings, found.judge, **options)
