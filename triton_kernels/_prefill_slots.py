"""Movement of tokens between the batch and the slots of a piece's segments.

Tokens that leave the window are copied out of the ring before anything is written. Each program has a block of rows of
one segment and one KV head, or all entries of a segment.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._prefill_plan import (
    ENTRY,
    FILLED,
    FIRST,
    HELD,
    INSIDE,
    KEY,
    LAST,
    LEAVING,
    LENGTH,
    REQUEST,
    ROW,
    SINKS,
    START,
    TOKEN,
    WINDOW,
    block_of,
    number,
)
from kvpop_vllm.kernels.triton._serving_pages import ring_slot, row_at, word_at
from kvpop_vllm.kernels.triton.online_topk import held_long


@triton.jit(do_not_specialize=["rows"])
def _gather(
    tokens,  # k, v [T, H, D] and their strides between tokens and heads
    new_score,  # [H, P] float32, scores computed at insertion, or None
    cache, segments, blocks,
    keys, values,  # [H, P, D]
    score,  # [H, P] float32, if there are scores computed at insertion
    rows,
    P: tl.constexpr, ROWS: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Copy the new token of each tail row, or the token that leaves the window with it; 0 where there is none."""
    k, v, k_token, k_head, v_token, v_head = tokens
    s, first = block_of(blocks)
    h, r = tl.program_id(1).to(tl.int64), number(segments, s, REQUEST).to(tl.int64)
    start, window, sinks = number(segments, s, START), number(segments, s, WINDOW), number(segments, s, SINKS)
    index = first + tl.arange(0, ROWS)
    there = index < number(segments, s, LENGTH)
    row = h * rows + number(segments, s, ROW) + index
    if LEAVES:
        index -= window
        there = there & (start + index >= sinks)
    in_ring, is_new = there & (index < 0), there & (index >= 0)
    slot = sinks + tl.where(in_ring, start + index - sinks, 0) % window
    own = row_at(cache, r, h, slot, P)
    token = number(segments, s, TOKEN).to(tl.int64) + number(segments, s, INSIDE) + tl.where(is_new, index, 0)
    column = tl.arange(0, P.padded)
    fits, place = (column < P.size)[None, :], row[:, None] * P.size + column[None, :]
    new_k = tl.load(
        k + (token * k_token + h * k_head)[:, None] + column[None, :], mask=is_new[:, None] & fits, other=0.0
    )
    new_v = tl.load(
        v + (token * v_token + h * v_head)[:, None] + column[None, :], mask=is_new[:, None] & fits, other=0.0
    )
    if LEAVES:
        old = own[:, None] + column[None, :]
        ring_k = tl.load(cache.k + old, mask=in_ring[:, None] & fits, other=0.0)
        ring_v = tl.load(cache.v + old, mask=in_ring[:, None] & fits, other=0.0)
        new_k, new_v = tl.where(in_ring[:, None], ring_k, new_k), tl.where(in_ring[:, None], ring_v, new_v)
        if new_score is not None:
            in_word = tl.load(cache.score + word_at(cache, r, h, slot, P), mask=in_ring, other=0.0)
            computed = tl.load(new_score + h * rows + number(segments, s, ROW) + index, mask=is_new, other=0.0)
            tl.store(score + row, tl.where(in_ring, in_word, computed))
    tl.store(keys + place, new_k, mask=fits)
    tl.store(values + place, new_v, mask=fits)


