"""The engine with protected prompts and prefix caching equals the naive oracle: retained tokens at every step, log-probabilities,
greedy tokens; and nothing shows who else was served. Freed blocks are overwritten with NaN in all of these tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.driving import BLOCK, Job, watched
from engine.matrix import state_blocks
from policies.matrix import ROWS

from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(220, seed=99)
"""What prompts begin with."""
BUDGET = 26
"""Few, so that answers outgrow what is kept behind a prompt."""
BORDERS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET]
BESIDE = [2, 7, 40, 2 * BLOCK, 4 * BLOCK, 70, 100]
KINDS = {name: row.engines[0] for name, row in ROWS.items() if row.engines}
ASKED = dict(
    zip(KINDS, [BUDGET, 1, BLOCK - 1, BLOCK, BLOCK + 1, BUDGET - 1, BUDGET + 1, 33, 2 * BLOCK, 7, 48, 63], strict=False)
)
"""The N of each policy's engine that protects the first N tokens of a prompt."""


@pytest.fixture(scope="module", params=[(name, protect) for name in KINDS for protect in ("all", "N")], ids="-".join)
def protected(request, case):
    """An engine with room for everything, for each policy and for whole prompts and parts of them."""
    policy, which = request.param
    found = case(KINDS[policy], policy, protect_prompt=True if which == "all" else ASKED[policy], budget=BUDGET)
    with pytest.MonkeyPatch.context() as patch:
        with watched(found.model, found.settings, found.judge) as engine:
            engine.policy = policy
            engine.poison(patch)
            yield engine
            assert not engine.leaks()


def hits(engine, answer) -> int:
    """Tokens that a request can hit at most: whole blocks of what is protected, but for the last of these tokens."""
    prompt = len(answer.prompt_token_ids)
    protected = prompt if engine.judge.protect is True else min(engine.judge.protect, prompt)
    return (protected - 1) // BLOCK * BLOCK


def check(engine, answers) -> None:
    engine.verdict(answers)
    budgets = engine.judge.policy.budgets(1)
    if len(budgets) == 1:
        engine.check_blocks(state_blocks(engine.policy), *budgets, sinks=engine.judge.policy.sinks)


def test_every_length_in_every_cut(protected):
    """Sixteen prompts, at and around the borders of a block and of the budget among them: in chunks of seven, whole, and all but the
    last token; again when all of it can be hit; then as twins within one step, and after the prefix cache was emptied."""
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
    """A prompt cut so that its last token runs as a decode step, cuts into single tokens, and larger ones than a budget."""
    for chunk, lengths in ((16, (17, 33, 49)), (26, (27, 28, 53)), (1, (18, 3)), (64, (65, 128, 150))):
        protected.chunk(chunk)
        answers = protected.serve([Job(1, new=30), *(Job(new=26, prompt=TEXT[:n][::-1]) for n in lengths)])
        check(protected, answers)
