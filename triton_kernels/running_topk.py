"""Ranks and running cutoffs of a static order, for all queries at once, by a wavelet tree (docs/kernels.md).

Each program reads only what earlier launches or it itself wrote, and writes each element once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpop_vllm.kernels.ops.training import check_priorities
from kvpop_vllm.kernels.transfers import to_device

BLOCK = 1024


@triton.jit(do_not_specialize=["length", "half"])
def _count(ranks, counts, length, half, BLOCK: tl.constexpr):
    """Count the zeros of the digit of value ``half``. Grid: rows, BLOCK ranks. 0.3 MB for H rows: 0.1 us."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks + row * length + place, mask=place < length, other=half)  # padding counts as ones
    zero = (rank & half) == 0
    tl.store(counts + row * tl.num_programs(1) + tl.program_id(1), tl.sum(zero.to(tl.int32), 0))


@triton.jit(do_not_specialize=["length", "digits", "highest", "number"])
def _split(
    ranks,  # [rows, S]
    split,  # [rows, S], the ranks sorted; if no rank leaves its block, ``ranks`` itself
    counts,  # [rows, blocks], zeros of each block, or None if no rank leaves its block
    zeros,  # [rows, digits, S + 1]
    length, digits, highest, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the zeros of ``number`` digits before each position of a block, and sort its ranks stably by these too.

    The digits begin with the ``highest`` one; it is the only one if ranks may leave their blocks.

    Grid: rows, BLOCK ranks. 12 bytes a rank and digit, 0.8 MB for H rows: 0.2 us, less than a launch; ten digits, one
    after another, about 10 us.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    ranks += row * length
    split += row * length
    zeros_before = block * BLOCK // 2  # if no rank leaves its block, half of those in earlier blocks have a zero
    if counts is not None:
        zeros_before = 0
        for first in range(0, block, BLOCK):
            ahead = first + tl.arange(0, BLOCK)
            zeros_before += tl.sum(tl.load(counts + row * tl.num_programs(1) + ahead, mask=ahead < block, other=0), 0)
    for i in range(number):
        digit = highest - i
        half = 1 << digit
        rank = tl.load(ranks + place, mask=inside, other=half)  # padding counts as ones
        zero = (rank & half) == 0
        flags = zero.to(tl.int32)
        before = zeros_before + tl.cumsum(flags, 0) - flags
        counted = zeros + (row * digits + digit) * (length + 1)
        tl.store(counted + place, before, mask=inside)
        tl.store(counted + length, zeros_before + tl.sum(flags, 0), mask=block == tl.num_programs(1) - 1)
        # start of the tokens with the same higher digits; half of the ranks below it have a zero
        node = rank & (-2 * half)
        zeros_of_node = before - node // 2
        target = tl.where(zero, node + zeros_of_node, place + half - zeros_of_node)
        tl.debug_barrier()  # all threads have read the ranks that are overwritten
        tl.store(split + target, rank, mask=inside)
        tl.debug_barrier()  # the stores are visible before the next digit


@triton.jit(do_not_specialize=["length", "queries", "digits"])
def _descend(zeros, left, count, low, length, queries, digits, BLOCK: tl.constexpr):
    """Find answers digit by digit: the ``lefts``-th smallest of ``counts`` tokens whose higher digits are ``lows``.

    Grid: rows, BLOCK queries. 12 bytes a query and 4 for each of 13 digits, one after another, 4.2 MB: about 10 us.
    """
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address, inside = row * queries + query, query < queries
    lows = tl.zeros([BLOCK], tl.int32)
    counts = tl.load(count + address, mask=inside, other=0)
    lefts = tl.load(left + address, mask=inside, other=1)
    for i in range(digits):
        digit = digits - 1 - i
        counted = zeros + (row * digits + digit) * (length + 1)
        fits = tl.load(counted + lows + counts, mask=inside, other=0) - lows // 2
        below = lefts <= fits
        lows = tl.where(below, lows, lows + (1 << digit))
        counts = tl.where(below, fits, counts - fits)
        lefts = tl.where(below, lefts, lefts - fits)
    tl.store(low + address, lows, mask=inside)


def _ranks(priority: torch.Tensor) -> torch.Tensor:
    """Return ranks ``[rows, S]`` int32, 0 for the highest priority, of equal ones for the newer."""
    length = priority.shape[-1]
    order = torch.sort(priority.flip(-1), dim=-1, descending=True, stable=True).indices
    places = torch.arange(length, dtype=torch.int32, device=priority.device).expand(priority.shape)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, length - 1 - order, places)


