"""Requests that share protected prompts, by hits within a step and across steps, under all interruptions.

Results are compared with the oracle, which knows no hits. Freed blocks are overwritten with NaN.
"""

import pytest
from engine.driving import BLOCK, Job, preempt_all, serving

from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(260, seed=98)
POLICIES = [("kvpop", True), ("streaming-llm", 40)]


@pytest.fixture(scope="module", params=POLICIES, ids=["kvpop-all", "streaming-40"])
def engine(request, case):
    """Yield an engine with a pool of 60 blocks, which a few requests fill."""
    policy, protect = request.param
    options = {"max_model_len": 512, "num_gpu_blocks_override": 61, "scheduling_policy": "priority"}
    with serving(case("qwen3", policy, protect_prompt=protect), **options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    engine.chunk(None)
    engine.engine.reset_prefix_cache()
    yield
    assert not engine.leaks()


def fork(length: int, new: int = 12, seed: int | None = None, common: int = 0, **options) -> Job:
    """Return a request with the common text as prompt; a seed makes its tokens from ``common`` on random."""
    prompt = list(TEXT[:length])
    if seed is not None:
        prompt[common:] = random_prompt(length - common, seed=seed)
    return Job(new=new, prompt=prompt, scored=False, **options)


def most(engine, tokens: int) -> int:
    """Return how many of ``tokens`` equal tokens a longer prompt may hit."""
    return (tokens if engine.judge.protect is True else min(tokens, engine.judge.protect)) // BLOCK * BLOCK


def test_salts_separate(engine):
    answers = engine.serve([fork(60, salt="a"), fork(60, salt="b"), fork(60), fork(60, salt="a")])
    assert sorted(a.num_cached_tokens for a in answers.values()) == [0, 0, 0, most(engine, 59)]
    engine.check(answers)


def test_a_shorter_prompt_hits_no_more_than_its_own(engine):
    """A preempted request hits no tokens beyond its own protected prompt.

    Its generated tokens are part of another request's prompt, whose blocks are cached.
    """
    (first,) = engine.serve([fork(20, new=60)]).values()
    longer = [*first.prompt_token_ids, *first.outputs[0].token_ids]

    def preempt(step):
        if step == 50:
            engine.add("next to it", Job(new=1, prompt=longer, scored=False))
        if step == 54:
            preempt_all(engine.recorder.scheduler)

    answers = engine.serve([fork(20, new=60)], preempt)
    assert len(answers) == 2 and [engine.recorder.preemptions[name] for name in answers] in ([0, 1], [1, 0])
    engine.check(answers)


def test_priorities(engine):
    """Requests of low priority are preempted when others grow, and a late urgent one is not."""
    jobs = [fork(41 + i, new=60, seed=30 + i, common=20, priority=5 + i % 2) for i in range(14)]
    urgent = fork(200, new=4, seed=50, common=100, priority=0)
    answers = engine.serve(jobs, lambda step: step == 3 and engine.add("urgent", urgent))
    preempted = {answers[name].request_id for name, often in engine.recorder.preemptions.items() if often}
    assert len(answers) == 15 and preempted and "urgent" not in preempted
    assert any(int(name) % 2 for name in preempted)
    engine.check(answers)


def test_several_samples_of_one_prompt(engine):
    """Three of four continuations of a prompt hit the blocks that the first one is computing."""
    answers = engine.serve([Job(new=30, prompt=list(TEXT[:65]), scored=False, samples=4)])
    assert len(answers) == 4
    assert len({tuple(a.outputs[0].token_ids) for a in answers.values()}) > 1
    first = engine.recorder.blocks[0].running
    shared = set.intersection(*(set(blocks) for *_, blocks in first.values()))
    assert len(first) == 4 and len(shared) == most(engine, 64) // BLOCK
    engine.check(answers)