@triton.jit(do_not_specialize=["rows", "entries"])
def _enter(
    leaving_score,  # [H, P] float32
    cache, segments, topk,
    score,  # [H, E] float32
    position,  # [H, E] int32
    rows, entries, heads,
    P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List score and position of the candidates: those in long-range slots, then those that leave the window."""
    s, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = number(segments, s, REQUEST).to(tl.int64)
    filled, leaving = number(segments, s, FILLED), number(segments, s, LEAVING)
    entry = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    held, arrives = entry < held_long(segments, topk, s, h, heads), entry >= filled
    first_long = number(segments, s, SINKS) + number(segments, s, WINDOW)
    word = word_at(cache, r, h, tl.where(held, first_long + entry, 0), P)
    index = number(segments, s, LENGTH) - leaving + entry - filled
    arrives = arrives & (entry < filled + leaving)
    token = number(segments, s, FIRST) + number(segments, s, START) + index - number(segments, s, WINDOW)
    own = tl.load(leaving_score + h * rows + number(segments, s, ROW) + index, mask=arrives, other=float("-inf"))
    own = tl.where(held, tl.load(cache.score + word, mask=held, other=0.0), own)
    token = tl.where(held, tl.load(cache.position + word, mask=held, other=0), tl.where(arrives, token, -1))
    place, inside = h * entries + number(segments, s, ENTRY) + entry, entry < filled + leaving
    tl.store(score + place, own, mask=inside)
    tl.store(position + place, token, mask=inside)


@triton.jit(do_not_specialize=["rows", "keys", "entries"])
def _settle(
    leaves,  # [H, E] int32, eviction times
    segments, topk,
    free,  # [H, E] int32, workspace
    gone,  # [H, N] int32, eviction times of keys, LAST where nothing is written
    slot_of,  # [H, P] int32, slot of the token that leaves the window, -1 where nothing is written
    rows, keys, entries, heads,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the slots of the retained newcomers of a segment and a head, and write the eviction times of keys.

    Long-range tokens keep their slots. Newcomers take free slots, the oldest one the first slot.
    """
    s, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    filled, held = number(segments, s, FILLED), held_long(segments, topk, s, h, heads)
    sinks, window, used = number(segments, s, SINKS), number(segments, s, WINDOW), number(segments, s, HELD)
    most = tl.minimum(filled, tl.load(topk + s * heads + h))
    leaves += h * entries + number(segments, s, ENTRY)
    free += h * entries + number(segments, s, ENTRY)
    gone += h * keys + number(segments, s, KEY)
    slot_of += h * rows + number(segments, s, ROW)
    found = 0
    for start in range(0, filled, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        at = tl.load(leaves + entry, mask=entry < held, other=0)
        vacant = ((at != LAST) & (entry < most)).to(tl.int32)
        tl.store(free + found + tl.cumsum(vacant, 0) - 1, sinks + window + entry, mask=vacant > 0)
        tl.store(gone + sinks + window + entry, at, mask=(entry < filled) & (sinks + window + entry < used))
        found += tl.sum(vacant, 0)
    tl.debug_barrier()
    taken, leaving = 0, number(segments, s, LEAVING)
    begin, first = number(segments, s, START), number(segments, s, LENGTH) - leaving
    for start in range(0, leaving, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        inside, index = entry < leaving, first + entry
        at = tl.load(leaves + filled + entry, mask=inside, other=0)
        stays = (at == LAST).to(tl.int32)
        place = tl.load(free + taken + tl.cumsum(stays, 0) - 1, mask=stays > 0, other=-1)
        tl.store(slot_of + index, place, mask=inside)
        key = used + index - window
        key = tl.where(index < window, sinks + (begin + index - window - sinks) % window, key)
        tl.store(gone + key, at, mask=inside)
        taken += tl.sum(stays, 0)


@triton.jit
def _put(cache, r, h, slot, k, v, score, position, wanted, column, P: tl.constexpr):
    """Write tokens to slots; the position word of slot 0 has another use."""
    slot = tl.where(wanted, slot, 0)
    at = row_at(cache, r, h, slot, P)[:, None] + column[None, :]
    inside, word = wanted[:, None] & (column < P.size)[None, :], word_at(cache, r, h, slot, P)
    tl.store(cache.k + at, k, mask=inside)
    tl.store(cache.v + at, v, mask=inside)
    tl.store(cache.score + word, score, mask=wanted)
    tl.store(cache.position + word, position, mask=wanted & (slot > 0))


@triton.jit(do_not_specialize=["rows"])
def _store(
    tokens, new_score,
    keys, values, score,  # [H, P, D], [H, P, D], [H, P] of the tokens that leave the window
    slot_of,  # [H, P]
    cache, segments, blocks,
    right,  # [R, H] int32, 0 if the step does not start where the cache ends
    rows, heads,
    P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a block's new tokens and newcomers to their slots, and the number of tokens seen."""
    k, v, k_token, k_head, v_token, v_head = tokens
    s, first = block_of(blocks)
    h, r = tl.program_id(1).to(tl.int64), number(segments, s, REQUEST).to(tl.int64)
    start, window, sinks = number(segments, s, START), number(segments, s, WINDOW), number(segments, s, SINKS)
    begin, length, index = number(segments, s, FIRST), number(segments, s, LENGTH), first + tl.arange(0, ROWS)
    good = tl.load(right + r * heads + h) != 0
    there, row = index < tl.where(good, length, 0), h * rows + number(segments, s, ROW) + index
    t, column = start + index, tl.arange(0, P.padded)
    fits = (column < P.size)[None, :]
    token = number(segments, s, TOKEN).to(tl.int64) + number(segments, s, INSIDE) + index
    new = there & ((t < sinks) | (index >= length - window))
    own_k = tl.load(k + (token * k_token + h * k_head)[:, None] + column[None, :], mask=new[:, None] & fits, other=0.0)
    own_v = tl.load(v + (token * v_token + h * v_head)[:, None] + column[None, :], mask=new[:, None] & fits, other=0.0)
    own_score = tl.zeros([ROWS], tl.float32)
    if new_score is not None:
        own_score = tl.load(new_score + row, mask=new, other=0.0)
    _put(cache, r, h, ring_slot(t, sinks, window), own_k, own_v, own_score, begin + t, new, column, P)
    slot = tl.load(slot_of + row, mask=there, other=-1)
    moves, at = there & (slot >= 0), row[:, None] * P.size + column[None, :]
    own_k = tl.load(keys + at, mask=moves[:, None] & fits, other=0.0)
    own_v = tl.load(values + at, mask=moves[:, None] & fits, other=0.0)
    own_score = tl.load(score + row, mask=moves, other=0.0)
    _put(cache, r, h, slot, own_k, own_v, own_score, begin + t - window, moves, column, P)
    tl.store(cache.position + word_at(cache, r, h, 0, P), begin + start + length, mask=first < tl.where(good, 1, 0))
