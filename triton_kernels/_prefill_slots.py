"""Movement of tokens between the batch and the slots of a piece's segments.

Tokens that leave the window are copied out of the ring before anything is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, store_rows
from kvpop_vllm.kernels.triton._prefill_plan import LAST, block_of, numbers_of
from kvpop_vllm.kernels.triton._serving_pages import element_at, ring_slot, row_at, word_at
from kvpop_vllm.kernels.triton.online_topk import held_long


@triton.jit
def gather(tokens, new_score, cache, numbers, h, first, left, score, rows, P: tl.constexpr, ROWS: tl.constexpr):
    """Copy key and value of the token that leaves the window with each tail row of a block; 0 where there is none."""
    k, v = tokens
    r = numbers.request.to(tl.int64)
    row, index = first + tl.arange(0, ROWS), first + tl.arange(0, ROWS) - numbers.window
    leaving = (row < numbers.length) & (numbers.start + index >= numbers.sinks)
    row += h * rows + numbers.row
    in_ring, is_new = leaving & (index < 0), leaving & (index >= 0)
    token = numbers.token.to(tl.int64) + numbers.inside + tl.where(is_new, index, 0)
    slot = numbers.sinks + tl.where(in_ring, numbers.start + index - numbers.sinks, 0) % numbers.window
    old, left = row_at(cache, r, h, slot, P), left + 2 * row * P.size
    store_rows(left, load_rows(cache.k + old, in_ring, P), ~is_new, P)
    store_rows(left, load_rows(element_at(k, token, h), is_new, P), is_new, P)
    store_rows(left + P.size, load_rows(cache.v + old, in_ring, P), ~is_new, P)
    store_rows(left + P.size, load_rows(element_at(v, token, h), is_new, P), is_new, P)
    if new_score is not None:
        in_word = tl.load(cache.score + word_at(cache, r, h, slot, P), mask=in_ring, other=0.0)
        computed = tl.load(new_score + h * rows + numbers.row + index, mask=is_new, other=0.0)
        tl.store(score + row, tl.where(in_ring, in_word, computed))


@triton.jit(do_not_specialize=["rows"])
def _gather(
    tokens,  # k, v [T, H, D]
    new_score,  # [H, P] float32, scores computed at insertion, or None
    cache, segments, blocks,
    left, score,  # [H, P, 2 D], and, if there are scores computed at insertion, [H, P] float32
    rows,
    P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Run :func:`gather`. Grid: 64 tail rows, H. 67 MB, read and written: 19 us."""
    numbers, first = block_of(segments, blocks, tl.program_id(0))
    gather(tokens, new_score, cache, numbers, tl.program_id(1).to(tl.int64), first, left, score, rows, P, ROWS)


