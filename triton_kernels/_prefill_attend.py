"""Attention of a piece's queries to protected prefixes, slots and each other, under evictions.

The keys that a block of queries sees are listed first: no other one is loaded, and an address follows from one load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2
from kvpop_vllm.kernels.triton._launch import DIRECT
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, store_rows
from kvpop_vllm.kernels.triton._prefill_plan import Piece, block_of
from kvpop_vllm.kernels.triton._serving_pages import element_at, page_of
from kvpop_vllm.kernels.triton._softmax import add_keys, add_sinks, nothing_yet
from kvpop_vllm.kernels.triton._tiles import PREFILL, tile_of

LISTED = 1024  # keys that are examined together when lists are built
LIST_BYTES = 256 << 20  # memory of the lists that exist at the same time


@triton.jit
def _append(lists, room, count, place, until, visible):
    """Append the places and eviction times of visible keys to a list of ``count`` keys, and return their new number."""
    flags = visible.to(tl.int32)
    entry = lists + count + tl.cumsum(flags, 0) - 1
    tl.store(entry, place, mask=visible)
    tl.store(entry + room, until, mask=visible)
    return count + tl.sum(flags, 0)


@triton.jit(do_not_specialize=["skipped", "keys", "room"])
def _list_keys(
    gone,  # [H, N] int32: index of the first query that does not see a key
    cache, segments, blocks,
    lists,  # [H, query blocks of this launch, 2, room] int32: places, and eviction times
    counts,  # [H, query blocks of this launch, 2] int32: slots, and slots and new tokens
    skipped, keys, room,
    P: tl.constexpr, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List the slots that some query of a block sees, by their number in the cache, then new tokens, by their index.

    The launch covers the blocks from ``skipped`` on.

    Grid: 32 queries, H. 68 MB of lists, eviction times from the L2 cache: 19 us.
    """
    h = tl.program_id(1).to(tl.int64)
    row = h * tl.num_programs(0) + tl.program_id(0)
    numbers, first = block_of(segments, blocks, skipped + tl.program_id(0))
    first -= numbers.inside
    gone += h * keys + numbers.key
    lists += row * 2 * room
    count = 0
    if cache.table is not None:
        for start in range(0, numbers.used, WIDTH):
            slot = start + tl.arange(0, WIDTH)
            until = tl.load(gone + slot, mask=slot < numbers.used, other=0)
            visible = (until > first) & (slot < numbers.used)
            page = page_of(
                cache, numbers.request.to(tl.int64), h, P.state_pages + tl.where(visible, slot, 0) // P.slots
            )
            count = _append(lists, room, count, page.to(tl.int32) * P.slots + slot % P.slots, until, visible)
    tl.store(counts + 2 * row, count)
    end = tl.minimum(numbers.length, first + BLOCK_Q)
    for start in range(0, end, WIDTH):
        index = start + tl.arange(0, WIDTH)
        inside = index < end
        until = tl.load(gone + numbers.used + index, mask=inside, other=0)
        visible = (until > first) & inside
        count = _append(lists, room, count, index, until, visible)
    tl.store(counts + 2 * row + 1, count)


@triton.jit
def listed(lists, room, start, end, BLOCK: tl.constexpr):
    """Return the places and eviction times of a block of a list, and a mask of those before its ``end``."""
    entry = start + tl.arange(0, BLOCK)
    inside = entry < end
    return tl.load(lists + entry, mask=inside, other=0), tl.load(lists + room + entry, mask=inside, other=0), inside


