"""The engine with protected prompts and prefix caching equals the naive oracle.

Retained tokens at every step, log-probabilities and greedy tokens are compared. Results do not depend on
which other requests were served. Freed blocks are overwritten with NaN in all of these tests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import BLOCK, Job, watched
from engine.matrix import state_blocks
from policies.matrix import ROWS

from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(220, seed=99)
"""The beginning of all prompts."""
BUDGET = 26
"""Small, so that answers outgrow the tail."""
BORDERS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET]
BESIDE = [2, 7, 40, 2 * BLOCK, 4 * BLOCK, 70, 100]
KINDS = {name: row.engines[0] for name, row in ROWS.items() if row.engines}
PREFIXES = [BUDGET, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUDGET - 1, BUDGET + 1, 33, 2 * BLOCK, 7, 48, 63, 70, 3]
ASKED = dict(zip(KINDS, PREFIXES[: len(KINDS)], strict=True))
"""Number of protected tokens in each policy's engine that protects the first N tokens."""


@pytest.fixture(scope="module", params=[(name, protect) for name in KINDS for protect in ("all", "N")], ids="-".join)
def protected(request, case):
    """Yield an engine with room for all requests, for each policy and for whole and partial protection."""
    policy, which = request.param
    found = case(KINDS[policy], policy, protect_prompt=True if which == "all" else ASKED[policy], budget=BUDGET)
    with pytest.MonkeyPatch.context() as patch:
        with watched(found.model, found.settings, found.judge) as engine:
            engine.policy = policy
            engine.poison(patch)
            yield engine
            assert not engine.leaks()


def hits(engine, answer) -> int:
    """Return the largest number of tokens that a request can hit.

    These are whole blocks of protected tokens, without the last protected token.
    """
    prompt = len(answer.prompt_token_ids)
    protected = prompt if engine.judge.protect is True else min(engine.judge.protect, prompt)
    return (protected - 1) // BLOCK * BLOCK


def check(engine, answers) -> None:
    engine.verdict(answers)
    budgets = engine.judge.policy.budgets(1)
    if len(budgets) == 1:
        engine.check_blocks(state_blocks(engine.policy), *budgets, sinks=engine.judge.policy.sinks)


def test_every_length_in_every_cut(protected):
    """Sixteen prompts around the borders of blocks and budget are right, computed, hit and as twins.

    They are computed in chunks of seven tokens, then hit as far as possible. After the prefix cache is
    emptied, twins come in one step.
    """
    jobs = [Job(new=34, prompt=TEXT[:n]) for n in BORDERS] + [Job(new=14, prompt=TEXT[:n]) for n in BESIDE]
    protected.chunk(7)
    answers, before = protected.serve(jobs), protected.judge.decisions
    assert all(answer.num_cached_tokens == 0 for answer in answers.values())
    assert max(len(step.running) for step in protected.recorder.blocks) == len(jobs) == 16
    check(protected, answers)
    assert protected.judge.decisions - before > 20
    first = {len(a.prompt_token_ids): a.outputs[0].token_ids for a in answers.values()}

    protected.chunk(None)
    again = protected.serve([replace(job, scored=False) for job in jobs])
    assert all(answer.num_cached_tokens == hits(protected, answer) for answer in again.values())
    check(protected, again)
    assert {len(a.prompt_token_ids): a.outputs[0].token_ids for a in again.values()} == first

    protected.engine.reset_prefix_cache()
    twins = [Job(new=6, prompt=TEXT[:n], scored=False) for n in (33, 57, 17, 58) for _ in range(2)]
    answers = protected.serve(twins)
    assert sorted(a.num_cached_tokens for a in answers.values())[0] == 0
    assert {a.num_cached_tokens for a in answers.values()} == {0} | {hits(protected, a) for a in answers.values()}
    check(protected, answers)


def test_last_chunks_of_one_token(protected):
    """Prompts whose last token is a decode step are right, in chunks of 1 to 64 tokens."""
    for chunk, lengths in ((16, (17, 33, 49)), (26, (27, 28, 53)), (1, (18, 3)), (64, (65, 128, 150))):
        protected.chunk(chunk)
        answers = protected.serve([Job(1, new=30), *(Job(new=26, prompt=TEXT[:n][::-1]) for n in lengths)])
        check(protected, answers)
