"""Speculative decoding under every policy that decides step by step: the engine equals the naive oracle.

Drafts are those of a proposer that knows how texts go on, so that every number of them is accepted.
"""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager

import pytest
from engine.driving import BLOCK, Job, preempt_all, serving
from engine.matrix import BUDGET
from engine.proposer import CONFIG, DRAFTS, ForcedDrafts

from kvpop_vllm.testing import random_prompt

STEPS = {"decay_step": 4, "decay_min": 0.9, "decay_max": 0.99}
QUICK = {
    "state": ("qwen3", "kvpop", {}),
    "mass, protected": ("qwen3", "h2o", {"protect_prompt": 40}),
    "recency, all protected": ("llama", "streaming-llm", {"protect_prompt": True}),
}
SLOW = {
    "state, all protected": ("llama", "kvpop", {"protect_prompt": True}),
    "state, moments": ("qwen3", "kvpop", {"correction": "moment"}),
    "state, fixed shares": ("qwen3", "kvpop", STEPS | {"allocator": "pyramid"}),
    "stateless": ("qwen3", "kvpop-linear", {"sinks": 0} | STEPS),
    "network, protected": ("llama", "kvpop-mlp", {"protect_prompt": 33}),
    "recency": ("qwen3", "streaming-llm", {}),
    "draws, protected": ("qwen3", "random", {"protect_prompt": 17}),
    "newest mass": ("llama", "tova", {}),
    "mass, fixed shares": ("llama", "h2o", {"allocator": "pyramid"}),
    "moments": ("llama", "momentkv", {}),
    "moments, protected": ("llama", "momentkv", {"protect_prompt": 40}),
    "gate": ("qwen3", "trimkv", {}),
    "gate, threshold": ("llama", "dms-query", {"protect_prompt": 33}),
    "gate over hidden states": ("llama", "kvzap-early", {}),
}
CASES = QUICK | SLOW


@contextmanager
def speculating(case, kind: str, policy: str, **options):
    """Yield an engine of a case with a proposer."""
    extra = options.pop("engine", {})
    found = case(kind, policy, **options)
    with serving(found, num_gpu_blocks_override=301, speculative_config=CONFIG, **extra) as engine:
        yield engine


@pytest.fixture(scope="module", params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def served(request, case):
    kind, policy, options = CASES[request.param]
    with speculating(case, kind, policy, **options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    ForcedDrafts.texts, ForcedDrafts.counts = (), iter(())
    ForcedDrafts.proposed.clear()
    if "served" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("served")
    engine.chunk(None)
    engine.engine.reset_prefix_cache()
    yield
    assert not engine.leaks()


def whole(answer) -> list[int]:
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def mixed(seed: int = 0):
    """Return endless numbers of right drafts, from none to all."""
    draw = random.Random(seed)
    return (draw.randint(0, DRAFTS) for _ in itertools.count())


def texts_of(engine, jobs: list[Job]) -> list[list[int]]:
    """Serve jobs without drafts, and return the whole texts."""
    ForcedDrafts.texts = ()
    return [whole(answer) for answer in engine.serve(jobs).values()]


def forced(engine, jobs: list[Job], counts, each_step=None) -> dict:
    """Serve jobs without and with drafts, check both, and return the latter's answers."""
    plain = engine.serve(jobs)
    engine.check(plain)
    engine.engine.reset_prefix_cache()
    ForcedDrafts.texts, ForcedDrafts.counts = [whole(answer) for answer in plain.values()], counts
    answers = engine.serve(jobs, each_step)
    engine.check(answers)
    return answers


LENGTHS = [1, 5, 16, 33, 40, 41, BUDGET - 1, BUDGET, 90, 130]


@pytest.mark.parametrize("right", [0, 1, DRAFTS])
def test_as_many_are_accepted(served, right):
    """All drafts of a step are refused, some are accepted, or all of them."""
    jobs = [Job(length, new=30, scored=False) for length in (5, 33, BUDGET, 90)]
    answers = forced(served, jobs, itertools.repeat(right))
    for name in answers:
        assert max(served.chunks(name)[1:]) == 1 and len(served.chunks(name)) == 1 + -(-29 // (1 + right))


def test_mixed_numbers(served):
    forced(served, [Job(length, new=40, scored=False) for length in LENGTHS], mixed())


def test_chunks(served):
    """Prompts in chunks, next to others' drafts."""
    served.chunk(7)
    forced(served, [Job(1, new=50, scored=False), *(Job(length, scored=False) for length in (29, 57, 130))], mixed(1))
