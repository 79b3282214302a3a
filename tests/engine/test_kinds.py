"""Models with layers of several kinds: a policy acts on those with full attention, the others are vLLM's.

The judge is the oracle of kinds. One engine for each family, with policies spread over them.
"""

from __future__ import annotations

import pytest
from engine.driving import Job, preempt_all
from engine.kinds import BLOCK, BUDGET, Served, roles, serving
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from kvpop_vllm import plan
from kvpop_vllm.cache.accounting import MOST_PADDING
from kvpop_vllm.cli import make_parser
from kvpop_vllm.supported import CHUNKED, FULL, SLIDING
from kvpop_vllm.testing import FAMILIES, require_distant_kinds
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

QUICK = {"gemma3_text": "kvpop", "olmo3": "h2o", "exaone4": "streaming-llm", "llama4_text": "kvpop"}
"""Policy of each family's engine in the quick tests."""
POLICIES = ("streaming-llm", "kvpop", "h2o")
CASES = [
    pytest.param((kind, policy), marks=() if QUICK[kind] == policy else pytest.mark.slow, id=f"{kind}-{policy}")
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
    with serving(folder, settings) as engine:
        engine.fill_pool(255)
        yield Served(engine, oracle, exact, settings)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_models_depend_on_distant_tokens(family, kind):
    require_distant_kinds(family(kind)[0])


@pytest.mark.parametrize("chunk", [16, 128])
def test_requests_in_chunks(served, chunk):
    """Prompts and answers around blocks, windows and the budget are the oracle's, in a pool of NaN."""
    served.serve(JOBS, chunk)


def test_preempted_requests(served):
    """Requests that start over, and that a small pool has start over, give the oracle's answers."""

    def preempt(step):
        if step == 6:
            preempt_all(served.engine.recorder.scheduler)

    jobs = [Job(n, new=20, scored=False) for n in (30, 70, 120)]
    served.serve(jobs, 16, preempt)
    assert set(served.engine.recorder.preemptions.values()) == {1}
    pool, groups = served.engine.recorder.pool, len(served.engine.recorder.runner.kv_cache_config.kv_cache_groups)
    with served.engine.small_pool(9 * groups):
        served.serve([Job(9 + i, new=60, scored=False) for i in range(5)], 16)
        assert pool.get_num_free_blocks() == 9 * groups
    assert sum(served.engine.recorder.preemptions.values()) > 0


def test_pages_of_all_groups(served):
    """Pages of all groups have as many bytes, of which less than 4% are padding; layers are where their kind says."""
    config = served.engine.recorder.runner.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    assert all(spec.unpadded_page_size_bytes > (1 - MOST_PADDING) * spec.page_size_bytes for spec in specs)
    kinds = {FULL: FixedBudgetSpec, SLIDING: SlidingWindowSpec, CHUNKED: ChunkedLocalAttentionSpec}
    layers = {name: type(group.kv_cache_spec) for group in config.kv_cache_groups for name in group.layer_names}
    expected = {f"model.layers.{i}.self_attn.attn": kinds[kind] for i, kind in enumerate(served.oracle.kinds)}
    assert layers == expected


def test_the_plan_counts_the_blocks(served):
    """`kvpop plan` has the pool's blocks, and of each request those that it holds when most of them are in use."""
    folder, settings = served.engine.engine.model_config.model, served.settings
    scorer = ["--scorer", settings["scorer"]] if "scorer" in settings else []
    for prompt, new in ((130, 120), (20, 30)):
        sizes = ["--kv-memory", "8MiB", "--block-size", str(BLOCK), "--budget", str(BUDGET)]
        words = ["plan", "--model", folder, *sizes, "--max-model-len", str(prompt + new), *scorer]
        result = plan.compute(make_parser().parse_args(words))
        served.serve([Job(prompt, new=new, scored=False)])
        pool, steps = served.engine.recorder.pool, served.engine.recorder.blocks
        assert pool.num_gpu_blocks == (8 << 20) // result.pool.block_bytes
        blocks = max(pool.num_gpu_blocks - 1 - step.free for step in steps[2:])  # after the prompt's
        assert blocks == result.requests[settings["policy"], BUDGET].blocks, (prompt, new)
