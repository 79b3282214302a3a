"""The judge excuses a near-tie and its consequences, and nothing else; options that engines are tested with matter."""

import dataclasses

import pytest
import torch
from engine.driving import one_thread
from engine.judge import Held, Nudge
from engine.test_fidelity import EVERY, STEPS

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
        layer: [Held(end, every, [run.retained(layer, head, end - 1) for head in heads]) for end in ends]
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


def test_another_token_is_not_excused(judge, flipped):
    """A token that was evicted long ago is not excused, however close some decision was."""
    wrong = held(judge.reference(TOKENS).exact, 1)
    positions = wrong[0][-1].positions[0]
    positions[5] = min(set(range(len(TOKENS))) - set(positions))
    with pytest.raises(AssertionError, match="layer 0, head 0, queries 129 to 129"):
        judge.settle(TOKENS, wrong, [flipped[1], 0.0], "r")


WITHOUT = {"norm": False, "skip": False, "feature_map": "hedgehog", "gate_softcap": None, "delayed": True}


def decisions(judge, **changes) -> torch.Tensor:
    """Return what the oracle's first layer retains with changes of its policy."""
    with one_thread():
        return judge.models[0].run(random_prompt(200), dataclasses.replace(judge.policy, **changes)).visible[0]


def test_the_decay_step_matters(case):
    """Ages rounded down to steps retain other tokens, otherwise the engine's case would prove nothing."""
    judge = case("qwen3", "kvpop", **STEPS).judge
    smooth = [[per_step / STEPS["decay_step"] for per_step in judge.policy.decay(layer, 2)] for layer in range(2)]
    assert not torch.equal(decisions(judge), decisions(judge, step=1, log_gamma=smooth))


@pytest.mark.parametrize("option", WITHOUT)
def test_each_scorer_option_matters(case, option):
    """Each option changes the retained tokens, so an engine that ignores it fails."""
    judge = case("qwen3", "kvpop", **({"delayed": False} if option == "delayed" else EVERY)).judge
    scorer = judge.policy.scorer
    assert scorer["config"][option] != WITHOUT[option]
    lesser = {**scorer, "config": scorer["config"] | {option: WITHOUT[option]}}
    if option in ("norm", "skip"):
        drop = f"{option}.weight"
        lesser["layers"] = [{key: t for key, t in layer.items() if key != drop} for layer in scorer["layers"]]
    assert not torch.equal(decisions(judge), decisions(judge, scorer=lesser))
