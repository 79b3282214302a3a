"""The engine equals the naive oracle: retained tokens at every step, log-probabilities, greedy tokens."""

from __future__ import annotations

import pytest
from engine.driving import Job

from kvpop_vllm.testing import random_prompt

BUDGET = 56
TOGETHER = [Job(n) for n in (1, 2, 13, 17, 31, 55, 56, 57, 70, 90, 112, 130, 200, 300, 10 * BUDGET)]
TOGETHER.append(Job(40, new=4 * BUDGET + 20))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(served, chunk):
    """vLLM does not cut the prompt of a request that is alone: the first one generates until the last is through."""
    served.chunk(chunk)
    jobs = [Job(1, new=10 * BUDGET // chunk + 2), Job(31), Job(BUDGET), Job(10 * BUDGET, new=4)]
    answers = served.serve(jobs)
    for name, answer in answers.items():
        whole, rest = divmod(len(answer.prompt_token_ids), chunk)
        decodes = len(answer.outputs[0].token_ids) - 1
        assert served.chunks(name) == [chunk] * whole + [rest] * (rest > 0) + [1] * decodes
    served.verdict(answers)


def test_sixteen_together(served):
    served.chunk(None)
    answers = served.serve(TOGETHER)
    assert len(answers) == 16
    assert all(served.chunks(name)[0] == len(answer.prompt_token_ids) for name, answer in answers.items())
    served.verdict(answers)


def test_eviction_shows(served):
    """What the judge demands could not be met by keeping everything, nor by another set of tokens."""
    prompt = random_prompt(10 * BUDGET, seed=10 * BUDGET)
    bounded, dense = served.judge.reference(prompt), served.judge.models[0].run(prompt)
    off = (bounded.exact.logprobs - dense.logprobs).abs().amax(-1)
    assert off[:BUDGET].max() == 0
    assert off[4 * BUDGET :].median() > 1000 * bounded.budget
