"""Regions of unequal heads: each page has its own, in the request's first blocks; results are unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.problems import Problem
from kernels.served import INTERPRETED, Pool

from kvpop_vllm.cache import shares as shares_module
from kvpop_vllm.cache.pages import PageLayout, cdiv
from kvpop_vllm.cache.ranks import Division, Shard, Shares
from kvpop_vllm.cache.shares import RegionShares
from kvpop_vllm.policies.allocators import Proportional

N, SIZE = 16, 32
NUMBERS = torch.zeros(3, dtype=torch.int32)
"""Numbers of requests, which do not count where all have one budget."""


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    state=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_pages_have_regions_of_their_own(layers, heads, state, seed):
    """Pages of three requests lie in the requests' own random blocks at every length, none twice.

    Less than one block is held beyond the pages in use.
    """
    draw = torch.Generator().manual_seed(seed)
    shares = Shares.of(torch.randint(1, 130, (layers, heads), generator=draw), budget=131)
    layout = PageLayout(heads, SIZE, torch.float32, N, state * N * (2 * SIZE * 4 + 8) // 4)
    assert layout.state_blocks == state
    longest = shares.block_counts.blocks(state, N, 10_000)
    num_blocks = 3 * longest + 1
    blocks = 1 + torch.randperm(3 * longest, generator=draw).view(3, longest)
    regions = RegionShares(shares, layout, num_blocks)
    rows = [regions.place(layer, blocks.int(), (), NUMBERS, ())[1] for layer in range(layers)]
    for length in [*range(1, 140), 10_000]:
        block_count, used_regions = shares.block_counts.blocks(state, N, length), set()
        used = 0
        for layer in range(layers):
            for h in range(heads):
                pages = state + cdiv(min(length, shares.budgets[layer][h]), N)
                used += pages
                for r in range(3):
                    for region in rows[layer][r, h, :pages].tolist():
                        block = region % (num_blocks * heads) // heads
                        assert block in blocks[r, :block_count].tolist() and region < layers * num_blocks * heads
                        used_regions.add(region)
        assert len(used_regions) == 3 * used
        assert 0 <= block_count * layers * heads - used < layers * heads


@pytest.mark.parametrize("layers, heads", [((0, 4), (0, 2)), ((0, 4), (1, 2)), ((1, 3), (0, 2)), ((2, 4), (0, 1))])
def test_requests_with_budgets_of_their_own_have_regions_of_their_own(layers, heads):
    """Requests with three budgets lie in one batch of a rank; pages of each are those of a batch of its own."""
    draw = torch.Generator().manual_seed(5)
    measured = Proportional(tuple(map(tuple, torch.rand(4, 2, generator=draw).tolist())))
    division = Division(measured, 2, 4, 2, (Shard((0, 1), (0, 1)), Shard(layers, heads)))
    layout, num_blocks = PageLayout(heads[1] - heads[0], SIZE, torch.float32, N), 80
    sizes = [(64, 9), (40, 5), (64, 9), (200, 30), (64, 5)]
    blocks = torch.randperm(num_blocks, generator=draw).view(5, 16).int()
    regions = RegionShares(division.shares(64, 9)[1], layout, num_blocks, "cpu", division, 1)
    budgets, windows = (torch.tensor(numbers, dtype=torch.int32) for numbers in zip(*sizes, strict=True))
    places, used, together = set(), 0, regions.place_layers(layers[0], blocks, (), budgets, windows)
    assert [*together] == [*range(*layers)]
    for layer in range(*layers):
        placed, table = regions.place(layer, blocks, (), budgets, windows)
        assert placed.dtype == table.dtype == torch.int32
        assert all(map(torch.equal, together[layer], (placed, table)))
        for r, size in enumerate(sizes):
            shares = division.shares(*size)[1]
            alone, pages = RegionShares(shares, layout, num_blocks).place(layer, blocks[r : r + 1], (), NUMBERS, ())
            assert placed[r].tolist() == alone[0].tolist() == list(shares.budgets[layer - layers[0]])
            assert shares.block_counts.blocks(0, N, 10_000) <= blocks.shape[1]
            for h, budget in enumerate(shares.budgets[layer - layers[0]]):
                count = cdiv(budget, N)
                assert table[r, h, :count].tolist() == pages[0, h, :count].tolist()
                places |= set(table[r, h, :count].tolist())
                used += count
    assert len(places) == used and max(places) < (layers[1] - layers[0]) * num_blocks * layout.num_kv_heads


def test_maps_of_many_budgets_are_made_once_in_a_step(monkeypatch):
    """Four layers place requests of three budgets, of which only one map is remembered after the step."""
    monkeypatch.setattr(shares_module, "MOST_MAPS", 1)
    maps, layout = [], PageLayout(2, SIZE, torch.float32, N)
    division = Division(Proportional(((1.5, 0.5),) * 4), 2, 4, 2, (Shard((0, 4), (0, 2)),))
    regions = RegionShares(division.shares(64, 9)[0], layout, 80, "cpu", division)
    monkeypatch.setattr(regions, "_map", lambda shares: maps.append(shares) or RegionShares._map(regions, shares))
    budgets, windows = torch.tensor([64, 40, 80, 64], dtype=torch.int32), [9, 9, 9, 9]
    blocks = torch.arange(40).view(4, 10).int()
    for layer in range(4):
        regions.place(layer, blocks, (), budgets, windows)
    assert maps == [division.shares(budget, 9)[0] for budget in (64, 40, 80)]


def test_equal_shares_need_none():
    budgets = torch.full((3, 2), 40, dtype=torch.int32)
    assert Shares.of(budgets, 40) is None and Shares.of(budgets, 41).counts == {40: 6}


def pools(kind: str, layers: int, length: int, drafts: int = 0):
    """Yield for each of up to three layers of two heads a pool in pages that all share, and one in its own pages."""
    budgets = torch.tensor([[60, 25], [33, 47], [18, 64]], dtype=torch.int32)[:layers]
    sizes = dict(topk=64 - 8, window=6, length=length, drafts=drafts)
    problems = [Problem(kind, 1, **sizes, seed=i).prepare() for i in range(layers)]
    shares, layout = Shares.of(budgets, 64), problems[0].layout
    count = shares.block_counts.blocks(layout.state_blocks, N, length)
    blocks = torch.randperm(count + 5, generator=torch.Generator().manual_seed(3))[:count].int().view(1, -1)
    regions = RegionShares(shares, layout, count + 5)
    memory = torch.full((layers * (count + 5) * 2 * layout.region_bytes,), 255, dtype=torch.uint8)
    for layer, p in enumerate(problems):
        p.budgets = budgets[layer : layer + 1]
        alone, shared = Pool(p), Pool(p)
        shared.pages, shared.table = regions.view(memory), regions.place(layer, blocks, (), NUMBERS, ())[1]
        shared.untouched = lambda: True  # others use the rest
        yield shared, alone


@pytest.mark.parametrize("kind", ["mlstm", "mass-mean", "moment", "gate_scores"])
@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
def test_kernels_do_not_care_where_pages_lie(kind, impl):
    """Heads with their own budgets give and retain the same in a shared pool as in their own pages.

    Three layers of two heads share the pool, in chunks and token by token, to the bit.
    """
    length = 72
    for shared, alone in pools(kind, 1 if INTERPRETED else 3, length):
        actual, expected = (pool.serve([40, 1, length], impl) for pool in (shared, alone))
        assert torch.equal(actual.out, expected.out) and torch.equal(actual.retained[length], expected.retained[length])


@pytest.mark.parametrize("kind", ["mlstm", "mass-mean"])
@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_drafts_do_not_care_where_pages_lie(kind, impl):
    """Drafts are staged, committed and taken back in a shared pool as in pages of their own."""
    for shared, alone in pools(kind, 3, 80, drafts=3):
        results = []
        for pool in (shared, alone):
            results.append([pool.chunk(0, 62, impl)[0]])
            for accepted in (2, 0, 3, 1):
                results[-1].append(pool.verify({0: 3}, impl, {0: accepted})[0])
                pool.accept(0, accepted)
            pool.verify({0: -1}, impl)
            results[-1].append(pool.retained(0))
        assert all(map(torch.equal, *results))


def test_too_small_a_pool_is_refused():
    shares = Shares.of(torch.tensor([[20, 40]], dtype=torch.int32), 30)
    regions = RegionShares(shares, PageLayout(2, SIZE, torch.float32, N), 4)
    with pytest.raises(ValueError, match="100 bytes do not hold 4 blocks of 1 layers"):
        regions.view(torch.zeros(100, dtype=torch.uint8))