def kth_smallest(ranks: torch.Tensor, left: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, queries]``: the ``left``-th smallest of the first ``count`` ranks.

    Args:
        ranks: ``[rows, S]`` int32, permutations; overwritten.
        left: ``[rows, queries]`` int32, at most ``count``.
        count: ``[rows, queries]`` int32.
    """
    (rows, length), queries, left, count = ranks.shape, count.shape[1], left.contiguous(), count.contiguous()
    digits, blocks = (length - 1).bit_length(), triton.cdiv(length, BLOCK)
    within = min(digits, BLOCK.bit_length() - 1)  # digits that move no rank out of its block
    spare, low, options = torch.empty_like(ranks), torch.empty_like(count), {"BLOCK": BLOCK, "num_warps": 4}
    counts = torch.empty(rows, blocks, dtype=torch.int32, device=ranks.device)
    zeros = torch.empty(rows, digits, length + 1, dtype=torch.int32, device=ranks.device)
    for digit in reversed(range(within, digits)):
        _count[rows, blocks](ranks, counts, length, 1 << digit, **options)
        _split[rows, blocks](ranks, spare, counts, zeros, length, digits, digit, 1, **options)
        ranks, spare = spare, ranks
    _split[rows, blocks](ranks, ranks, None, zeros, length, digits, within - 1, within, **options)
    _descend[rows, triton.cdiv(queries, BLOCK)](zeros, left, count, low, length, queries, digits, **options)
    return low


@torch.library.custom_op(
    "kvpop::running_topk",
    mutates_args=(),
    schema="(Tensor priority, int sinks, int window, int[] topk) -> (Tensor, Tensor)",
)
def _running_topk(priority, sinks, window, topk):
    check_priorities(priority)
    shape, length = priority.shape, priority.shape[-1]
    rank = _ranks(priority.reshape(-1, length))
    slots = to_device(torch.tensor(topk, dtype=torch.int32), rank.device).repeat(len(rank) // len(topk)).unsqueeze(1)
    cutoff = torch.where(slots > 0, length - 1, -1).int().repeat(1, length)
    fewest = min(topk)
    first = sinks + window + fewest  # the first query at which a head has more than its k eligible tokens
    if any(topk) and length > first:
        # tokens that are never eligible go last: no prefix includes them, and the ranks stay a permutation
        arrival = torch.cat([rank[:, sinks : length - window], rank[:, length - window :], rank[:, :sinks]], dim=1)
        count = torch.arange(fewest + 1, fewest + 1 + length - first, dtype=torch.int32, device=rank.device)
        count = count.repeat(len(rank), 1)
        last = kth_smallest(arrival, slots.minimum(count).clamp_min(1), count)
        cutoff[:, first:] = torch.where((slots > 0) & (count > slots), last, cutoff[:, first:])
    return rank.view(shape), cutoff.view(shape)


@_running_topk.register_fake
def _(priority, sinks, window, topk):
    return tuple(priority.new_empty(priority.shape, dtype=torch.int32) for _ in range(2))


def running_topk(priority, *, sinks, window, topk):
    """Implement :func:`kvpop_vllm.kernels.ops.running_topk`."""
    return _running_topk(priority, sinks, window, topk)
