"""The metadata of an engine step is built once, and its starts are checked by the first layer."""

from __future__ import annotations

import torch

from kvpop_vllm.attention.step_batch import StepPlan
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.kernels.regions import RegionMap, Shares
from kvpop_vllm.roles import Retention
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetMetadata

LAYERS, HEADS, SIZE = 3, 2, 32


def plan() -> StepPlan:
    layout, table = PageLayout(HEADS, SIZE, torch.float32, 16), torch.arange(36, dtype=torch.int32).view(3, 12)
    return StepPlan(layout, Retention(40, 2, 6), [1, 1, 5], torch.tensor([50, 9, 70]), table)


def test_layers_with_equal_heads_share_a_batch():
    one = plan()
    metadata = FixedBudgetMetadata(None, 7, one.batch())  # nothing is built again
    first, second, third = (metadata.batch(layer, None) for layer in range(LAYERS))
    assert first.starts.tolist() == [49, 8, 65] and first.slot_zero.shape == (3, HEADS)
    assert second.starts is second.slot_zero is None and third is second
    assert second.table is first.table and second.prefills is first.prefills


def test_layers_with_unequal_heads_share_the_plan():
    shares = Shares.of(torch.tensor([[24, 56], [40, 40], [56, 24]]), 40)
    one, regions = plan(), RegionMap(shares, PageLayout(HEADS, SIZE, torch.float32, 16), 36)
    metadata = FixedBudgetMetadata(one.batch, 7, None)
    batches = [metadata.batch(layer, regions) for layer in range(LAYERS)]
    assert [batch.starts is not None for batch in batches] == [True, False, False]
    for layer, batch in enumerate(batches):
        assert batch.budgets.tolist() == [list(shares.budgets[layer])] * 2 and batch.positions is batches[0].positions
        assert batch.prefills[0].budgets.tolist() == list(shares.budgets[layer])
    assert not torch.equal(batches[0].table, batches[1].table)
