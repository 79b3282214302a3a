"""The judge excuses a near-tie and its consequences, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine.driving import one_thread
from engine.judge import Nudge
from engine.recorder import Held

from kvpop_vllm.testing import random_prompt

TOKENS = random_prompt(130, seed=5)


@pytest.fixture(scope="module")
def judge(case):
    with one_thread():
        yield case("qwen3", "kvpop-linear").judge


@pytest.fixture(scope="module")
def flipped(judge):
    return flip(judge, 0)


def flip(judge, layer: int):
    """Return a run that reverses the closest decision of a layer, and the margin of that decision.

    The layer keeps its closest victim once and evicts the next token instead.
    """
    run = judge.reference(TOKENS).exact
    margin = float(run.margins[layer].min())
    head, query = (int(i) for i in (run.margins[layer] == margin).nonzero()[0])
    victim = int((run.visible[layer][head, query - 1] & ~run.visible[layer][head, query]).nonzero())
    return judge.reference(TOKENS, (Nudge(layer, head, victim, 2 * margin),)).exact, margin


def held(run, every: int):
    """Return what a recorder would see of a run in chunks of ``every`` tokens."""
    ends = [*range(every, len(TOKENS), every), len(TOKENS)]
    heads = range(len(run.visible[0]))
    return {
        layer: [Held(seen, every, [run.retained(layer, head, seen - 1) for head in heads]) for seen in ends]
        for layer in range(len(run.visible))
    }


@pytest.mark.parametrize("every", [1, 4])
def test_a_near_tie_is_followed_and_counted(judge, flipped, every):
    run, margin = flipped
    assert not torch.equal(run.visible[0], judge.reference(TOKENS).exact.visible[0])
    settled, ties = judge.settle(TOKENS, held(run, every), [2 * margin, 0.0], "r")
    assert len(ties) == 1 and all(torch.equal(a, b) for a, b in zip(settled.exact.visible, run.visible, strict=True))


@pytest.mark.parametrize("every", [1, 4])
def test_a_decision_with_a_margin_is_not_excused(judge, flipped, every):
    run, margin = flipped
    with pytest.raises(AssertionError, match="layer 0, head"):
        judge.settle(TOKENS, held(run, every), [margin / 2, 0.0], "r")


def test_the_oracle_itself_passes(judge):
    exact = judge.reference(TOKENS).exact
    assert judge.settle(TOKENS, held(exact, 1), [0.0, 0.0], "r")[1] == ()


def test_another_token_is_not_excused(judge, flipped):
    """A token that was evicted long ago is not excused, however close some decision was."""
    wrong = held(judge.reference(TOKENS).exact, 1)
    kept = wrong[0][-1].positions[0]
    kept[5] = min(set(range(len(TOKENS))) - set(kept))
    with pytest.raises(AssertionError, match="layer 0, head 0, queries 129 to 129"):
        judge.settle(TOKENS, wrong, [flipped[1], 0.0], "r")


def answered(run):
    """Return the answer of an engine with these log-probabilities to the prompt TOKENS."""
    rows = zip(TOKENS[1:], run.logprobs[:-1], strict=True)
    given = [{token: SimpleNamespace(logprob=float(row[token]))} for token, row in rows]
    out = SimpleNamespace(token_ids=[], logprobs=[])
    return SimpleNamespace(request_id="r", prompt_token_ids=TOKENS, prompt_logprobs=[None, *given], outputs=[out])


def test_a_near_tie_inside_a_chunk(judge):
    """A near-tie inside a chunk is excused and counted, though only log-probabilities show it.

    The same tokens are left at the end of the chunk. A decision with a margin is not excused, nor is one in
    steps of one token, where the tokens that are left would show it.
    """
    exact, (run, margin) = judge.reference(TOKENS), flip(judge, 1)
    whole, answer = held(run, len(TOKENS)), answered(run)
    assert whole == held(exact.exact, len(TOKENS)) and not torch.equal(run.logprobs, exact.exact.logprobs)

    def settled(held, bound):
        return judge._settle_inside(TOKENS, held, [0.0, bound], answer, (), exact.budget)

    reference, ties = settled(whole, 2 * margin)
    assert len(ties) == 1 and torch.equal(reference.exact.logprobs, run.logprobs)
    assert settled(whole, margin / 2)[1] == () == settled(held(run, 1), 2 * margin)[1]
