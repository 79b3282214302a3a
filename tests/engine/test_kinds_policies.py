"""All policies that are served, on the full attention of models with windows and of one with Mamba2 layers (docs/models.md).

Gates are on a model with a gated delta net too. test_sinks.py has all policies on one with attention sinks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from engine.driving import Job
from engine.kinds import BUDGET, TOLERANCE, Served, check_made_slots, distance_of_engine, serving
from engine.matrix import policy_of
from engine.tiny_engine import configure
from policies.matrix import ROPE, ROWS, random_statistics_folder

from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import BORROWING
from kvpop_vllm.testing import BFLOAT16, write_random_scorer

FAMILIES = {"gemma3_text": False, "gemma4_text": False, "nemotron_h": True, "qwen3_next": True}
"""Models, and whether they have recurrent layers, next to which attention does not rotate."""
ROTATED = {"triattention"}
QUICK = {"gemma3_text", "nemotron_h"}
"""Models on which gates are tested in quick tests too."""
GATES_ALONE = {"qwen3_next"}
"""Models on which gates alone are tested here. test_kinds.py has other policies."""
MAKING = "attention-matching"
"""The policy that makes slots, whose oracle is not one of sets of tokens."""
NAMES = [name for name in ROWS if name not in {MAKING, "full"}]
MATRIX = [
    pytest.param(family, name, marks=() if family in QUICK and ROWS[name].gate else pytest.mark.slow)
    for family, recurrent in FAMILIES.items()
    for name in NAMES
    if not (recurrent and name in ROTATED) and (name != "dms-query" or family in BORROWING)
    if ROWS[name].gate or family not in GATES_ALONE
]
JOBS = [Job(1, new=70), Job(40), Job(BUDGET), Job(130, new=20)]
LONG = {"triattention": 260}
"""Tokens of a longer prompt, 281 where it is not said: of these two have values that differ by rounding."""


@pytest.fixture(scope="module")
def tolerance_of(family):
    """Return ``find(kind)``, which returns the largest difference of log-probabilities of a family's engines.

    In bfloat16 it is three times the one of a stock engine. That one has fewer tokens, and prompts without scores.
    """

    @functools.cache
    def find(kind: str) -> float:
        return 3 * distance_of_engine(family(kind)[0], kind, None, family(kind)[1]) if kind in BFLOAT16 else TOLERANCE

    return find


@pytest.mark.parametrize("kind, name", MATRIX)
def test_policies_on_attention_layers(family, tolerance_of, tmp_path, kind, name):
    """Answers are the oracle's, in a pool of NaN. In bfloat16, where they are close, the retained tokens are the same."""
    folder, oracle = family(kind)
    settings, exact, protect, _ = policy_of(folder, tmp_path, name)
    tolerance = tolerance_of(kind)
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        jobs = [*JOBS, Job(LONG.get(name, 281), new=4)]
        served = Served(engine, oracle, exact, tolerance, by_inputs=True)
        for request, answer in served.serve(jobs, 16, protect=protect).items():
            if kind in BFLOAT16:
                served.check_retained(request, answer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in GATES_ALONE])
def test_a_policy_that_makes_slots(family, tmp_path, kind):
    """Prompts that are no longer than the budget are kept. After longer ones a KVpopCache makes the same slots.

    tests/policies/test_attention_matching.py compares the cache with a naive fit.
    """
    folder, oracle = family(kind)
    settings, exact, *_ = policy_of(folder, tmp_path, MAKING)
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        Served(engine, oracle, exact.full()).serve([Job(30, new=4)], 16)
        answers = engine.serve([Job(n, new=8, scored=False) for n in (BUDGET + 1, 281)])
    check_made_slots(folder, settings, answers)


def test_a_channel_whose_place_is_not_tested_is_refused(family, tmp_path):
    folder, _ = family("gemma4_text")
    gate = write_random_scorer(tmp_path, folder, "dms", reads="query", layers=[2, 5])
    with pytest.raises(ConfigError, match="known where it is in llama, .* models only, not in gemma4_text"):
        configure(folder, {"policy": "dms", "scorer": str(gate)})


def test_statistics_of_rotated_queries_are_refused(family, tmp_path):
    folder, _ = family("nemotron_h")
    statistics = random_statistics_folder(tmp_path, replace(ModelShape.of(folder, 4096), rope=ROPE))
    with pytest.raises(ConfigError, match="different rotary embeddings, or none"):
        configure(folder, {"policy": "triattention", "budget": 200, "calibration": str(statistics)})
