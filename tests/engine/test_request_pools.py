"""Tests of requests with their own sizes that need their own engine."""

from __future__ import annotations

import random

import pytest
from engine.driving import Job, watched
from engine.matrix import state_blocks
from engine.test_requests import BUDGET, MOST, MOST_PROTECT, POLICIES, PROTECT, TEXT, window

from kvpop_vllm.testing import random_prompt


@pytest.mark.parametrize("policy, waves", [("kvpop", 8), ("h2o", 25)])
def test_any_requests_against_a_tight_pool(case, policy, waves):
    """Hundreds of random requests with any options are all served in a pool for the largest of them.

    None waits for ever, none holds more blocks than it was counted with, and nothing leaks.
    """
    kind, options = POLICIES[policy]
    found = case(kind, policy, budget=BUDGET, protect_prompt=PROTECT, **options)
    settings = found.settings | {"max_budget": MOST, "max_protect": "all"}
    draw, sizes = random.Random(5), {"max_model_len": 128, "num_gpu_blocks_override": 16}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, settings, **sizes) as engine:
        engine.poison(patch)
        spec = engine.recorder.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        assert spec.most_blocks(128) <= 15 < 2 * spec.most_blocks(128)
        sinks, done = found.judge.policy.sinks, 0
        engine.recorder.windows = {budget: window(policy, sinks, budget) for budget in range(24, MOST + 1)}
        for _ in range(waves):
            jobs = []
            for _ in range(40):
                asks = {}
                if draw.random() < 0.7:
                    asks["kv_budget"] = draw.randint(24, MOST)
                if draw.random() < 0.7:
                    asks["kv_protect_prompt"] = draw.choice(("all", 0, draw.randint(0, 130)))
                length = draw.randint(1, 100)
                start = draw.randrange(50)
                prompt = TEXT[start : start + length] if draw.random() < 0.7 else random_prompt(length, seed=length)
                new = draw.randint(1, min(25, 127 - len(prompt)))
                jobs.append(Job(new=new, prompt=prompt, asks=asks or None, scored=False))
            answers = engine.serve(jobs)
            done += len(answers)
            assert all(len(a.outputs[0].token_ids) == jobs[int(a.request_id)].new for a in answers.values())
            engine.check_blocks(state_blocks(policy), BUDGET, sinks=sinks)
            assert not engine.leaks()
        assert done == 40 * waves


REFUSED = [
    ({"kv_budget": "512"}, "kv_budget must be a whole number of tokens, got '512'"),
    ({"kv_budget": 30.5}, "kv_budget must be a whole number of tokens, got 30.5"),
    ({"kv_budget": [30]}, "kv_budget must be a whole number of tokens, got [30]"),
    ({"kv_budget": 73}, "kv_budget 73 is more than this server allows: lower it to at most 72"),
    ({"kv_budget": 0}, "kv_budget must be at least 1, got 0"),
    ({"kv_budget": 12}, "a budget of 12 is too small for 4 sinks + window 8 + 1: raise kv_budget to at least 13"),
    ({"kv_protect_prompt": "al"}, "kv_protect_prompt must be \"all\" or a whole number of tokens, got 'al'"),
    ({"kv_protect_prompt": 51}, "kv_protect_prompt asks for 51 tokens, more than this server allows: lower it to at most 50"),
    ({"kv_protect_prompt": "all"}, "kv_protect_prompt asks for 60 tokens, more than this server allows: lower it to at most 50"),
    ({"kv_protect_prompt": -1}, "kv_protect_prompt must be \"all\" or a whole number of tokens, got -1"),
    ({"kv_seed": 3}, "--kv-policy kvpop draws nothing: leave kv_seed out"),
    ({"kv_bugdet": 3}, "unknown key 'kv_bugdet': use kv_budget, kv_protect_prompt, kv_seed"),
    ({"kvpop": [0, 9999, 8, None]}, "the key 'kvpop' is reserved: leave it out"),
]  # fmt: skip


def test_refusals(case):
    """Each wrong option is refused in one line before the engine sees the request.

    The engine serves on.
    """
    from vllm.exceptions import VLLMValidationError

    kind, options = POLICIES["kvpop"]
    found = case(kind, "kvpop", budget=BUDGET, protect_prompt=PROTECT, **options)
    settings = found.settings | {"max_budget": MOST, "max_protect": MOST_PROTECT}
    with watched(found.model, settings) as engine:
        for asks, message in REFUSED:
            with pytest.raises(VLLMValidationError) as error:
                engine.add("0", Job(new=2, prompt=TEXT[:60], asks=asks))
            assert str(error.value) == message
        engine.recorder.windows = {30: window("kvpop", 4, 30)}
        own = {"kv_budget": 30, "of another plugin": 1}
        assert len(engine.serve([Job(new=2, prompt=TEXT[:60], asks=own)])) == 1
        assert own == {"kv_budget": 30, "of another plugin": 1}
