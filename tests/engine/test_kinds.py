"""Models with layers of several kinds: a policy acts on those with full attention, the others are vLLM's.

The judge is the oracle of kinds. One engine for each family, with policies spread over them.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from engine.driving import Job, preempt_all
from engine.kinds import BLOCK, BUDGET, TOLERANCE, Served, distance_of_engine, roles, serving
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MambaSpec

from kvpop_vllm.cache.accounting import MOST_PADDING
from kvpop_vllm.supported import CACHE_SPECS, HYBRID, RECURRENT
from kvpop_vllm.testing import BFLOAT16, FAMILIES, KindsOracle, random_prompt, require_distant_kinds
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

QUICK = {
    "gemma3_text": "kvpop",
    "olmo3": "h2o",
    "exaone4": "streaming-llm",
    "llama4_text": "kvpop",
    "gpt_oss": "h2o",
    "nemotron_h": "kvpop",
    "falcon_h1": "streaming-llm",
}
"""Policy of each family's engine in the quick tests; other families have slow ones only."""
POLICIES = ("streaming-llm", "kvpop", "h2o")
CASES = [
    pytest.param((kind, policy), marks=() if QUICK.get(kind) == policy else pytest.mark.slow, id=f"{kind}-{policy}")
    for kind in FAMILIES
    for policy in POLICIES
]
JOBS = [Job(1, new=90), Job(40), Job(BUDGET), Job(130, new=20), Job(281, new=4)]


@pytest.fixture(scope="module", params=CASES)
def served(request, family, tmp_path_factory):
    """Yield a poisoned engine of a family with a policy."""
    kind, policy = request.param
    folder, oracle = family(kind)
    settings, exact = roles(policy, folder, tmp_path_factory.mktemp("scorer"), oracle)
    tolerance = 2 * distance_of_engine(folder, kind, None, oracle) if kind in BFLOAT16 else TOLERANCE
    with serving(folder, settings, kind) as engine:
        engine.fill_pool(255)
        by_inputs = bool({RECURRENT, HYBRID} & {*oracle.kinds})
        yield Served(engine, oracle, exact, tolerance, by_inputs, settings)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_models_depend_on_distant_tokens(family, kind):
    require_distant_kinds(family(kind)[0])


@pytest.mark.parametrize("kind", ["gpt_oss", "granite_swa"])
def test_attention_sinks_matter(family, kind):
    """Without them log-probabilities and greedy tokens are others, so that no test of these families passes by chance."""
    folder, oracle = family(kind)
    prompt = random_prompt(300, seed=1)
    before, without = oracle.logprobs(prompt), KindsOracle(folder)
    for layer in without.model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)
    after = without.logprobs(prompt)
    assert float((after - before).abs().amax(1).median()) > 0.03
    assert int((after.argmax(-1) != before.argmax(-1)).sum()) > 30


@pytest.mark.parametrize("chunk", [16, 128])
def test_requests_in_chunks(served, chunk):
    """Prompts and answers around blocks, windows and the budget are the oracle's, in a pool of NaN."""
    served.serve(JOBS, chunk)


def test_preempted_requests(served):
    """Requests that start over, and sixteen of which a small pool has some start over, give the oracle's answers."""

    def preempt(step):
        if step == 6:
            preempt_all(served.engine.recorder.scheduler)

    jobs = [Job(n, new=20, scored=False) for n in (30, 70, 120)]
    served.serve(jobs, 16, preempt)
    assert set(served.engine.recorder.preemptions.values()) == {1}
    pool, groups = served.engine.recorder.pool, served.engine.recorder.runner.kv_cache_config.kv_cache_groups
    recurrent = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    blocks = sum(least_blocks(group.kv_cache_spec) for group in groups) * 5 if recurrent else 9 * len(groups)
    with served.engine.small_pool(blocks):
        served.serve([Job(9 + i, new=30, scored=False) for i in range(16)], 16)
        assert pool.get_num_free_blocks() == blocks
    grows = any(least_blocks(group.kv_cache_spec) < most_blocks(group.kv_cache_spec) for group in groups)
    assert not grows or sum(served.engine.recorder.preemptions.values()) > 0


def test_turns_of_a_chat(served):
    """A turn goes on from the one before in models with windows and chunks; recurrent layers read all of its tokens again.

    Other requests overwrite what is free, and the second turn is preempted.
    """

    def preempt(step):
        if step == 8:
            preempt_all(served.engine.recorder.scheduler)

    history: list[int] = []
    for number, (chunk, new) in enumerate([(None, 20), (16, 40), (40, 20)]):
        prompt = [*history, *random_prompt(30 if history else 130, seed=400 + number)]
        jobs = [Job(prompt=prompt, new=new, scored=False), Job(53 + number, new=60, scored=False)]
        answers = served.serve(jobs, chunk, preempt if number == 1 else None)
        answer = answers[served.engine.names["0"]]
        assert answer.num_cached_tokens == (0 if served.by_inputs else max(0, len(history) - 1))
        history = [*prompt, *answer.outputs[0].token_ids]


def least_blocks(spec) -> int:
    """Return the blocks of a request of one token in a group."""
    return spec.blocks(1) if isinstance(spec, FixedBudgetSpec) else 1


def most_blocks(spec) -> int:
    """Return more blocks than :func:`least_blocks` if requests of the tests take some later."""
    return spec.blocks(39) if isinstance(spec, FixedBudgetSpec) else 1 + (not isinstance(spec, MambaSpec))


def test_pages_of_all_groups(served):
    """Pages of all groups have as many bytes; layers are where their kind says.

    Less than 4% of a page is padding. A state has a page of its own: a policy's page with fewer slots would be smaller.
    """
    config = served.engine.recorder.runner.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    (page,) = {spec.page_size_bytes for spec in specs}
    for spec in specs:
        if isinstance(spec, MambaSpec):
            (ours,) = (other for other in specs if isinstance(other, FixedBudgetSpec))
            assert spec.real_page_size_bytes > page * (1 - BLOCK / ours.block_size)
        else:
            assert spec.unpadded_page_size_bytes > (1 - MOST_PADDING) * page
    layers = defaultdict(set)
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            layers[extract_layer_index(name) % len(served.oracle.kinds)].add(type(group.kv_cache_spec).__name__)
    assert layers == {i: {*CACHE_SPECS[kind]} for i, kind in enumerate(served.oracle.kinds) if CACHE_SPECS[kind]}


def test_the_plan_counts_the_blocks(served):
    """`kvpop plan` has the pool's blocks, and of each request those that it holds when most of them are in use."""
    for prompt, new in ((130, 120), (20, 30)):
        served.check_plan(prompt, new)
