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

FAMILIES = {"gemma3_text": False, "gemma4_text": False, "nemotron_h": True}
"""Models, and whether they have recurrent layers, next to which attention does not rotate."""
ROTATED = {"triattention"}
GATES = {"trimkv", "dms", "kvzap"}
ENGINE_ONLY = {"attention-matching"}
"""Policies whose oracle is not one of sets of tokens: an engine's answers are finite and those of the whole text."""
NAMES = [name for name, row in ROWS.items() if (row.policy or name) not in {*GATES, *ENGINE_ONLY, "full"}]
MATRIX = [
    (family, name) for family, recurrent in FAMILIES.items() for name in NAMES if not (recurrent and name in ROTATED)
]
JOBS = [Job(1, new=70), Job(40), Job(BUDGET), Job(130, new=20)]
LONG = {"triattention": 260}
"""Tokens of a longer prompt, 281 where it is not said: of these two have values that differ by rounding."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind, name", MATRIX)
def test_policies_on_attention_layers(family, tmp_path, kind, name):
    """Answers are the oracle's, in a pool of NaN."""
    folder, oracle = family(kind)
    settings, exact, protect, _ = policy_of(folder, tmp_path, name)
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        jobs = [*JOBS, Job(LONG.get(name, 281), new=4)]
        Served(engine, oracle, exact, by_inputs=True).serve(jobs, 16, protect=protect)


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


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", sorted(GATES))
def test_gates_are_refused(family, tmp_path, kind, name):
    folder, _ = family(kind)
    settings, *_ = policy_of(folder, tmp_path, name)
    with pytest.raises(ConfigError, match="a gate, which vLLM's models have in every layer: choose another policy"):
        configure(folder, settings)


def test_statistics_of_rotated_queries_are_refused(family, tmp_path):
    folder, _ = family("nemotron_h")
    statistics = random_statistics_folder(tmp_path, replace(ModelShape.of(folder, 4096), rope=ROPE))
    with pytest.raises(ConfigError, match="different rotary embeddings, or none"):
        configure(folder, {"policy": "triattention", "budget": 200, "calibration": str(statistics)})
