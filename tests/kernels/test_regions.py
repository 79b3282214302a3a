"""Regions of unequal heads: each page has its own, in the request's first blocks; results are unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.factories import poisoned_pages, random_rule, random_scorer
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import RegionMap, Shares

N, SIZE = 16, 32


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
    longest = shares.blocks(state, N, 10_000)
    num_blocks = 3 * longest + 1
    blocks = 1 + torch.randperm(3 * longest, generator=draw).view(3, longest)
    regions = RegionMap(shares, layout, num_blocks)
    rows = [regions.place(layer, blocks.int())[1] for layer in range(layers)]
    for length in [*range(1, 140), 10_000]:
        held, seen = shares.blocks(state, N, length), set()
        used = 0
        for layer in range(layers):
            for h in range(heads):
                pages = state + cdiv(min(length, shares.budgets[layer][h]), N)
                used += pages
                for r in range(3):
                    for region in rows[layer][r, h, :pages].tolist():
                        block = region % (num_blocks * heads) // heads
                        assert block in blocks[r, :held].tolist() and region < layers * num_blocks * heads
                        seen.add(region)
        assert len(seen) == 3 * used
        assert 0 <= held * layers * heads - used < layers * heads


def test_equal_shares_need_none():
    budgets = torch.full((3, 2), 40, dtype=torch.int32)
    assert Shares.of(budgets, 40) is None and Shares.of(budgets, 41).counts == {40: 6}


@pytest.mark.parametrize("kind", ["mlstm", "mass", "moment", "gate_scores"])
@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
def test_kernels_do_not_care_where_pages_lie(kind, impl):
    """Heads with their own budgets give and retain the same in a shared pool as in their own pages.

    Three layers of two heads share the pool, in chunks and token by token, to the bit.
    """
    layers, heads, length = 1 if INTERPRETED else 3, 2, 72
    draw = torch.Generator().manual_seed(3)
    budgets = torch.tensor([[60, 25], [33, 47], [18, 64]], dtype=torch.int32)[:layers]
    shares = Shares.of(budgets, 64)
    options = {"mass": {"mean": True}}.get(kind, {})
    rules = [random_rule(random_scorer(kind, heads, SIZE, draw, **options), heads, 2, 6, draw) for _ in range(layers)]
    layout = PageLayout(heads, SIZE, torch.float32, N, rules[0].state_floats(SIZE))
    count = shares.blocks(layout.state_blocks, N, length)
    blocks = torch.randperm(count + 5, generator=draw)[:count].int().view(1, -1)
    regions = RegionMap(shares, layout, count + 5)
    pool = torch.full((layers * (count + 5) * heads * layout.region_bytes,), 255, dtype=torch.uint8)
    for layer, rule in enumerate(rules):
        q, k, v = (torch.randn(length, n, SIZE, generator=draw) for n in (2 * heads, heads, heads))
        given_ = torch.randn(length, heads, generator=draw)
        width = int(layout.blocks(64, 64))
        alone = poisoned_pages(layout, width + 1), torch.arange(1, width + 1).int().expand(heads, -1)
        shared = regions.view(pool), regions.place(layer, blocks)[1][0]
        found = []
        for pages, table in (alone, shared):
            outs = []
            for a, b in ((0, 40), (40, 41), (41, length)):
                own = dict(rule=rule, scale=SIZE**-0.5, gate_scores=given_[a:b], impl=impl)
                outs.append(ops.prefill_chunk(q[a:b], k[a:b], v[a:b], pages, table, a, budgets[layer], **own)[0])
            held = [
                pages.position[table[h, layout.state_blocks + s // N].long(), h, s % N].tolist()
                for h in range(heads)
                for s in [torch.arange(8, int(budgets[layer, h]))]
            ]
            found.append((torch.cat(outs), held))
        assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_too_small_a_pool_is_refused():
    shares = Shares.of(torch.tensor([[20, 40]], dtype=torch.int32), 30)
    regions = RegionMap(shares, PageLayout(2, SIZE, torch.float32, N), 4)
    with pytest.raises(ValueError, match="100 bytes do not hold 4 blocks of 1 layers"):
        regions.view(torch.zeros(100, dtype=torch.uint8))
