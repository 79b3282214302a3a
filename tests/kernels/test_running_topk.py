"""Ranks and cutoffs against a sort for every query, and against the simulation of evictions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.naive import kept_sets, visible_keys
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops

IMPLS = ["triton"] if INTERPRETED else ["reference", "cpp"]


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=8 if INTERPRETED else 100, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    length=st.integers(1, 70) | st.sampled_from([64, 65]),
    sinks=st.integers(0, 5),
    window=st.integers(1, 12) | st.just(50),
    topk=st.integers(0, 25) | st.sampled_from([0, 1, 100]) | st.lists(st.integers(0, 40), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    coarse=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_equals_a_sort_for_every_query(impl, batch, heads, length, sinks, window, topk, dtype, coarse, seed):
    priority = torch.randn(batch, heads, length, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2
    priority = priority.round() if coarse else priority
    slots = [topk] * heads if isinstance(topk, int) else topk[:heads]
    topk = topk if isinstance(topk, int) else slots
    rank, cutoff = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl=impl)
    assert rank.dtype == cutoff.dtype == torch.int32 and rank.shape == cutoff.shape == priority.shape
    assert torch.equal(rank.sort(-1).values, torch.arange(length, dtype=torch.int32).expand_as(rank))
    expected = [kept_sets(row, sinks, window, k) for row, k in zip(priority.split(1, 1), slots, strict=True)]
    assert torch.equal(visible_keys(rank, cutoff, sinks, window), torch.cat(expected, 1))
    expected = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl="reference")
    assert torch.equal(rank, expected[0]) and torch.equal(cutoff, expected[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_several_blocks_and_differences_below_float32(impl):
    fine = torch.arange(2100, dtype=torch.float64) % 977 * 1e-9 + 1e3  # longer than two blocks of Triton's, with ties
    priority = torch.stack([fine, torch.randn(2100, generator=torch.Generator().manual_seed(1)).double()])[None]
    priority[0, 1, ::7] = -torch.inf
    options = dict(sinks=4, window=40, topk=300)
    actual, expected = (ops.running_topk(priority, **options, impl=name) for name in (impl, "reference"))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_cutoffs_by_name(impl):
    """The cutoff admits all of E(q) up to k tokens, the k-th best rank beyond, and nothing for k = 0."""
    priority = torch.tensor([[[9.0, 1, 5, 3, 7, 0, 0]]])
    rank, cutoff = ops.running_topk(priority, sinks=1, window=2, topk=2, impl=impl)
    assert rank.tolist() == [[[0, 4, 2, 3, 1, 6, 5]]]  # of the two zeros the newer is better
    assert cutoff.tolist() == [[[6, 6, 6, 6, 6, 3, 2]]]
    assert ops.running_topk(priority, sinks=1, window=2, topk=0, impl=impl)[1].tolist() == [[[-1] * 7]]


@pytest.mark.parametrize("impl", IMPLS)
def test_infinite_and_negative_zero_priorities(impl):
    priority = torch.tensor([[[-torch.inf, 0.0, -0.0, torch.inf, -torch.inf, 1.0, 2.0, 3.0]]])
    rank, cutoff = ops.running_topk(priority, sinks=0, window=1, topk=2, impl=impl)
    assert torch.equal(visible_keys(rank, cutoff, 0, 1), kept_sets(priority, 0, 1, 2))


def test_equals_the_simulation_of_evictions():
    """With a static order, permanent eviction keeps the same sets (DESIGN "The rule")."""
    g = torch.Generator().manual_seed(0)
    score, log_gamma = torch.randn(3, 200, generator=g), -torch.rand(3, generator=g, dtype=torch.float64) / 50
    t = torch.arange(200)
    gone = ops.online_topk(score[:, 4:], t[4:].expand(3, -1), 0, topk=30, window=9, log_gamma=log_gamma)
    rank, cutoff = ops.running_topk((score.double() - t * log_gamma[:, None])[None], sinks=4, window=9, topk=30)
    for q in range(13, 200):
        assert torch.equal((rank <= cutoff[..., q, None])[0, :, 4 : q - 8], gone[:, : q - 12] > q)


class TestTriton:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 100, 300])
    def test_programs_share_a_head(self, length, monkeypatch):
        """Blocks of 16 ranks are sorted by one program each; of more than 16 blocks the counts are read in two parts."""
        from kvpop_vllm.kernels.triton import running_topk as module

        monkeypatch.setattr(module, "BLOCK", 16)
        draw = torch.Generator().manual_seed(length)
        ranks = torch.stack([torch.randperm(length, generator=draw) for _ in range(2)]).int()
        count = torch.randint(1, length + 1, (2, 40), generator=draw).int()
        left = (torch.rand(2, 40, generator=draw) * count).int() + 1
        expected = [[sorted(row[:n])[i - 1] for n, i in zip(*counts, strict=True)] for row, *counts in
                    zip(ranks.tolist(), count.tolist(), left.tolist(), strict=True)]  # fmt: skip
        assert module.kth_smallest(ranks, left, count).tolist() == expected

    @pytest.mark.parametrize("length, launches", [(500, 2), (1024, 2), (8192, 8), (131072, 16)])
    def test_launches(self, length, launches, monkeypatch):
        """Two launches find the last ten digits of all answers, and two more each digit above."""
        from kvpop_vllm.kernels.triton import running_topk as module
        from triton.runtime.interpreter import InterpretedFunction

        grids = []
        monkeypatch.setattr(
            InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **options: grids.append(grid)
        )
        module.kth_smallest(*torch.ones(3, 1, length, dtype=torch.int32))
        assert len(grids) == launches and set(grids) == {(1, -(-length // 1024))}


@pytest.mark.parametrize("impl", IMPLS)
def test_bad_arguments_are_refused(impl):
    right, sane = torch.zeros(1, 1, 5), {"sinks": 0, "window": 1, "topk": 1}
    for priority, change, message in (
        (right, {"window": 0}, "window >= 1"),
        (right, {"topk": -1}, "topk >= 0"),
        (right, {"sinks": -1}, "sinks, topk >= 0"),
        (right, {"topk": [1, -1]}, "one for each of 1 heads, got 2"),
        (right, {"topk": [-1]}, "topk >= 0"),
        (right * torch.nan, {}, "NaN priority"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.running_topk(priority, **sane | change, impl=impl)