@triton.jit(do_not_specialize=["rows", "entries"])
def _enter(
    leaving_score,  # [H, P] float32, or None if all are 0
    cache, segments, topk,
    score, position,  # [H, E] float32 and int32
    rows, entries,
    P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List score and position of the candidates: those in long-range slots, then those that leave the window.

    Grid: 1,024 entries, segments, H. 1.6 MB: 0.4 us, less than a launch.
    """
    s, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    numbers = numbers_of(segments, s)
    r, count = numbers.request.to(tl.int64), numbers.filled + numbers.leaving
    entry = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_slot = entry < held_long(numbers, topk + s * tl.num_programs(2) + h)
    arrives = (entry >= numbers.filled) & (entry < count)
    word = word_at(cache, r, h, tl.where(in_slot, numbers.sinks + numbers.window + entry, 0), P)
    index = numbers.length - count + entry
    value = tl.where(arrives, 0.0, float("-inf"))
    if leaving_score is not None:
        value = tl.load(leaving_score + h * rows + numbers.row + index, mask=arrives, other=float("-inf"))
    value = tl.where(in_slot, tl.load(cache.score + word, mask=in_slot, other=0.0), value)
    token = tl.where(arrives, numbers.first + numbers.start + index - numbers.window, -1)
    token = tl.where(in_slot, tl.load(cache.position + word, mask=in_slot, other=0), token)
    place = h * entries + numbers.entry + entry
    tl.store(score + place, value, mask=entry < count)
    tl.store(position + place, token, mask=entry < count)


@triton.jit(do_not_specialize=["rows", "keys", "entries"])
def _settle(
    leaves,  # [H, E] int32, eviction times
    segments, topk,
    free,  # [H, E] int32, workspace
    gone,  # [H, N] int32, eviction times of keys, LAST where nothing is written
    slot_of,  # [H, P] int32, slot of the token that leaves the window, -1 where nothing is written
    rows, keys, entries,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the slots of the retained newcomers of a segment and a head, and write the eviction times of keys.

    Long-range tokens keep their slots. Newcomers take free slots, the oldest one the first slot.

    Grid: segments, H. 1.2 MB in 12 blocks, one after another: about 10 us.
    """
    s, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    numbers = numbers_of(segments, s)
    topk += s * tl.num_programs(1) + h
    in_use, first_long = held_long(numbers, topk), numbers.sinks + numbers.window
    room = tl.minimum(numbers.filled, tl.load(topk))
    leaves += h * entries + numbers.entry
    free += h * entries + numbers.entry
    gone += h * keys + numbers.key
    slot_of += h * rows + numbers.row
    vacancies = 0
    for start in range(0, numbers.filled, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        until = tl.load(leaves + entry, mask=entry < in_use, other=0)
        vacant = ((until != LAST) & (entry < room)).to(tl.int32)
        tl.store(free + vacancies + tl.cumsum(vacant, 0) - 1, first_long + entry, mask=vacant > 0)
        tl.store(gone + first_long + entry, until, mask=(entry < numbers.filled) & (first_long + entry < numbers.used))
        vacancies += tl.sum(vacant, 0)
    tl.debug_barrier()
    placed = 0
    for start in range(0, numbers.leaving, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        inside, index, window = entry < numbers.leaving, numbers.length - numbers.leaving + entry, numbers.window
        until = tl.load(leaves + numbers.filled + entry, mask=inside, other=0)
        stays = (until == LAST).to(tl.int32)
        place = tl.load(free + placed + tl.cumsum(stays, 0) - 1, mask=stays > 0, other=-1)
        tl.store(slot_of + index, place, mask=inside)
        key = numbers.used + index - window
        key = tl.where(index < window, numbers.sinks + (numbers.start + index - window - numbers.sinks) % window, key)
        tl.store(gone + key, until, mask=inside)
        placed += tl.sum(stays, 0)


@triton.jit
def _put(cache, r, h, slot, k, v, score, position, written, P: tl.constexpr):
    """Write tokens to slots; the position word of slot 0 has another use."""
    slot = tl.where(written, slot, 0)
    row, word = row_at(cache, r, h, slot, P), word_at(cache, r, h, slot, P)
    store_rows(cache.k + row, load_rows(k, written, P), written, P)
    store_rows(cache.v + row, load_rows(v, written, P), written, P)
    tl.store(cache.score + word, score, mask=written)
    tl.store(cache.position + word, position, mask=written & (slot > 0))


@triton.jit(do_not_specialize=["rows"])
def _store(
    tokens, new_score,
    left, score,  # [H, P, 2 D], [H, P] of the tokens that leave the window; None if all scores are 0
    slot_of,  # [H, P]
    cache, segments, blocks,
    right,  # [R, H] int32, 0 if the step does not start where the cache ends
    rows,
    P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a block's new tokens and newcomers to their slots, and the number of tokens seen.

    Grid: 64 tail rows, H. At most 34 MB, B tokens a head read and written: 9 us.
    """
    k, v = tokens
    numbers, first = block_of(segments, blocks, tl.program_id(0))
    h, r = tl.program_id(1).to(tl.int64), numbers.request.to(tl.int64)
    begin, length, index = numbers.first, numbers.length, first + tl.arange(0, ROWS)
    good = tl.load(right + r * tl.num_programs(1) + h) != 0
    present, row, t = index < tl.where(good, length, 0), h * rows + numbers.row + index, numbers.start + index
    token = numbers.token.to(tl.int64) + numbers.inside + index
    new = present & ((t < numbers.sinks) | (index >= length - numbers.window))
    inserted = tl.zeros([ROWS], tl.float32)
    if new_score is not None:
        inserted = tl.load(new_score + row, mask=new, other=0.0)
    slot, k, v = ring_slot(t, numbers.sinks, numbers.window), element_at(k, token, h), element_at(v, token, h)
    _put(cache, r, h, slot, k, v, inserted, begin + t, new, P)
    slot = tl.load(slot_of + row, mask=present, other=-1)
    moves, left = present & (slot >= 0), left + 2 * row * P.size
    moved = tl.zeros([ROWS], tl.float32)
    if score is not None:
        moved = tl.load(score + row, mask=moves, other=0.0)
    _put(cache, r, h, slot, left, left + P.size, moved, begin + t - numbers.window, moves, P)
    tokens_seen = begin + numbers.start + length
    tl.store(cache.position + word_at(cache, r, h, 0, P), tokens_seen, mask=first < tl.where(good, 1, 0))
