"""Requests with budgets, protection and seeds of their own, together in one engine, against the oracle of each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine.driving import BLOCK, Job, watched
from engine.judge import Judge
from engine.matrix import state_blocks
from policies.matrix import ROWS

from kvpop_vllm.testing import random_prompt

BUDGET, MOST, PROTECT, MOST_PROTECT = 40, 72, 20, 50
TEXT = random_prompt(150, seed=96)
POLICIES = {
    "kvpop": ("qwen3", {"window": 16, "topk": 20, "trained": ((16, 20), (8, 12))}),
    "h2o": ("qwen3", {}),
    "dms-query": ("llama", {"window": 8, "topk": 28}),
    "momentkv": ("llama", {}),
    "random": ("qwen3", {}),
}
ASKS = (
    None,
    {"kv_budget": 26},
    {"kv_budget": 72},
    {"kv_budget": 33, "kv_protect_prompt": 0},
    {"kv_protect_prompt": 50},
    {"kv_budget": 64, "kv_protect_prompt": 7},
)
SEEDS = ({"kv_seed": 3}, {"kv_seed": 2**64 - 1, "kv_budget": 30})


def window(policy: str, sinks: int, budget: int) -> int:
    """w of a request's budget, from the policies' definitions."""
    if policy == "kvpop":
        return 16 if budget - sinks >= 36 else 8
    return {"h2o": budget // 2, "dms-query": 8, "momentkv": 1, "random": 11}[policy]


class Judges:
    """One oracle for each thing that requests ask for."""

    def __init__(self, policy: str, case):
        self.policy, self.case, self.known = policy, case, {}

    def of(self, asks: dict | None) -> Judge:
        asks = asks or {}
        key = tuple(sorted(asks.items()))
        if key not in self.known:
            plain, budget = self.case.judge.policy, asks.get("kv_budget", BUDGET)
            w = window(self.policy, plain.sinks, budget)
            seed = asks.get("kv_seed", 0)
            own = replace(plain, window=w, topk=budget - plain.sinks - w, seeds=(0, seed))
            self.known[key] = Judge(self.case.model, own, protect=asks.get("kv_protect_prompt", PROTECT))
        return self.known[key]


@pytest.fixture(scope="module", params=POLICIES)
def engine(request, case):
    kind, options = POLICIES[request.param]
    found = case(kind, request.param, budget=BUDGET, protect_prompt=PROTECT, **options)
    settings = found.settings | {"max_budget": MOST, "max_protect": MOST_PROTECT}
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 121, "scheduling_policy": "priority"}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, settings, **sizes) as made:
        made.policy, made.judges = request.param, Judges(request.param, found)
        sinks = found.judge.policy.sinks
        made.recorder.windows = {budget: window(request.param, sinks, budget) for budget in range(24, MOST + 1)}
        made.poison(patch)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "engine" in request.fixturenames:
        assert not request.getfixturevalue("engine").leaks()


def asks_of(engine) -> tuple:
    return ASKS + (SEEDS if engine.policy == "random" else ())


def check(engine, answers, jobs: list[Job], finished=None) -> None:
    """What every answer shows, by the oracle of what it asked for; and the blocks at every step."""
    judged = 0
    for asks in {str(job.asks): job.asks for job in jobs}.values():
        judge = engine.judges.of(asks)
        mine = {key: a for key, a in answers.items() if jobs[int(a.request_id)].asks == asks}
        mine = {key: a for key, a in mine.items() if a.outputs[0].finish_reason == "length"}
        if mine:
            print(asks, judge.check(mine, {key: engine.recorder.held[key] for key in mine}))
        judged += len(mine)
    assert judged == (len(answers) if finished is None else finished)
    sinks = engine.judges.case.judge.policy.sinks
    engine.check_blocks(state_blocks(engine.policy), BUDGET, sinks=sinks)


@pytest.mark.parametrize("chunk", [7, None])
def test_sixteen_of_all_kinds(engine, chunk):
    """In one batch: budgets, windows, protection and seeds are each request's own, with hits and without."""
    engine.chunk(chunk)
    asks, lengths = asks_of(engine), (3, BLOCK, 41, 60, 90)
    jobs = [Job(new=40, prompt=TEXT[: lengths[i % 5]], asks=asks[i % len(asks)], scored=i % 3 == 0) for i in range(16)]
    answers = engine.serve(jobs)
    assert len(answers) == 16 and max(len(step.running) for step in engine.recorder.blocks) > 8
    check(engine, answers, jobs)
    again = [replace(job, scored=False) for job in jobs]
    answers = engine.serve(again)
    assert len({a.num_cached_tokens for a in answers.values()}) > 2, (
        "each hits what it protects, up to 0, 16 and 48 tokens"
    )
    check(engine, answers, again)


def test_interrupted(engine):
    """Preempted with what they asked for, and some aborted."""
    engine.chunk(7)
    jobs = [Job(new=30, prompt=TEXT[: 20 + 5 * i], asks=asks, scored=False) for i, asks in enumerate(asks_of(engine))]

    def interrupt(step):
        if step in (4, 21):
            engine.engine.reset_prefix_cache(reset_running_requests=True)
        if step == 12:
            engine.engine.abort_request(["1"])

    answers = engine.serve(jobs, interrupt)
    assert max(engine.recorder.preemptions.values()) == 2
    check(engine, answers, jobs, finished=len(jobs) - 1)


@pytest.mark.parametrize("policy", ["kvpop", "h2o"])
def test_any_requests_against_a_tight_pool(case, policy):
    """A thousand random requests that may ask for what they like, in a pool that holds the largest of them once: all are served,
    none waits for ever, nothing leaks, and none holds more blocks than it was counted with."""
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
        for _ in range(25):
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
        assert done == 1000 and ROWS[policy]


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
    """Each in one line, before the engine has seen the request; and it serves on."""
    from vllm.exceptions import VLLMValidationError

    kind, options = POLICIES["kvpop"]
    found = case(kind, "kvpop", budget=BUDGET, protect_prompt=PROTECT, **options)
    settings = found.settings | {"max_budget": MOST, "max_protect": MOST_PROTECT}
    with watched(found.model, settings) as engine:
        for asks, message in REFUSED:
            with pytest.raises(VLLMValidationError) as error:
                engine.add("0", Job(new=2, prompt=TEXT[:60], asks=asks))
            assert str(error.value) == message
        own = {"kv_budget": 30, "of another plugin": 1}
        assert len(engine.serve([Job(new=2, prompt=TEXT[:60], asks=own)])) == 1
        assert own == {"kv_budget": 30, "of another plugin": 1}
