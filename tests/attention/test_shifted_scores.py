"""Scores that arrive one token late, next to requests that have none to replace."""

import pytest
import torch

from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.cache.step import plan_batch
from kvpop_vllm.requests import RequestSlots

LAYOUT, HEADS = PageLayout(2, 16, torch.float32, 16), 2


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_rows_of_protected_tokens_write_nothing(order, length):
    """A block table goes on with blocks of earlier requests; those of a row whose tail has not begun may be another's now."""
    pages = LAYOUT.view(torch.zeros(8, HEADS, LAYOUT.region_bytes, dtype=torch.uint8))
    pages.score[:] = torch.arange(8.0).view(8, 1, 1)
    pages.position[5, :, 0] = 33
    rows = [
        (RequestSlots(64, 0, 20, 4), 10, [1, 5, 5, 5, 5]),  # in its prefix
        (RequestSlots(32, 0, 20, 4), 33, [2, 3, 5, 0, 0]),  # token 32 is in its ring, in slot 0 of block 5
        (RequestSlots(48, 0, 20, 4), 20, [6, 7, 5, 5, 5]),  # in its prefix
    ]
    slots, starts, table = zip(*[rows[i] for i in order], strict=True)
    ends = [start + length for start in starts]
    table = torch.tensor(table, dtype=torch.int32)
    batch = plan_batch(LAYOUT, slots, [length] * 3, ends, table).batch(EqualHeads(HEADS))
    scores = 100 + torch.arange(3.0 * length * HEADS).view(-1, HEADS)
    before = pages.score.clone()
    shift(scores, pages, batch, 2)
    before[5, :, 0] = scores[order.index(1) * length]
    assert torch.equal(pages.score, before)


def test_nothing_is_written_where_all_tokens_are_protected():
    pages = LAYOUT.view(torch.zeros(4, HEADS, LAYOUT.region_bytes, dtype=torch.uint8))
    table = torch.tensor([[1, 2, 3], [2, 1, 3]], dtype=torch.int32)
    plan = plan_batch(LAYOUT, [RequestSlots(40, 0, 20, 4)] * 2, [1, 1], [8, 9], table)
    shift(torch.ones(2, HEADS), pages, plan.batch(EqualHeads(HEADS)), 2)
    assert not pages.score.any()
