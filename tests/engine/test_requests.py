"""Requests with their own budgets, protection and seeds in one engine, each compared with its own oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import BLOCK, Job, watched
from engine.judge import Judge
from engine.matrix import state_blocks

from kvpop_vllm.testing import random_prompt

BUDGET, MOST, PROTECT, MOST_PROTECT = 40, 72, 20, 50
TEXT = random_prompt(150, seed=96)
POLICIES = {
    "kvpop": ("qwen3", {"window": 16, "topk": 20, "trained": ((16, 20), (8, 12))}),
    "h2o": ("qwen3", {}),
    "dms-query": ("llama", {"window": 8, "topk": 28}),
    "momentkv": ("llama", {}),
    "random": ("qwen3", {}),
    "vase": ("qwen3", {}),
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
    """Return w of a request's budget, by the policies' definitions."""
    if policy == "kvpop":
        return 16 if budget - sinks >= 36 else 8
    return {"h2o": budget // 2, "dms-query": 8, "momentkv": 1, "random": 11, "vase": 11}[policy]


class Judges:
    """One judge for each set of options that requests ask for."""

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
    return ASKS + (SEEDS if engine.policy in ("random", "vase") else ())


def check(engine, answers, jobs: list[Job], finished=None) -> None:
    """Check every answer against the oracle of its options, and the blocks at every step."""
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
    """Sixteen requests of one batch keep their own budgets, windows, protection and seeds."""
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
    """Preempted requests keep their options, and some requests are aborted."""
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
