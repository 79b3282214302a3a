"""The state that a tail begins with, in every CPU implementation; test_triton_prefix tests Triton's."""

from __future__ import annotations

import pytest
import torch
from kernels.behind import Behind
from kernels.factories import poisoned_pages

from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.reference.begin_tail import begin_tail

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("replay", [0, 5, 1024])
@pytest.mark.parametrize("case", ["mlstm-softmax-cap", "mlstm-direct-values"])
def test_equals_the_reference(case, replay):
    """R is smaller or larger than p; nothing changes except states, and no state without a prefix."""
    p = Behind(case, heads=2, size=32, slots=16, protected=(0, 40, 17), replay=replay).prepare()
    pages = poisoned_pages(p.layout, p.num_blocks)
    blocks = p.prefix_blocks.long()
    pages.k[blocks], pages.v[blocks] = (
        torch.randn(len(blocks), 2, p.slots, p.size, generator=p.generator) for _ in "kv"
    )
    other, before = p.layout.view(pages.raw.clone()), pages.raw.clone()
    p.begin(pages, [0, 1, 2], "reference")
    p.begin(other, [0, 1, 2], "cpp")
    states, words = p.table[1:, 0, : p.layout.state_blocks].long(), p.rule.scorer.state_floats
    found, expected = (x.state[states].transpose(1, 2).flatten(2)[..., :words] for x in (other, pages))
    torch.testing.assert_close(found, expected, **CLOSE)
    others = torch.ones(p.num_blocks, dtype=torch.bool)
    others[states.flatten()] = False
    assert torch.equal(pages.raw[others], before[others]) and torch.equal(other.raw[others], before[others])


def test_the_fastest_there_is_runs_it():
    """The reference is not chosen, because it takes a token at a time in Python."""
    assert dispatch.resolve("begin_tail", "auto", torch.empty(1, 1, 16, 64)) is not begin_tail
