"""The engine equals the naive oracle: retained tokens at every step, log-probabilities, greedy tokens."""

from __future__ import annotations

import pytest
from engine.driving import Job
from engine.matrix import BUDGET, SINKS, WINDOW
from policies.matrix import ROWS

from kvpop_vllm.testing import OraclePolicy, random_prompt

TOGETHER = [1, 2, 13, 17, 31, 55, 56, 57, 70, 90, 112, 130, 200]
SOME_ALIKE = [1, 17, 31, 31, 31, 55, 55, 56, 56, 57, 57, 130, 130]
"""An equal number of prompts for policies with a slow oracle, which follows equal requests once."""


@pytest.fixture
def longest(request):
    """Return the number of tokens of the longest prompt."""
    return ROWS[request.node.callspec.params["served"][1]].longest * BUDGET


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(served, longest, chunk):
    """Prompts in chunks give the oracle's results.

    vLLM does not cut the prompt of a request that is alone, so the first request generates until the last
    prompt is read.
    """
    served.chunk(chunk)
    length = longest if chunk > 1 else min(longest, 4 * BUDGET)
    jobs = [Job(1, new=length // chunk + 2), Job(31), Job(BUDGET), Job(length, new=4)]
    answers = served.serve(jobs)
    for name, answer in answers.items():
        whole, rest = divmod(len(answer.prompt_token_ids), chunk)
        decodes = len(answer.outputs[0].token_ids) - 1
        assert served.chunks(name) == [chunk] * whole + [rest] * (rest > 0) + [1] * decodes
    served.verdict(answers)


def test_sixteen_together(served, longest):
    served.chunk(None)
    more = [Job(min(300, longest - 20)), Job(longest), Job(40, new=longest // 4)]
    answers = served.serve([*map(Job, TOGETHER if longest == 10 * BUDGET else SOME_ALIKE), *more])
    assert len(answers) == max(len(step.running) for step in served.recorder.blocks) == 16
    assert all(served.chunks(name)[0] == len(answer.prompt_token_ids) for name, answer in answers.items())
    served.verdict(answers)


def test_eviction_shows(served, longest):
    """The oracle's results differ from those of keeping everything by far more than the error budget."""
    prompt, policy = random_prompt(longest, seed=longest), served.judge.policy
    everything = OraclePolicy(policy.scorer, sinks=0, window=2**62, topk=0) if policy.borrows else OraclePolicy.full()
    bounded, dense = served.judge.reference(prompt), served.judge.models[0].run(prompt, everything)
    off = (bounded.exact.logprobs - dense.logprobs).abs().amax(-1)
    whole = policy.budget if policy.threshold is None else SINKS + WINDOW
    assert off[:whole].max() < 1e-12
    assert off[longest * 2 // 5 :].median() > 1000 * bounded.budget


# Interrupted requests. With chunks of seven tokens the interruptions meet half-read prompts.

FEW = [Job(3, 30, False), Job(40, 24, False), Job(BUDGET, 20, False), Job(90, 16, False), Job(200, 16, False)]


@pytest.fixture
def interrupted(served):
    """Yield ``serve(each_step)``, which answers FEW, and check that nothing is left behind."""
    served.chunk(7)
    free = served.recorder.pool.get_num_free_blocks()
    yield lambda each_step: served.serve(FEW, each_step)
    assert served.recorder.pool.get_num_free_blocks() == free
    assert not served.recorder.manager.req_to_blocks
    served.verdict(served.serve(FEW))


def test_forced_preemption(served, interrupted):
    def preempt(step):
        if step in (4, 11):
            served.engine.reset_prefix_cache(reset_running_requests=True)

    answers = interrupted(preempt)
    assert [served.recorder.preemptions[name] for name in answers] == [2] * len(FEW)
    served.verdict(answers)


def test_aborts(served, interrupted):
    aborted = {3: ["2", "4"], 12: ["0"]}
    answers = interrupted(lambda step: served.engine.abort_request(aborted.get(step, [])))
    finished = {name: answer for name, answer in answers.items() if answer.outputs[0].finish_reason == "length"}
    assert {answer.request_id for answer in finished.values()} == {"1", "3"}
    served.verdict(finished)


def test_sleep_and_wake(served, interrupted):
    """Requests go on after light and deeper sleep.

    From level 1 on the KV cache is discarded. A CPU worker does not do that by itself, so the test overwrites
    it.
    """
    held, preempted = [], []

    def sleep(step):
        for level, start in ((0, 5), (1, 10)):
            if step == start:
                served.llm.sleep(level, mode="keep")
            if step in (start, start + 3):
                held.append(sum(len(layers[0]) for layers in served.recorder.held.values()))
            if step == start + 3:
                preempted.append(sum(served.recorder.preemptions.values()))
                if level > 0:
                    served.fill_pool(255)
                served.llm.wake_up(None if level > 0 else ["scheduling"])

    answers = interrupted(sleep)
    assert 0 < held[0] == held[1] < held[2] == held[3], "it worked while asleep"
    assert preempted[0] == 0 and set(served.recorder.preemptions.values()) == {1}
    served.verdict(answers)
