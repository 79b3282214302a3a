"""The metadata of an engine step is built once, and its starts are checked by the first layer."""

from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.ranks import Shares
from kvpop_vllm.cache.shares import EqualHeads, RegionShares
from kvpop_vllm.cache.step import StepPlan, plan_batch
from kvpop_vllm.requests import RESOLVED, RequestSlots, of_request
from kvpop_vllm.vllm_glue.run import backend
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetMetadata, FixedBudgetMetadataBuilder

LAYERS, HEADS, SIZE = 3, 2, 32


def plan() -> StepPlan:
    layout, table = PageLayout(HEADS, SIZE, torch.float32, 16), torch.arange(36, dtype=torch.int32).view(3, 12)
    return plan_batch(layout, [RequestSlots(0, 0, 40, 6)] * 3, [1, 1, 5], [50, 9, 70], table)


class Counted(EqualHeads):
    """Equal heads that count how often a step is placed."""

    placed = 0

    def place(self, *args):
        type(self).placed += 1
        return super().place(*args)


def test_layers_with_equal_heads_share_a_batch(monkeypatch):
    monkeypatch.setattr(Counted, "placed", 0)
    metadata = FixedBudgetMetadata(plan(), 7)
    first, second, third = (metadata.batch(layer, Counted(HEADS)) for layer in range(LAYERS))
    assert Counted.placed == 2, "once for decode rows and once for chunks"
    assert first.starts.tolist() == [49, 8, 65] and first.first_pages.shape == (3, HEADS, 1)
    assert second.starts is second.first_pages is None and third is second
    assert second.table is first.table and second.chunks is first.chunks


def test_layers_with_unequal_heads_share_the_plan():
    shares = Shares.of(torch.tensor([[24, 56], [40, 40], [56, 24]]), 40)
    regions = RegionShares(shares, PageLayout(HEADS, SIZE, torch.float32, 16), 36)
    metadata = FixedBudgetMetadata(plan(), 7)
    batches = [metadata.batch(layer, regions) for layer in range(LAYERS)]
    assert [batch.starts is not None for batch in batches] == [True, False, False]
    for layer, batch in enumerate(batches):
        assert batch.budgets.tolist() == [list(shares.budgets[layer])] * 2 and batch.positions is batches[0].positions
        assert batch.chunks.budgets.tolist() == [list(shares.budgets[layer])]
        assert batch.chunks.firsts is batches[0].chunks.firsts
    assert not torch.equal(batches[0].table, batches[1].table)


@pytest.mark.parametrize("draws", [False, True])
def test_a_request_is_recorded_once(monkeypatch, draws):
    """Later steps use the record of the first, whichever row the request has; another request has one of its own."""
    builder, calls = object.__new__(FixedBudgetMetadataBuilder), []
    builder.policy, builder.spec, builder.records, builder.seed = SimpleNamespace(draws=draws), None, {}, 7
    monkeypatch.setattr(backend, "of_request", lambda *args: calls.append(args) or of_request(*args))
    sampling = [
        SimpleNamespace(extra_args={RESOLVED: RequestSlots(0, 0, 40, 6, seed)}, seed=5) for seed in (None, 11, None)
    ]
    builder.take_requests(sampling[:2], [20, 30])
    first = builder.requests
    assert [record.seed for record in first] == ([12, 18] if draws else [None, 11])
    builder.take_requests([sampling[1], sampling[0], sampling[2]], [30, 20, 20])
    assert builder.requests[0] is first[1] and builder.requests[1] is first[0] and len(calls) == 3
    builder.take_requests(sampling[2:], [20])
    assert len(builder.records) == 1, "requests that have ended are forgotten"