@triton.jit(do_not_specialize=["skipped", "room"])
def _attend_keys(
    q, tokens,  # [T, Hq, D]; k, v [T, H, D]
    cache, prefix, segments, blocks, lists, counts, skipped, room,
    right,  # [R, H] int32, 0 if the step does not start where the cache ends
    out, lse, scale,  # [T, Hq, D] and [T, Hq]
    sink_logits,  # [Hq] float32, of attention sinks, or None
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, for all query heads of a KV head, in ROWS rows.

    Grid: 32 queries, H. 0.55 TFLOP: 1.1 ms, 0.8 ms in training; keys and values come from the L2 cache.
    """
    k, v = tokens
    h, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    numbers, first = block_of(segments, blocks, skipped + tl.program_id(0))
    r, row = numbers.request.to(tl.int64), tl.arange(0, ROWS)
    query, head = first + row % BLOCK_Q, h * P.group + row // BLOCK_Q
    queries = tl.minimum(first + BLOCK_Q, numbers.inside + numbers.length)
    present = (query < queries) & (row < BLOCK_Q * P.group)
    place = (numbers.token + query).to(tl.int64)
    rows = load_rows(element_at(q, place, head), present, P)
    if P.wide:
        rows = rows.to(tl.float32)
    sums = nothing_yet(ROWS, P.padded)
    if prefix.table is not None:
        position = numbers.position + query
        end = tl.minimum(numbers.first, numbers.position + queries)
        for start in range(0, end, BLOCK_K):
            t = start + tl.arange(0, BLOCK_K)
            inside = t < end
            page = page_of(prefix, r, h, tl.where(inside, t // P.slots, 0))
            key = page * prefix.rows + h * prefix.rows_head + t % P.slots * P.size
            bias = None
            if prefix.score is not None:
                words = prefix.score + page * prefix.words + h * prefix.words_head + t % P.slots
                bias = tl.load(words, mask=t < tl.minimum(numbers.biased, end), other=0.0)
            visible = inside[None, :] & (t[None, :] <= position[:, None])
            _, sums = add_keys(prefix.k + key, prefix.v + key, inside, bias, visible, rows, scale, sums, P)
    query -= numbers.inside
    list_of = h * tl.num_programs(0) + tl.program_id(0)
    lists += list_of * 2 * room
    slots, count = tl.load(counts + 2 * list_of), tl.load(counts + 2 * list_of + 1)
    if cache.table is not None:
        for start in range(0, slots, BLOCK_K):
            slot, until, inside = listed(lists, room, start, slots, BLOCK_K)
            slot = slot.to(tl.int64)
            key = slot // P.slots * cache.rows + h * cache.rows_head + slot % P.slots * P.size
            visible = query[:, None] < until[None, :]
            _, sums = add_keys(cache.k + key, cache.v + key, inside, None, visible, rows, scale, sums, P)
    for start in range(slots, count, BLOCK_K):
        index, until, inside = listed(lists, room, start, count, BLOCK_K)
        key = (numbers.token + numbers.inside + index).to(tl.int64)
        visible = (index[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
        keys, values = element_at(k, key, h), element_at(v, key, h)
        _, sums = add_keys(keys, values, inside, None, visible, rows, scale, sums, P)
    if sink_logits is not None:
        sums = add_sinks(sink_logits + head, present, sums)
    top, total, acc = sums
    total = tl.where(present, total, 1.0)  # every query sees itself
    good = tl.load(right + r * heads + h) != 0
    place = place * heads * P.group + head  # index in [T, Hq]
    store_rows(out + place * P.size, tl.where(good, acc / total[:, None], float("nan")), present, P)
    tl.store(lse + place, tl.where(good, (top + tl.log2(total)) * LN2, float("nan")), mask=present)


def block_rows(config, tile) -> tuple[int, int]:
    """Return the rows of a block of queries with all query heads of a KV head, and the queries of it."""
    rows = max(tile.rows, triton.next_power_of_2(config.group))
    return rows, rows // config.group


class Blocks(NamedTuple):
    """Blocks of queries and keys of a program, and options of its launch."""

    rows: int
    queries: int
    keys: int
    options: dict[str, int]


def blocks_of(config) -> Blocks:
    """Return the blocks of attention of a kind of heads."""
    tile = tile_of(PREFILL, config.wide, config.size)
    return Blocks(*block_rows(config, tile), tile.keys, {"num_warps": tile.warps, "num_stages": tile.stages})


def key_lists(piece: Piece, config, cache, gone, block_q: int, launch=DIRECT) -> Iterator[tuple]:
    """List what blocks of ``block_q`` queries see, as many of them as memory allows at a time.

    Yield the grid of these blocks, and what a kernel takes of the lists: blocks, lists, counts, first block and a
    list's room.
    """
    (heads, _), blocks, room = gone.shape, piece.blocks(block_q), min(piece.most_keys, piece.most_slots + block_q)
    count = blocks.shape[0]
    if not piece.keys:  # all tokens are protected
        counts = piece.no_counts(count)
        yield (count, heads), (blocks, counts, counts, 0, 0)
        return
    batch = min(count, max(1, LIST_BYTES // (8 * heads * room)))
    lists, counts = (
        launch.empty(heads, batch, *sizes, dtype=torch.int32, device=gone.device) for sizes in ((2, room), (2,))
    )
    for skipped in range(0, count, batch):
        grid = min(batch, count - skipped), heads
        arguments = gone, cache, piece.segments, blocks, lists, counts, skipped, piece.keys, room
        launch(_list_keys, grid, arguments, (config, block_q, LISTED), num_warps=4)
        yield grid, (blocks, lists, counts, skipped, room)


def attend(
    piece: Piece, config, blocks: Blocks, q, tokens, cache, prefix, gone, right, scale, out, lse, sink_logits=None,
    launch=DIRECT,
) -> None:  # fmt: skip
    """Compute softmax attention of a piece's queries ``q [T, Hq, D]`` to what each of them sees, by ``gone``.

    The other arguments are those of the kernels, and ``launch`` of :mod:`_launch`; ``out`` and ``lse`` are written.
    """
    constants = config, blocks.rows, blocks.queries, blocks.keys
    for grid, listed in key_lists(piece, config, cache, gone, blocks.queries, launch):
        arguments = q, tokens, cache, prefix, piece.segments, *listed, right, out, lse, scale, sink_logits
        launch(_attend_keys, grid, arguments, constants, **blocks.options)
