"""Requests with their own budgets, protection and seeds in one engine, each compared with its own oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import BLOCK, Job, serving
from engine.judge import Judge
from engine.matrix import Case

from kvpop_vllm.testing import random_prompt

BUDGET, MOST, PROTECT, MOST_PROTECT = 40, 72, 20, 50
TEXT = random_prompt(150, seed=96)
POLICIES = {
    "kvpop": ("qwen3", {"window": 16, "topk": 20, "trained": ((16, 20), (8, 12))}),
    "dms-query": ("llama", {"window": 8, "topk": 28}),
    "momentkv": ("llama", {}),
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


class Judges:
    """One judge for each set of options that requests ask for."""

    def __init__(self, policy: str, case: Case):
        self.policy, self.case, self.known = policy, case, {}

    def window(self, budget: int) -> int:
        """Return w of a request's budget, by the policies' definitions."""
        if self.policy == "h2o":
            return budget // 2
        if self.policy == "kvpop":
            return 16 if budget - self.case.judge.policy.sinks >= 36 else 8
        return self.case.judge.policy.window

    def windows(self) -> dict[int, int]:
        """Return w of all budgets that requests ask for."""
        return {budget: self.window(budget) for budget in range(24, MOST + 1)}

    def of(self, asks: dict | None) -> Judge:
        asks = asks or {}
        key = tuple(sorted(asks.items()))
        if key not in self.known:
            plain = self.case.judge.policy
            budget = asks.get("kv_budget", plain.budget)
            own = replace(plain, window=self.window(budget), seeds=(0, asks.get("kv_seed", 0)))
            if "kv_budget" in asks:
                own = replace(own, topk=budget - own.sinks - own.window)
            protect = asks.get("kv_protect_prompt", self.case.judge.protect)
            self.known[key] = Judge(self.case.model, own, protect=True if protect == "all" else protect)
        return self.known[key]

    def check(self, engine, answers: dict, jobs: dict[str, Job]) -> None:
        """Check every answer against the oracle of its options.

        Args:
            engine: the watched engine.
            answers: request id -> finished answer.
            jobs: name of each request -> what it asked.
        """
        asked = {name: jobs[answer.request_id].asks for name, answer in answers.items()}
        for asks in {str(asks): asks for asks in asked.values()}.values():
            mine = {name: answers[name] for name in answers if asked[name] == asks}
            print(asks, self.of(asks).check(mine, {name: engine.recorder.held[name] for name in mine}))


@pytest.fixture(scope="module", params=["kvpop", *(pytest.param(p, marks=pytest.mark.slow) for p in [*POLICIES][1:])])
def engine(request, case):
    kind, options = POLICIES[request.param]
    found = case(kind, request.param, budget=BUDGET, protect_prompt=PROTECT, **options)
    found = found._replace(settings=found.settings | {"max_budget": MOST, "max_protect": MOST_PROTECT})
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 121, "scheduling_policy": "priority"}
    with serving(found, **sizes) as made:
        made.judges = Judges(request.param, found)
        made.recorder.windows = made.judges.windows()
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    yield
    assert not engine.leaks()


def asks_of(engine) -> tuple:
    return ASKS + (SEEDS if engine.judges.policy == "vase" else ())


def check(engine, answers: dict, jobs: list[Job]) -> None:
    engine.judges.check(engine, answers, {str(i): job for i, job in enumerate(jobs)})
    engine.check_blocks()


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
    hits = {a.num_cached_tokens for a in answers.values()}
    assert len(hits) > 2, "each hits what it protects, up to 0, 16 and 48 tokens"
    check(engine, answers, again)


def test_interrupted(engine):
    """Preempted requests keep their options, and one request is aborted."""
    engine.chunk(7)
    jobs = [Job(new=30, prompt=TEXT[: 20 + 5 * i], asks=asks, scored=False) for i, asks in enumerate(asks_of(engine))]

    def interrupt(step):
        if step in (4, 21):
            engine.engine.reset_prefix_cache(reset_running_requests=True)
        if step == 12:
            engine.engine.abort_request(["1"])

    answers = engine.serve(jobs, interrupt)
    assert max(engine.recorder.preemptions.values()) == 2
    finished = {name: a for name, a in answers.items() if a.outputs[0].finish_reason == "length"}
    assert len(finished) == len(jobs) - 1
    check(engine, finished, jobs)
