"""The state that a tail begins with, in every implementation but the reference, against the reference."""

import pytest
import torch
from kernels.factories import poisoned_pages
from kernels.problems import Problem
from kernels.served import IMPLS, use

from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.reference.begin_tail import begin_tail


@pytest.mark.parametrize("replay", [0, 5, 70, 1024])
@pytest.mark.parametrize("case, size", [("mlstm-softmax-cap", 32), ("mlstm-direct-values", 64)])
@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "reference"])
def test_equals_the_reference(impl, case, size, replay):
    """R is smaller or larger than p and than a chunk; only states after a prefix change."""
    p = Problem(case, size=size, protected=(0, 90, 17), replay=replay).prepare()
    pages, blocks = poisoned_pages(p.layout, p.num_blocks), p.prefix_blocks.long()
    pages.k[blocks], pages.v[blocks] = (torch.randn(len(blocks), 2, p.slots, size, generator=p.generator) for _ in "kv")
    other_pages, before = p.layout.view(pages.raw.clone()), pages.raw.clone()
    p.begin(pages, [0, 1, 2], "reference")
    for _ in range(2):  # the second time changes nothing
        p.begin(other_pages, [0, 1, 2], use(impl))
    states, words = p.table[1:, 0, : p.layout.state_blocks].long(), p.rule.scorer.state_floats
    actual, expected = (x.state[states].transpose(1, 2).flatten(2)[..., :words] for x in (other_pages, pages))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    foreign = torch.ones(p.num_blocks, dtype=torch.bool)
    foreign[states.flatten()] = False
    assert torch.equal(pages.raw[foreign], before[foreign]) and torch.equal(other_pages.raw[foreign], before[foreign])


@pytest.mark.parametrize("impl", IMPLS)
def test_rules_without_a_state(impl):
    p = Problem("linear", protected=(17,)).prepare()
    pages = poisoned_pages(p.layout, p.num_blocks)
    p.begin(pages, [0], use(impl))
    assert (pages.raw == 255).all()


def test_the_fastest_there_is_runs_it():
    """The reference is not chosen, because it takes a token at a time in Python."""
    assert dispatch.resolve("begin_tail", "auto", torch.empty(1, 1, 16, 64)) is not begin_tail
