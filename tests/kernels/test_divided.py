"""Heads that divide a layer's slots by votes: a naive division gives the same, and no page is shared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop_vllm.cache.divided_heads import SharesByVotes, build_page_table, divided_blocks, store_budgets
from kvpop_vllm.cache.pages import PageLayout, cdiv
from kvpop_vllm.kernels.ops import PromptVotes
from kvpop_vllm.rules.compress import divide

N, SIZE = 16, 32


def naive(votes: list[list[float]], budget: int, first: int, safe: float) -> list[int]:
    """Return the budget of each head, by one sort of all tokens."""
    heads, count = len(votes), len(votes[0])
    room = budget - first
    if count <= room:
        return [budget] * heads
    retained = []
    for h in range(heads):
        best = sorted(range(count), key=lambda t: (-votes[h][t], -t))
        retained.append(set(best[: max(0, int(safe * budget) - first)]))
    candidates = [(-votes[h][t], -t, h) for h in range(heads) for t in range(count) if t not in retained[h]]
    for _, minus_t, h in sorted(candidates)[: heads * room - sum(map(len, retained))]:
        retained[h].add(-minus_t)
    return [first + len(mine) for mine in retained]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 5),
    count=st.integers(0, 60),
    first=st.integers(1, 9),
    room=st.integers(0, 40),
    levels=st.integers(1, 40),
    safe=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 10_000),
)
def test_division(heads, count, first, room, levels, safe, seed):
    """The division equals the naive one; few levels of votes make many of them equal."""
    draw = torch.Generator().manual_seed(seed)
    votes = torch.randint(0, levels, (heads, count), generator=draw).float() / 64
    budget = first + room
    counts = divide(votes, budget, first, safe)
    assert counts.tolist() == naive(votes.tolist(), budget, first, safe)
    assert counts.dtype == torch.int32 and int(counts.sum()) == heads * budget and int(counts.min()) >= first


@settings(max_examples=60, deadline=None, derandomize=True)
@given(heads=st.integers(1, 5), budget=st.integers(1, 200), state=st.integers(0, 300), seed=st.integers(0, 10_000))
def test_pages_are_a_requests_own(heads, budget, state, seed):
    """For any division, pages are regions of the request's blocks, none twice; state pages do not move."""
    draw = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, heads * (budget - 1) + 1, (heads - 1,), generator=draw).sort().values
    ends = torch.cat([torch.zeros(1).long(), cuts, torch.tensor([heads * (budget - 1)])])
    budgets = (ends.diff() + 1).int().unsqueeze(0)
    assert int(budgets.sum()) == heads * budget
    layout = PageLayout(heads, SIZE, torch.float32, N, state)
    needed = layout.state_blocks + divided_blocks(heads, budget, N)
    blocks = torch.randperm(needed + 3, generator=draw)[:needed]
    natural = blocks * heads + torch.arange(heads).unsqueeze(1)
    _, (row,) = build_page_table(layout, natural.unsqueeze(0), budgets)
    used_pages = []
    for h in range(heads):
        pages = layout.state_blocks + cdiv(int(budgets[0, h]), N)
        used_pages += row[h, :pages].tolist()
        assert row[h, : layout.state_blocks].tolist() == natural[h, : layout.state_blocks].tolist()
    assert len(set(used_pages)) == len(used_pages) and set(used_pages) <= set(natural.flatten().tolist())


def test_what_was_divided_is_read_back():
    """Divided budgets are read back for requests whose prompts have been compressed.

    Heads of other requests have equal budgets, whatever lies in their state. Rows may have another width.
    """
    votes, heads, budget = PromptVotes(2, safe=0.2), 3, 40
    layout = PageLayout(heads, SIZE, torch.float32, N, votes.state_floats(SIZE))
    pages = layout.view(torch.full((40, heads, layout.region_bytes), 255, dtype=torch.uint8))
    regions = SharesByVotes(pages, votes, budget)
    assert regions.pages.raw.data_ptr() == pages.raw.data_ptr() and regions.pages.num_blocks == 40 * heads
    tails = torch.arange(40).view(2, 20)[:, : layout.state_blocks + 4]
    natural = tails.unsqueeze(1) * heads + torch.arange(heads).unsqueeze(1)
    shares = torch.tensor([20, 71, 29], dtype=torch.int32)
    store_budgets(regions.pages, natural[1], shares, votes)
    budgets, rows = regions.place(0, tails, [False, True], torch.tensor([40, 40]), ())
    assert budgets.tolist() == [[40] * 3, [20, 71, 29]]
    assert rows.shape == (2, 3, layout.state_blocks + 5) and rows.dtype == torch.int32
    assert torch.equal(rows[0, :, : layout.state_blocks + 4], natural[0].int()), "whoever divides wants all blocks"
    assert torch.equal(rows[1], build_page_table(layout, natural[1:], shares.unsqueeze(0))[1][0])


def test_regions_must_lie_one_after_another():
    layout = PageLayout(2, SIZE, torch.float32, N)
    raw = torch.zeros(4, 3, layout.region_bytes, dtype=torch.uint8)[:, :2]
    with pytest.raises(ValueError, match="do not lie one after another"):
        layout.view(raw).by_region()
