"""A division of a layer's budget among its heads, at a decision of the prompt: :func:`_rank` counts the best of all heads,
:func:`_hand_out` sets shares and hands pages over, and :func:`_shrink` has heads evict what is too much, before anything moves. Where
none falls, all leave at once. Where a head's start is wrong, nothing is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_pages import (
    decided_before,
    decides_at,
    phase_of,
    row_at,
    start_of,
    state_at,
    word_at,
    word_of_share,
)
from kvpop_vllm.kernels.triton._serving_retain import _effective, _lowest
from kvpop_vllm.kernels.triton._serving_scores import _ranked

from kvpop_vllm.kernels.ops import FLOOR

PART, WHOLE = tl.constexpr(FLOOR[0]), tl.constexpr(FLOOR[1])  # the part of an equal share that every head gets


@triton.jit
def _equal_share(asked, r, P: tl.constexpr):
    """k, and how many slot pages a head has that holds B tokens. asked: as the caller has them."""
    budget = tl.load(asked.budgets + r * asked.budgets_request)
    return budget - P.first_long, (budget + P.slots - 1) // P.slots


@triton.jit
def _whole(number, most):
    """A number of a share as int32, in [0, most] whatever lies there."""
    return tl.where(number > 0.0, tl.where(number < most.to(tl.float32), number, most.to(tl.float32)), 0.0).to(tl.int32)


@triton.jit
def _divides_at(cache, asked, r, heads, P: tl.constexpr):
    """The position of a request's token where shares are set: at the prompt's decisions, and the one on the first generated token;
    below 0 elsewhere."""
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    prompt = tl.load(asked.prompts + r * asked.prompts_request).to(tl.int32)
    q = tl.where((q <= prompt) & decides_at(q, phase_of(asked, r, P), P), q, -1)
    if q >= 0:
        for h in range(heads):
            q = tl.minimum(q, start_of(cache, asked, r, h, P))
    return q


@triton.jit
def _in_order(value):
    """float64 as int64 in the same order, and equal where they are; no number, which has no place in an order, is as low as any."""
    value = tl.where(value == value, value, float("-inf")) + 0.0  # -0.0 is 0.0
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _held(asked, r, h, P: tl.constexpr):
    """Long-range tokens of a head; h may be a tensor of heads, and r too."""
    used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
    return tl.maximum(used - P.first_long, 0)


@triton.jit
def _leaving(q, P: tl.constexpr):
    """The first token that leaves the window at a decision, and their number."""
    first = tl.maximum(P.sinks, q + 1 - P.every - P.window)
    return first, tl.maximum(q + 1 - P.window - first, 0)


@triton.jit
def _effectives(
    cache, asked, log_gamma,
    effective,  # [R, width] int64, in the order of effective scores: of all that a decision ranks, head after head
    token,  # [R, width] int32
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How a block of a head's slots ranks, and those behind it by so many as there are programs."""
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    held = _held(asked, r, h, P)
    gamma = tl.load(log_gamma + h)
    oldest, leaving = _leaving(q, P)
    before = 0
    for other in range(h):
        before += _held(asked, r, other, P) + leaving
    for first in range(tl.program_id(0) * BLOCK, P.first_long + held, tl.num_programs(0) * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ranked, t = _ranked(cache, r, h, q, P.first_long + held, slot, P)
        raw = tl.load(cache.score + word_at(cache, r, h, tl.where(ranked, slot, 0), P), mask=ranked, other=0.0)
        value = _effective(raw, tl.where(ranked, t, q - 1), q, gamma, raw, P)
        place = before + tl.where(slot >= P.first_long, slot - P.first_long, held + t - oldest)
        ranked &= place < width  # but for damaged shares always
        tl.store(effective + r * width + place, _in_order(value), mask=ranked)
        tl.store(token + r * width + place, t, mask=ranked)


@triton.jit
def _rank(
    cache, asked, whole, effective, token,
    chosen,  # [R, width] int32: 1 of the H k best
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which of a block of tokens, and of those behind it by so many as there are programs, are among the H k best of all heads; of equal
    ones the newer, of one token the later head's."""
    r = tl.program_id(1).to(tl.int64)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    _, count = _leaving(q, P)
    count *= heads
    for h in range(heads):
        count += _held(asked, r, h, P)
    count = tl.minimum(count, width)
    topk, _ = _equal_share(whole, r, P)
    if count <= heads * topk:
        return
    effective += r * width
    token += r * width
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        own = tl.load(effective + place, mask=inside, other=0)
        t = tl.load(token + place, mask=inside, other=0)
        better = tl.zeros([BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            other = start + tl.arange(0, BLOCK)
            there = other < count
            value = tl.load(effective + other, mask=there, other=0)[None, :]
            age = tl.load(token + other, mask=there, other=0)[None, :]
            later = (age > t[:, None]) | ((age == t[:, None]) & (other[None, :] > place[:, None]))
            above = (value > own[:, None]) | ((value == own[:, None]) & later)
            better += tl.sum((above & there[None, :]).to(tl.int32), 1)
        tl.store(chosen + r * width + place, (better < heads * topk).to(tl.int32), mask=inside)


@triton.jit
def _hand_out(
    cache, asked, whole, chosen,
    numbers,  # [R, 2, NUMBERS] int32: which region numbers are taken; those that are free, in order
    shares,  # [R, H] int32
    excess,  # [R, H] int32: how many tokens each head has to evict
    divided,  # [R] int32: whether shares are set
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """New shares of a request's heads; pages that a head needs no more go to those that need more. None where all that is ranked
    fits."""
    r = tl.program_id(0).to(tl.int64)
    tl.store(divided + r, 0)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    _, leaving = _leaving(q, P)
    topk, equal = _equal_share(whole, r, P)
    count = heads * leaving
    for h in range(heads):
        count += _held(asked, r, h, P)
    count = tl.minimum(count, width)
    if count <= heads * topk:
        return

    tl.store(divided + r, 1)
    shares += r * heads
    excess += r * heads
    n, p = tl.arange(0, NUMBERS), tl.arange(0, TABLE)
    taken = numbers + r * 2 * NUMBERS
    free = taken + NUMBERS
    tl.store(taken + n, 0)
    tl.debug_barrier()
    chosen += r * width
    total = 0
    before = 0
    for h in range(heads):
        held = _held(asked, r, h, P)
        best = tl.zeros([BLOCK], tl.int32)
        for start in range(0, held + leaving, BLOCK):
            place = start + tl.arange(0, BLOCK)
            best += tl.load(chosen + place, mask=place < held + leaving, other=0)
        chosen += held + leaving
        total += (WHOLE - PART) * tl.sum(best, 0) + PART * topk
        end = (2 * total + WHOLE) // (2 * WHOLE)  # rounded, so that all together are H k
        share = end - before
        before = end
        tl.store(shares + h, share)
        tl.store(excess + h, tl.maximum(held - share, 0))
        kept = tl.minimum(_pages_of_head(asked, r, h, P), (P.first_long + share + P.slots - 1) // P.slots)
        word = state_at(cache, r, h, P.share_at + 2 + p, p < kept, P)
        mine = _whole(tl.load(cache.state + word, mask=p < kept, other=0.0), (equal + 1) * heads - 1)
        tl.store(taken + mine, 1, mask=p < kept)
    tl.debug_barrier()
    unused = (n < (equal + 1) * heads) & (tl.load(taken + n) == 0)
    tl.store(free + tl.cumsum(unused.to(tl.int32), 0) - 1, n, mask=unused)
    tl.debug_barrier()
    for h in range(heads):
        share = tl.load(shares + h)
        needs = (P.first_long + share + P.slots - 1) // P.slots
        kept = tl.minimum(_pages_of_head(asked, r, h, P), needs)
        gets = (p >= kept) & (p < needs)
        number = tl.load(free + p - kept, mask=gets, other=-1).to(tl.float32)
        changes = (p >= kept) & (p < P.share_words)
        word = state_at(cache, r, h, P.share_at + 2 + p, changes, P)
        tl.store(cache.state + word, number, mask=changes)
        tl.store(cache.state + word_of_share(cache, r, h, 0, P), share.to(tl.float32))
        free += needs - kept


@triton.jit
def _pages_of_head(asked, r, h, P: tl.constexpr):
    """Slot pages of a head as its share was."""
    budget = tl.load(asked.budgets + r * asked.budgets_request + h * asked.budgets_head)
    return (budget + P.slots - 1) // P.slots


@triton.jit
def _shrink(
    cache, asked, log_gamma, excess, divided, heads,
    P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A head evicts the lowest of its long-range tokens, one after another; the last ones move into their slots. Moments take them
    in, their products here too: this is rare. cache: as the shares were."""
    h, r = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(divided + r) == 0:
        return
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    many = tl.load(excess + r * heads + h)
    if many == 0:
        return
    column = tl.arange(0, P.padded)
    fits = column < P.size
    held = _held(asked, r, h, P)
    gamma = tl.load(log_gamma + h)
    if P.moments:
        evicted = decided_before(q, phase_of(asked, r, P), P) - P.sinks - held
        value_at = state_at(cache, r, h, P.state_words + P.size + column, fits, P)
        kept = column < tl.where(evicted > 0, P.size, 0)
        mean_value = tl.load(cache.state + value_at, mask=kept, other=0.0)
    for _ in range(many):
        used = P.first_long + held
        _, victim = _lowest(cache, cache.score, r, h, used, q, gamma, P, BLOCK)
        last = used - 1
        gone = tl.where(victim < 0, last, victim)  # where no score is a number
        at, to = row_at(cache, r, h, gone, P), word_at(cache, r, h, gone, P)
        if P.moments:
            x_value = tl.load(cache.v + at + column, mask=fits, other=0.0).to(tl.float32)
            begun = tl.where(evicted > 0, P.size, 0)
            evicted += 1
            deviation = x_value - mean_value
            mean_value += deviation / evicted
            for first in range(0, P.size, BLOCK_X):
                place = first + tl.arange(0, BLOCK_X)
                own = tl.load(cache.k + at + place, mask=place < P.size, other=0.0).to(tl.float32)
                word = state_at(cache, r, h, P.state_words + place, place < P.size, P)
                inside = (place < P.size)[:, None] & fits[None, :]
                cell = P.state_words + (2 + place)[:, None] * P.size + column[None, :]
                cells = state_at(cache, r, h, cell, inside, P)
                there = (place < begun)[:, None] & fits[None, :]
                products = tl.load(cache.state + cells, mask=there, other=0.0)
                old = tl.load(cache.state + word, mask=place < begun, other=0.0)
                new = old + (own - old) / evicted
                tl.debug_barrier()
                tl.store(cache.state + cells, products + (own - new)[:, None] * deviation[None, :], mask=inside)
                tl.store(cache.state + word, new, mask=place < P.size)
                tl.debug_barrier()
        row, word = row_at(cache, r, h, last, P), word_at(cache, r, h, last, P)
        key = tl.load(cache.k + row + column, mask=fits, other=0.0)
        value = tl.load(cache.v + row + column, mask=fits, other=0.0)
        raw, t = tl.load(cache.score + word), tl.load(cache.position + word)
        tl.debug_barrier()  # all has been read
        tl.store(cache.k + at + column, key, mask=fits)
        tl.store(cache.v + at + column, value, mask=fits)
        tl.store(cache.score + to, raw)
        tl.store(cache.position + to, t)
        tl.debug_barrier()
        held -= 1
    if P.moments:
        tl.store(cache.state + value_at, mean_value, mask=fits)
    tl.store(cache.state + word_of_share(cache, r, h, 1, P), held.to(tl.float32))
