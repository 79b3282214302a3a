"""Tests of compression that need their own engine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine.driving import Job, watched
from engine.matrix import BUDGET, make_case, state_blocks
from engine.test_compression import TEXT, check


def test_a_pool_too_small_for_all(tiny_model, tmp_path):
    """Prompts that fit one or two at a time are all served, because compression frees blocks for the next."""
    found = make_case(tiny_model("qwen3"), tmp_path, "snapkv", protect_prompt=True)
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 30}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, found.settings, found.judge, **sizes) as engine:
        engine.policy = "snapkv"
        engine.poison(patch)
        engine.chunk(16)
        jobs = [Job(new=30, prompt=[*TEXT[:120], i], scored=False) for i in range(8)]
        answers = engine.serve(jobs)
        assert len(answers) == 8
        check(engine, answers)
        assert not engine.leaks()


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_any_prompts_against_a_tight_pool(tiny_model, tmp_path, policy):
    """Hundreds of random requests are served in a pool that holds the largest of them once.

    None holds more blocks than it was counted with, and nothing leaks.
    """
    found = make_case(tiny_model("qwen3"), tmp_path, policy, protect_prompt=True)
    settings = found.settings | ({"max_budget": 80} if policy == "snapkv" else {})
    draw, sizes = random.Random(6), {"max_model_len": 128, "num_gpu_blocks_override": 18}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, settings, **sizes) as engine:
        engine.poison(patch)
        spec = engine.recorder.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        engine.recorder.windows = dict.fromkeys(range(30, 81), found.judge.policy.window)
        assert spec.most_blocks(128) <= 17 < 2 * spec.most_blocks(128)
        for _ in range(13):
            jobs = []
            for _ in range(40):
                length = draw.randint(1, 100)
                asks = {"kv_budget": draw.randint(30, 80)} if policy == "snapkv" and draw.random() < 0.7 else None
                prompt = TEXT[draw.choice((0, 7)) :][:length]
                jobs.append(Job(new=draw.randint(1, min(25, 127 - length)), prompt=prompt, asks=asks, scored=False))
            answers = engine.serve(jobs)
            assert all(len(a.outputs[0].token_ids) == jobs[int(a.request_id)].new for a in answers.values())
            assert len(answers) == 40 and not engine.leaks()
            for step in engine.recorder.blocks:
                for name, (tokens, row) in step.running.items():
                    told = tokens, step.protected[name], step.budgets.get(name)
                    assert len(row) == spec.blocks(*told) <= spec.most_blocks(128)


def test_heads_that_divide_more_blocks_than_equal_ones_take(tiny_model, tmp_path):
    """Unequal heads may take one block more than equal ones.

    The budget fills whole blocks, of which unequal heads fill two in part. The window is so small that every
    head keeps different tokens.
    """
    shape = {"protect_prompt": True, "budget": 64, "sinks": 2, "window": 4}
    found = make_case(tiny_model("qwen3"), tmp_path, "adakv", **shape)
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 80}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, found.settings, found.judge, **sizes) as engine:
        engine.poison(patch)
        engine.chunk(50)
        lengths = (26, 63, 64, 65, 66, 80, 119, 150)
        answers = engine.serve([Job(new=40, prompt=TEXT[:n], scored=False) for n in lengths])
        engine.verdict(answers)
        for step in engine.recorder.blocks:
            for name, (tokens, row) in step.running.items():
                prompt = step.protected[name]
                if tokens > prompt:
                    full = -(-min(tokens, 64) // 16) if prompt <= 64 else 5
                    assert len([block for block in row if block]) == state_blocks("adakv") + full
        shares = [
            [len(positions) for positions in engine.recorder.held[name][layer][-1].positions]
            for name in answers
            for layer in (0, 1)
        ]
        assert all(sum(share) == 2 * 64 for share in shares) and sum(a != b for a, b in shares) >= 8
        assert min(map(min, shares)) >= 64 // 5 and not engine.leaks()


def test_budgets_of_requests(tiny_model, tmp_path):
    """Each request is compressed to its own budget."""
    found = make_case(tiny_model("qwen3"), tmp_path, "snapkv", protect_prompt=True)
    asks = (None, {"kv_budget": 30}, {"kv_budget": 80})
    policy, budgets = found.judge.policy, (BUDGET, 30, 80)
    judges = [
        replace(found.judge, policy=replace(policy, topk=budget - policy.sinks - policy.window), known={})
        for budget in budgets
    ]
    with watched(found.model, found.settings | {"max_budget": 80}) as engine:
        engine.recorder.windows = dict.fromkeys(budgets, policy.window)
        jobs = [Job(new=50, prompt=TEXT[:n], asks=asks[i % 3]) for i, n in enumerate((60, 60, 60, 120, 110, 100))]
        answers = engine.serve(jobs)
        for i, judge in enumerate(judges):
            mine = {key: a for key, a in answers.items() if int(a.request_id) % 3 == i}
            assert len(mine) == 2
            print(judge.check(mine, {key: engine.recorder.held[key] for key in mine}))
