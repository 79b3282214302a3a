"""Ranks and running cutoffs of a static order, for all queries at once.

The cutoff of query q is the k-th smallest rank in the prefix of tokens that are eligible at q: an order
statistic of a prefix, for every prefix. Instead of inserting the tokens into a tree one by one, the kernels
find the binary digits of all answers together, from the highest digit down, as in a descent of a wavelet
tree:

- The tokens, in the order in which they become eligible, are kept sorted stably by the digits of their rank
  above the current one. The ranks are a permutation of 0 .. S - 1. Therefore the tokens whose higher digits
  form ``low`` are at positions ``low ..``, in the order of their arrival, and those in a prefix are the first
  ``count`` of them.
- The number of those with a zero as the next digit is one look-up in running counts of zeros. If it is at
  least ``left``, the answer is among them and its digit is 0. Otherwise the digit is 1, and ``left`` is
  reduced by that number.

The work is O(S log S), the memory O(S), with 2 launches per digit. Each launch reads only what earlier
launches wrote and writes each element once, so the result does not depend on the order of memory operations
inside a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["half"])
def _count_and_split(ranks, zeros, split, length, half, BLOCK: tl.constexpr):
    """Count the zeros of one digit before each position, and sort the ranks stably by that digit too.

    ``half`` is the value of the digit; the counts are ``[rows, S + 1]``.
    """
    row = tl.program_id(0).to(tl.int64)
    ranks += row * length
    split += row * length
    zeros += row * (length + 1)
    seen = 0
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        rank = tl.load(ranks + place, mask=inside, other=half)  # padding counts as ones
        zero = (rank & half) == 0
        flags = zero.to(tl.int32)
        before = seen + tl.cumsum(flags, 0) - flags
        tl.store(zeros + place, before, mask=inside)
        # start of the tokens with the same higher digits; half of the ranks below it have a zero
        node = rank & (-2 * half)
        zeros_of_node = before - node // 2
        target = tl.where(zero, node + zeros_of_node, place + half - zeros_of_node)
        tl.store(split + target, rank, mask=inside)
        seen += tl.sum(flags, 0)
    tl.store(zeros + length, seen)


@triton.jit(do_not_specialize=["half"])
def _descend(zeros, low, count, left, length, queries, half, BLOCK: tl.constexpr):
    """Find one digit of the answers.

    ``low`` are their digits so far, ``count`` tokens of the prefix share these digits, and the answer is the
    ``left``-th smallest of those.
    """
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = query < queries
    at = row * queries + query
    lows = tl.load(low + at, mask=inside, other=0)
    counts = tl.load(count + at, mask=inside, other=0)
    lefts = tl.load(left + at, mask=inside, other=1)
    fits = tl.load(zeros + row * (length + 1) + lows + counts, mask=inside, other=0) - lows // 2
    below = lefts <= fits
    tl.store(low + at, tl.where(below, lows, lows + half), mask=inside)
    tl.store(count + at, tl.where(below, fits, counts - fits), mask=inside)
    tl.store(left + at, tl.where(below, lefts, lefts - fits), mask=inside)


def _ranks(priority: torch.Tensor) -> torch.Tensor:
    """Return ranks ``[rows, S]`` int32, 0 for the highest priority.

    Of equal priorities the newer comes first.
    """
    length = priority.shape[-1]
    order = torch.sort(priority.flip(-1), dim=-1, descending=True, stable=True).indices
    places = torch.arange(length, dtype=torch.int32, device=priority.device).expand(priority.shape)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, length - 1 - order, places)


def kth_smallest(ranks: torch.Tensor, left: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, queries]``: the ``left``-th smallest of the first ``count`` ranks.

    Args:
        ranks: ``[rows, S]`` int32, permutations; overwritten.
        left: ``[rows, queries]`` int32, at most ``count``; overwritten.
        count: ``[rows, queries]`` int32; overwritten.
    """
    (rows, length), queries = ranks.shape, count.shape[1]
    left, count = left.contiguous(), count.contiguous()
    low, spare = torch.zeros_like(count), torch.empty_like(ranks)
    zeros = torch.empty(rows, length + 1, dtype=torch.int32, device=ranks.device)
    for digit in reversed(range((length - 1).bit_length())):
        _count_and_split[(rows,)](ranks, zeros, spare, length, 1 << digit, BLOCK=BLOCK, num_warps=4)
        _descend[rows, triton.cdiv(queries, BLOCK)](
            zeros, low, count, left, length, queries, 1 << digit, BLOCK=BLOCK, num_warps=4
        )
        ranks, spare = spare, ranks
    return low


def running_topk(priority, *, sinks, window, topk):
    """Implement :func:`kvpop_vllm.kernels.ops.running_topk`."""
    shape, length = priority.shape, priority.shape[-1]
    rank = _ranks(priority.reshape(-1, length))
    cutoff = torch.full_like(rank, length - 1 if topk else -1)
    first = sinks + window + topk  # the first query with more than k eligible tokens
    if topk and length > first:
        # tokens that are never eligible go last: no prefix includes them, and the ranks stay a permutation
        arrival = torch.cat([rank[:, sinks : length - window], rank[:, length - window :], rank[:, :sinks]], dim=1)
        count = torch.arange(topk + 1, topk + 1 + length - first, dtype=torch.int32, device=rank.device)
        count = count.repeat(len(rank), 1)
        cutoff[:, first:] = kth_smallest(arrival, torch.full_like(count, topk), count)
    return rank.view(shape), cutoff.view(shape)
