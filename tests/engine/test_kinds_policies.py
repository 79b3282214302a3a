"""All policies that are served, on the full attention of models with windows and of one with Mamba2 layers (docs/models.md).

test_sinks.py has them on one with attention sinks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import Job
from engine.kinds import BUDGET, Served, serving
from engine.matrix import policy_of
from engine.tiny_engine import configure
from policies.matrix import ROPE, ROWS, random_statistics_folder

from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import BORROWING
from kvpop_vllm.testing import write_random_scorer

FAMILIES = {"gemma3_text": False, "gemma4_text": False, "nemotron_h": True}
"""Models, and whether they have recurrent layers, next to which attention does not rotate."""
ROTATED = {"triattention"}
QUICK = {"gemma3_text", "nemotron_h"}
"""Models on which gates are tested in quick tests too."""
ENGINE_ONLY = {"attention-matching"}
"""Policies whose oracle is not one of sets of tokens: an engine's answers are finite and those of the whole text."""
NAMES = [name for name in ROWS if name not in {*ENGINE_ONLY, "full"}]
MATRIX = [
    pytest.param(family, name, marks=() if family in QUICK and ROWS[name].gate else pytest.mark.slow)
    for family, recurrent in FAMILIES.items()
    for name in NAMES
    if not (recurrent and name in ROTATED) and (name != "dms-query" or family in BORROWING)
]
JOBS = [Job(1, new=70), Job(40), Job(BUDGET), Job(130, new=20)]
LONG = {"triattention": 260}
"""Tokens of a longer prompt, 281 where it is not said: of these two have values that differ by rounding."""


@pytest.mark.parametrize("kind, name", MATRIX)
def test_policies_on_attention_layers(family, tmp_path, kind, name):
    """Answers are the oracle's, in a pool of NaN."""
    folder, oracle = family(kind)
    settings, exact, protect, _ = policy_of(folder, tmp_path, name)
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        jobs = [*JOBS, Job(LONG.get(name, 281), new=4)]
        Served(engine, oracle, exact, by_inputs=True).serve(jobs, 16, protect=protect)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ENGINE_ONLY)
def test_policies_that_make_slots(family, tmp_path, kind, name):
    """Prompts that are no longer than the budget are kept, and longer ones are answered."""
    folder, oracle = family(kind)
    settings, exact, *_ = policy_of(folder, tmp_path, name)
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        Served(engine, oracle, exact.full()).serve([Job(30, new=4)], 16)
        (answer,) = engine.serve([Job(281, new=8)]).values()
        assert all(entry.logprob > -20 for top in answer.outputs[0].logprobs for entry in top.values())


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
