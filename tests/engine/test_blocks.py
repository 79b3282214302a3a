"""Blocks that a request holds, frees and reuses."""

from __future__ import annotations

import pytest
from engine.driving import BLOCK, Job, watched
from engine.matrix import BUDGET, state_blocks

from kvpop_vllm.kernels.pages import cdiv

JOBS = [Job(n, new=20, scored=False) for n in (1, 14, 16, 17, BUDGET - 5, BUDGET, 90, 300)]


@pytest.fixture(scope="module", params=["kvpop", "streaming-llm", "l2norm"])
def policy(request):
    return request.param


@pytest.fixture(scope="module")
def engine(policy, case):
    found = case("qwen3", policy)
    with watched(found.model, found.settings, found.judge, num_gpu_blocks_override=50) as engine:
        yield engine


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_the_formula_at_every_step(engine, policy, chunk):
    engine.chunk(chunk)
    free = engine.recorder.pool.get_num_free_blocks()
    answers = engine.serve(JOBS)
    assert engine.check_blocks(state_blocks(policy), BUDGET) >= 20
    most = {name: max(len(s.running[name][1]) for s in engine.recorder.blocks if name in s.running) for name in answers}
    assert max(most.values()) == state_blocks(policy) + cdiv(BUDGET, BLOCK) and len(set(most.values())) > 1
    assert engine.recorder.pool.get_num_free_blocks() == free


def test_blocks_come_back(engine, policy):
    """Abort and preemption free the blocks of a request at once, before other requests end."""
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
    assert engine.check_blocks(state_blocks(policy), BUDGET) >= 20
    assert pool.get_num_free_blocks() == free and not engine.recorder.manager.req_to_blocks


def observed(engine) -> tuple[list, set]:
    """Return everything that two requests show, to the bit, and the blocks they held."""
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
    """Results are the same in a pool of zeros, of other requests' bytes, and of NaN."""
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
