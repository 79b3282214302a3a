"""Prompts that are held until their end and then compressed, in ways that test_fidelity.py leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import BLOCK, VOTERS, Job, serving
from engine.matrix import BUDGET

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(260, seed=94)


@pytest.fixture(scope="module", params=[pytest.param("snapkv", marks=pytest.mark.slow), "adakv"])
def engine(request, case):
    options = {"max_model_len": 512, "num_gpu_blocks_override": 181}
    with serving(case("qwen3", request.param, protect_prompt=True), **options) as made:
        yield made


def test_hits(engine):
    """All whole blocks before the voting queries are hit, within one step and in later ones.

    Blocks of a request that has been compressed are hit while another request still reads them.
    """
    engine.chunk(None)
    jobs = [Job(new=40, prompt=TEXT[:n], scored=False) for n in (150, 150, 150, 90, 49, 47)]
    answers = engine.serve(jobs)
    hits = {a.request_id: a.num_cached_tokens for a in answers.values()}
    assert hits["0"] == 0 and hits["1"] == hits["2"] == (150 - VOTERS) // BLOCK * BLOCK
    assert hits["3"] == (90 - VOTERS) // BLOCK * BLOCK and hits["4"] == 16 and hits["5"] == 0
    engine.check(answers)
    engine.chunk(7)
    late = {3: Job(new=9, prompt=TEXT[:200], scored=False), 14: Job(new=9, prompt=TEXT[:150], scored=False)}
    answers = engine.serve(
        [Job(1, new=60, scored=False), Job(new=20, prompt=TEXT[:150], scored=False)],
        lambda step: step in late and engine.add(f"late {step}", late[step]),
    )
    assert len(answers) == 4 and max(a.num_cached_tokens for a in answers.values()) >= 112
    engine.check(answers)


def test_a_resumed_chunk_may_cross_the_end(engine):
    """A chunk may contain the end of the prompt and all tokens that were generated behind it."""

    def interrupt(step):
        if step == 30:
            engine.engine.reset_prefix_cache(reset_running_requests=True)

    engine.chunk(None)
    answers = engine.serve([Job(length=n, new=60, scored=False) for n in (20, 70, 120)], interrupt)
    assert set(engine.recorder.preemptions.values()) == {1}
    assert max(max(engine.chunks(name)) for name in answers) == 120 + 30
    engine.check(answers)


def test_votes_decide(engine):
    """The oracle's votes keep neither just the newest tokens nor everything."""
    reference = engine.judge.reference(TEXT[:200], prompt=150)
    seen = reference.exact.visible[0][:, 151, : 150 - VOTERS]
    assert not seen[:, -10:].all() and seen.any(-1).all()
    assert (reference.exact.visible[0][:, 149, :150]).all()


def test_heads_that_divide_more_blocks_than_equal_ones_take(case):
    """Unequal heads may take one block more than equal ones.

    The budget fills whole blocks, of which unequal heads fill two in part. The window is so small that every
    head keeps different tokens.
    """
    found = case("qwen3", "adakv", protect_prompt=True, budget=64, sinks=2, window=4)
    with serving(found, max_model_len=256, num_gpu_blocks_override=80) as engine:
        engine.chunk(50)
        lengths = (26, 63, 64, 65, 66, 80, 119, 150)
        answers = engine.serve([Job(new=40, prompt=TEXT[:n], scored=False) for n in lengths])
        engine.verdict(answers)
        for step in engine.recorder.blocks:
            for name, (tokens, row) in step.running.items():
                prompt = step.protected[name]
                if tokens > prompt:
                    full = cdiv(min(tokens, 64), BLOCK) if prompt <= 64 else 5
                    assert len([block for block in row if block]) == engine.state_blocks + full
        held = [layers[layer][-1].positions for layers in engine.recorder.held.values() for layer in (0, 1)]
        shares = [[len(positions) for positions in heads] for heads in held]
        assert all(sum(share) == 2 * 64 for share in shares) and sum(a != b for a, b in shares) >= 8
        assert min(map(min, shares)) >= 64 // 5


def test_budgets_of_requests(case):
    """Each request is compressed to its own budget."""
    found = case("qwen3", "snapkv", protect_prompt=True)
    asks = (None, {"kv_budget": 30}, {"kv_budget": 80})
    policy, budgets = found.judge.policy, (BUDGET, 30, 80)
    judges = [
        replace(found.judge, policy=replace(policy, topk=budget - policy.sinks - policy.window), known={})
        for budget in budgets
    ]
    with serving(found._replace(settings=found.settings | {"max_budget": 80})) as engine:
        engine.recorder.windows = dict.fromkeys(budgets, policy.window)
        jobs = [Job(new=50, prompt=TEXT[:n], asks=asks[i % 3]) for i, n in enumerate((60, 60, 60, 120, 110, 100))]
        answers = engine.serve(jobs)
        engine.check_blocks()
        for i, judge in enumerate(judges):
            mine = {key: a for key, a in answers.items() if int(a.request_id) % 3 == i}
            assert len(mine) == 2
            print(judge.check(mine, {key: engine.recorder.held[key] for key in mine}))
