"""The metadata of an engine step is built once, and its starts are checked by the first layer."""

from __future__ import annotations

import torch

from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.shares import EqualHeads, FixedShares, Shares
from kvpop_vllm.cache.step import StepPlan, plan_batch
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetMetadata

LAYERS, HEADS, SIZE = 3, 2, 32


def plan() -> StepPlan:
    layout, table = PageLayout(HEADS, SIZE, torch.float32, 16), torch.arange(36, dtype=torch.int32).view(3, 12)
    return plan_batch(layout, [RequestSlots(0, 0, 40, 6)] * 3, [1, 1, 5], [50, 9, 70], table)


def test_layers_with_equal_heads_share_a_batch():
    equal = EqualHeads(HEADS)
    metadata = FixedBudgetMetadata(None, 7, plan().batch(equal))  # nothing is built again
    first, second, third = (metadata.batch(layer, equal) for layer in range(LAYERS))
    assert first.starts.tolist() == [49, 8, 65] and first.slot_zero.shape == (3, HEADS)
    assert second.starts is second.slot_zero is None and third is second
    assert second.table is first.table and second.chunks is first.chunks


def test_layers_with_unequal_heads_share_the_plan():
    shares = Shares.of(torch.tensor([[24, 56], [40, 40], [56, 24]]), 40)
    regions = FixedShares(shares, PageLayout(HEADS, SIZE, torch.float32, 16), 36)
    metadata = FixedBudgetMetadata(plan(), 7, None)
    batches = [metadata.batch(layer, regions) for layer in range(LAYERS)]
    assert [batch.starts is not None for batch in batches] == [True, False, False]
    for layer, batch in enumerate(batches):
        assert batch.budgets.tolist() == [list(shares.budgets[layer])] * 2 and batch.positions is batches[0].positions
        assert batch.chunks.budgets.tolist() == [list(shares.budgets[layer])]
        assert batch.chunks.firsts is batches[0].chunks.firsts
    assert not torch.equal(batches[0].table, batches[1].table)
