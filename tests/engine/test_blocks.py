"""The blocks a request holds, what becomes of them, and how many requests vLLM says they are enough for."""

from __future__ import annotations

import pytest
import torch
from engine.conftest import BUDGET, SINKS, WINDOW
from engine.driving import BLOCK, Job, watched

from kvpop_vllm.cache.accounting import dense_request_bytes, request_bytes
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

STATE_BLOCKS = {"kvpop": 2, "streaming-llm": 0}
"""The mLSTM's state is 32 * 32 + 32 + 1 float32 a head, a block 16 * (2 * 32 * 4 + 8) bytes."""
JOBS = [Job(n, new=20, scored=False) for n in (1, 14, 16, 17, BUDGET - 5, BUDGET, 90, 300)]
HEADS, HEAD_DIM, LAYERS, LENGTH, LARGE = 2, 64, 2, 4096, 1024


@pytest.fixture(scope="module", params=STATE_BLOCKS)
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def engine(policy, case):
    found = case("qwen3", policy)
    with watched(found.model, found.settings, found.judge, num_gpu_blocks_override=50) as engine:
        yield engine


def check_every_step(engine, state: int) -> int:
    """The formula at every step, for what the scheduler has scheduled; no block is shared or lost. Returns the steps."""
    total = engine.recorder.pool.num_gpu_blocks - 1  # one is never handed out
    for step in engine.recorder.blocks:
        for tokens, blocks in step.running.values():
            assert len(blocks) == state + cdiv(min(tokens, BUDGET), BLOCK)
        held = [block for _, blocks in step.running.values() for block in blocks]
        assert len(set(held)) == len(held) == total - step.free
    return len(engine.recorder.blocks)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_the_formula_at_every_step(engine, policy, chunk):
    engine.chunk(chunk)
    free = engine.recorder.pool.get_num_free_blocks()
    answers = engine.serve(JOBS)
    assert check_every_step(engine, STATE_BLOCKS[policy]) >= 20
    most = {name: max(len(s.running[name][1]) for s in engine.recorder.blocks if name in s.running) for name in answers}
    assert max(most.values()) == STATE_BLOCKS[policy] + cdiv(BUDGET, BLOCK) and len(set(most.values())) > 1
    assert engine.recorder.pool.get_num_free_blocks() == free


def test_blocks_come_back(engine, policy):
    """On abort and on preemption at once, not only when the last request is done."""
    engine.chunk(7)
    pool, free = engine.recorder.pool, engine.recorder.pool.get_num_free_blocks()

    def interrupt(step):
        if step == 5:
            held, before = engine.recorder.blocks[-1].running, pool.get_num_free_blocks()
            internal = engine.engine.output_processor.external_req_ids["7"]
            engine.engine.abort_request(["7"])
            assert pool.get_num_free_blocks() - before == sum(len(held[name][1]) for name in internal) > 0
        if step == 8:
            assert pool.get_num_free_blocks() < free
            engine.engine.reset_prefix_cache(reset_running_requests=True)
            assert pool.get_num_free_blocks() == free

    engine.serve(JOBS, interrupt)
    assert check_every_step(engine, STATE_BLOCKS[policy]) >= 20
    assert pool.get_num_free_blocks() == free and not engine.recorder.manager.req_to_blocks


def observed(engine) -> tuple[list, set]:
    """Everything that two requests show, to the bit, and the blocks they held."""
    answers = engine.serve([Job(130, new=70), Job(5, new=70)])
    shown = []
    for name, answer in answers.items():
        out = answer.outputs[0]
        logprobs = [{t: e.logprob for t, e in at.items()} for at in [*answer.prompt_logprobs[1:], *out.logprobs]]
        shown.append((out.token_ids, logprobs, dict(engine.recorder.held[name])))
    blocks = {b for step in engine.recorder.blocks for _, held in step.running.values() for b in held}
    return shown, blocks


@pytest.mark.parametrize("chunk", [7, None])
def test_a_reused_block_shows_nothing_of_its_former_request(engine, chunk):
    """A new pool is all zeros; then one full of other requests' bytes, then one full of NaN."""
    engine.chunk(chunk)
    engine.fill_pool(0)
    fresh, _ = observed(engine)
    engine.serve(JOBS)
    former = {b for step in engine.recorder.blocks for _, held in step.running.values() for b in held}
    after_others, blocks = observed(engine)
    assert blocks <= former
    engine.fill_pool(255)
    poisoned, _ = observed(engine)
    assert fresh == after_others
    assert fresh == poisoned


def test_reported_concurrency_and_bytes(tmp_path):
    """vLLM's own figure for 4,096 tokens, in pools of the same size."""
    model = write_tiny_model(tmp_path / "model", "llama", layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
    shape = {"sinks": SINKS, "window": WINDOW, "topk": LARGE - SINKS - WINDOW}
    scorer = write_random_scorer(tmp_path / "scorer", model, "mlstm", **shape)
    streaming, learned = {"policy": "streaming-llm", "budget": LARGE}, {"policy": "kvpop", "scorer": str(scorer)}
    sizes = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 128 << 20, "dtype": "bfloat16", "block_size": 64}
    reported = {}
    for name, policy, floats in (("dense", None, 0), ("streaming", streaming, 0), ("mlstm", learned, 64 * 64 + 64 + 1)):
        with watched(model, policy, **sizes) as engine:
            counted = dense_request_bytes(LAYERS, HEADS, HEAD_DIM, torch.bfloat16, LENGTH)
            if policy is not None:
                layout = PageLayout(HEADS, HEAD_DIM, torch.bfloat16, state_floats=floats)
                counted = request_bytes(layout, LAYERS, LENGTH, LARGE)
            reported[name] = check_pool(engine, counted)
            print(f"{name}: {counted.allocated} bytes allocated, {counted.canonical} canonical, {reported[name]:.1f}x")
    assert reported["streaming"] / reported["dense"] >= 3.7
    assert reported["mlstm"] / reported["dense"] >= 3.4


def check_pool(engine, counted) -> float:
    """vLLM's reported concurrency, after checking that the pool agrees with our accounting; bytes of all layers."""
    config, pool = engine.engine.vllm_config, engine.recorder.pool
    engine.serve([Job(LENGTH - 8, new=2, scored=False)])
    most = max(len(blocks) for step in engine.recorder.blocks for _, blocks in step.running.values())
    total = sum(cache.nbytes for cache in engine.recorder.runner.kv_caches)
    assert most == counted.blocks
    assert most * total == counted.allocated * pool.num_gpu_blocks
    assert config.cache_config.kv_cache_max_concurrency == pytest.approx(total / counted.allocated)
    return config.cache_config.kv_cache_max_concurrency
