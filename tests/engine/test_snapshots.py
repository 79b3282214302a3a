"""Chats of several turns, whose requests go on from what earlier ones held, judged by the oracle on the whole text.

Freed blocks are overwritten unless a snapshot or the prefix cache keeps them.
"""

from __future__ import annotations

import pytest
from engine.driving import Job, preempt_all, serving
from policies.matrix import ROWS

from kvpop_vllm.testing import random_prompt

QUICK = [("kvpop", 0), ("h2o", 0), ("streaming-llm", 40)]
"""Policies, each with the number of its protected tokens."""
LEFT_OUT = ("dms-late", "l2norm", "full")
"""No snapshots; no rows for engines."""
OTHERS = [
    (policy, protect)
    for policy, row in ROWS.items()
    for protect in (0, 40)
    if not row.compresses and (policy, protect) not in QUICK and policy not in LEFT_OUT
]
CASES = [*QUICK, *(pytest.param(pair, marks=pytest.mark.slow) for pair in OTHERS)]


@pytest.fixture(scope="module", params=CASES, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def engine(request, case):
    policy, protect = request.param
    found = case("qwen3", policy, protect_prompt=protect)
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 301, "enable_prefix_caching": True}
    with serving(found._replace(settings=found.settings | {"protect_prompt": protect}), **options) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    engine.chunk(None)
    engine.engine.reset_prefix_cache()
    yield
    assert not engine.leaks()


def turn(engine, history: list[int], seed: int, tokens: int = 45, new: int = 20, each_step=None, **options):
    """Serve a turn of a chat and return its answer, whose prompt is the history and new tokens."""
    prompt = [*history, *random_prompt(tokens, seed=seed)]
    answers = engine.serve([Job(prompt=prompt, new=new, scored=False, **options)], each_step)
    engine.check(answers)
    (answer,) = answers.values()
    return answer


def whole(answer) -> list[int]:
    """Return all tokens of a turn."""
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


@pytest.mark.parametrize("chunk", [None, 16, 40])
def test_each_turn_goes_on_from_the_one_before(engine, chunk):
    """All but the last token of an answer have been read when it ends. They are cached, and so are they after a preemption."""
    engine.chunk(chunk)
    history: list[int] = []
    for number in range(3):

        def preempt(step):
            if number == 1 and step == 8:
                preempt_all(engine.recorder.scheduler)

        answer = turn(engine, history, seed=number, tokens=95 if number == 0 else 45, each_step=preempt)
        assert answer.num_cached_tokens == max(0, len(history) - 1)
        history = whole(answer)
