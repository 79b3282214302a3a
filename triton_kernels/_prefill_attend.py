"""Attention of a piece's queries to protected prefixes, slots and each other, under evictions.

The slots and new tokens that a block of queries sees are listed first, so that no other key is loaded, and a key's
address follows from one load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._prefill_plan import (
    BIASED,
    FIRST,
    HELD,
    INSIDE,
    KEY,
    LENGTH,
    POSITION,
    REQUEST,
    TOKEN,
    Piece,
    number,
)
from kvpop_vllm.kernels.triton._serving_pages import page_of
from kvpop_vllm.kernels.triton._softmax import add_block, in_base_2
from kvpop_vllm.kernels.triton._tiles import PREFILL, tile_of

LISTED = 1024  # keys that are examined together when lists are built
LIST_BYTES = 64 << 20  # memory of the lists that exist at the same time


@triton.jit(do_not_specialize=["skipped", "keys", "room"])
def _list_keys(
    gone,  # [H, N] int32: index of the first query that does not see a key
    cache, segments, blocks,
    lists,  # [H, query blocks of this launch, 2, room] int32: places, and eviction times
    counts,  # [H, query blocks of this launch, 2] int32: slots, and slots and new tokens
    skipped, keys, room,
    P: tl.constexpr, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List the slots that some query of a block sees, by their number in the cache, then its new tokens, by their index.

    The launch covers the blocks from ``skipped`` on.
    """
    h = tl.program_id(1).to(tl.int64)
    row = h * tl.num_programs(0) + tl.program_id(0)
    at = blocks + 2 * (skipped + tl.program_id(0))
    s = tl.load(at)
    r, held, first = (
        number(segments, s, REQUEST),
        number(segments, s, HELD),
        tl.load(at + 1) - number(segments, s, INSIDE),
    )
    gone += h * keys + number(segments, s, KEY)
    lists += row * 2 * room
    found = 0
    for start in range(0, held, WIDTH):
        slot = start + tl.arange(0, WIDTH)
        until = tl.load(gone + slot, mask=slot < held, other=0)
        seen = (until > first) & (slot < held)
        flags = seen.to(tl.int32)
        place = found + tl.cumsum(flags, 0) - 1
        page = page_of(cache, r.to(tl.int64), h, P.state_pages + tl.where(seen, slot, 0) // P.slots)
        tl.store(lists + place, page.to(tl.int32) * P.slots + slot % P.slots, mask=seen)
        tl.store(lists + room + place, until, mask=seen)
        found += tl.sum(flags, 0)
    tl.store(counts + 2 * row, found)
    for start in range(0, tl.minimum(number(segments, s, LENGTH), first + BLOCK_Q), WIDTH):
        index = start + tl.arange(0, WIDTH)
        inside = index < tl.minimum(number(segments, s, LENGTH), first + BLOCK_Q)
        until = tl.load(gone + held + index, mask=inside, other=0)
        seen = (until > first) & inside
        flags = seen.to(tl.int32)
        place = found + tl.cumsum(flags, 0) - 1
        tl.store(lists + place, index, mask=seen)
        tl.store(lists + room + place, until, mask=seen)
        found += tl.sum(flags, 0)
    tl.store(counts + 2 * row + 1, found)


@triton.jit
def _add_keys(
    k, v, k_row, v_row, bias, there, visible, rows, scale, top, weight, acc,
    SIZE: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the keys and values at some offsets to a running softmax.

    Args:
        bias: ``[keys]``, natural logarithms that are added to the logits, or None.
        visible: ``[rows, keys]``.
    """
    column = tl.arange(0, PADDED)
    inside = there[:, None] & (column < SIZE)[None, :]
    block_k = tl.load(k + k_row[:, None] + column[None, :], mask=inside, other=0.0)
    block_v = tl.load(v + v_row[:, None] + column[None, :], mask=inside, other=0.0)
    if WIDE:
        block_k, block_v = block_k.to(tl.float32), block_v.to(tl.float32)
    logits = tl.dot(rows, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2E)
    if bias is not None:
        logits += in_base_2(bias)[None, :]
    return add_block(tl.where(visible, logits, float("-inf")), block_v, top, weight, acc)


@triton.jit(do_not_specialize=["skipped", "room"])
def _attend_keys(
    q,  # [T, Hq, D]
    tokens,  # k, v [T, H, D] and their strides between tokens and heads
    cache, before, segments, blocks, lists, counts, skipped, room,
    right,  # [R, H] int32, 0 if the step does not start where the cache ends
    out,  # [T, Hq, D]
    lse,  # [T, Hq]
    scale, q_token, q_head,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
    BIASES: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, for all query heads of a KV head.

    ROWS is BLOCK_Q times the number of query heads, rounded up to a power of two. If BIASES, protected tokens may have a
    bias.
    """
    k, v, k_token, k_head, v_token, v_head = tokens
    size: tl.constexpr = P.size
    padded: tl.constexpr = P.padded  # Triton 3.6 does not accept an attribute in a shape
    h, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at = blocks + 2 * (skipped + tl.program_id(0))
    s, first = tl.load(at), tl.load(at + 1)
    r, inside, token = (
        number(segments, s, REQUEST).to(tl.int64),
        number(segments, s, INSIDE),
        number(segments, s, TOKEN),
    )
    row, column = tl.arange(0, ROWS), tl.arange(0, padded)
    query, head = first + row % BLOCK_Q, h * P.group + row // BLOCK_Q
    fits = column < size
    queries = tl.minimum(first + BLOCK_Q, inside + number(segments, s, LENGTH))
    present = (query < queries) & (row < BLOCK_Q * P.group)
    place = (token + query).to(tl.int64)
    own = q + place[:, None] * q_token + head[:, None] * q_head + column[None, :]
    rows = tl.load(own, mask=present[:, None] & fits[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, padded], tl.float32)
    if P.protects:
        position = number(segments, s, POSITION) + query
        end = tl.minimum(number(segments, s, FIRST), number(segments, s, POSITION) + queries)
        pages = before.table + r * before.table_request
        if BIASES:
            biased = tl.minimum(number(segments, s, BIASED), end)
        for start in range(0, end, BLOCK_K):
            t = start + tl.arange(0, BLOCK_K)
            page = tl.load(pages + t // P.slots * before.table_page, mask=t < end, other=0).to(tl.int64)
            at_key = page * before.rows + h * before.rows_head + t % P.slots * size
            visible = (t < end)[None, :] & (t[None, :] <= position[:, None])
            bias = None
            if BIASES:
                words = before.bias + page * before.words + h * before.words_head + t % P.slots
                bias = tl.load(words, mask=t < biased, other=0.0)
            top, weight, acc = _add_keys(
                before.k, before.v, at_key, at_key, bias, t < end, visible,
                rows, scale, top, weight, acc, size, padded, WIDE,
            )  # fmt: skip
    query -= inside
    list_of = h * tl.num_programs(0) + tl.program_id(0)
    lists += list_of * 2 * room
    held, count = tl.load(counts + 2 * list_of), tl.load(counts + 2 * list_of + 1)
    for start in range(0, held, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        slot = tl.load(lists + entry, mask=entry < held, other=0).to(tl.int64)
        until = tl.load(lists + room + entry, mask=entry < held, other=0)
        at_key = slot // P.slots * cache.rows + h * cache.rows_head + slot % P.slots * size
        visible = query[:, None] < until[None, :]
        top, weight, acc = _add_keys(
            cache.k, cache.v, at_key, at_key, None, entry < held, visible,
            rows, scale, top, weight, acc, size, padded, WIDE,
        )  # fmt: skip
    for start in range(held, count, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        index = tl.load(lists + entry, mask=entry < count, other=0)
        until = tl.load(lists + room + entry, mask=entry < count, other=0)
        at_key = (token + inside + index).to(tl.int64)
        visible = (index[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
        top, weight, acc = _add_keys(
            k, v, at_key * k_token + h * k_head, at_key * v_token + h * v_head, None, entry < count, visible,
            rows, scale, top, weight, acc, size, padded, WIDE,
        )  # fmt: skip
    weight = tl.where(present, weight, 1.0)  # every query sees itself
    good = tl.load(right + r * heads + h) != 0
    acc = tl.where(good, acc / weight[:, None], float("nan"))
    head += place * heads * P.group  # index in [T, Hq]
    tl.store(
        out + head[:, None] * size + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=present[:, None] & fits[None, :],
    )
    tl.store(lse + head, tl.where(good, (top + tl.log2(weight)) * LN2, float("nan")), mask=present)


def block_rows(config, tile) -> tuple[int, int]:
    """Return the rows of a block of queries with all query heads of a KV head, and the queries of it."""
    rows = max(tile.rows, triton.next_power_of_2(config.group))
    return rows, rows // config.group


def key_lists(piece: Piece, config, cache, gone, block_q: int) -> Iterator[tuple]:
    """List what blocks of ``block_q`` queries see, as many of them as memory allows at a time.

    Yields:
        Grid of the blocks and KV heads; and what a kernel that reads the lists takes: blocks, lists, counts, the first block
        and the room of a list.
    """
    heads, blocks, room = len(gone), piece.blocks(block_q), min(piece.most_keys, piece.most_slots + block_q)
    some = min(len(blocks), max(1, LIST_BYTES // (8 * heads * room)))
    lists = torch.empty(heads, some, 2, room, dtype=torch.int32, device=gone.device)
    counts = torch.empty(heads, some, 2, dtype=torch.int32, device=gone.device)
    for skipped in range(0, len(blocks), some):
        grid = min(some, len(blocks) - skipped), heads
        _list_keys[grid](
            gone, cache, piece.segments, blocks, lists, counts, skipped, piece.keys, room,
            P=config, BLOCK_Q=block_q, WIDTH=LISTED, num_warps=4,
        )  # fmt: skip
        yield grid, (blocks, lists, counts, skipped, room)


def attend(piece: Piece, config, q, tokens, cache, before, gone, right, scale, out, lse) -> None:
    """Compute softmax attention of a piece's queries to what each of them sees.

    Args:
        piece: the piece.
        config: compile-time constants.
        q: ``[T, Hq, D]``.
        tokens: k and v ``[T, H, D]``, and their strides between tokens and heads.
        cache, before: pages of tails and prefixes, as kernels take them.
        gone: ``[H, N]`` int32, index of the first query that does not see a key.
        right: ``[R, H]`` int32; outputs are NaN where it is 0.
        scale: factor on q . k.
        out: ``[T, Hq, D]``, contiguous; written.
        lse: ``[T, Hq]`` float32, contiguous; written.
    """
    wide, protects = q.dtype != tokens[0].dtype or q.dtype == torch.float32, before.table is not None
    tile = tile_of(PREFILL, wide, config.size)
    rows, block_q = block_rows(config, tile)
    for grid, listed in key_lists(piece, config, cache, gone, block_q):
        _attend_keys[grid](
            q, tokens, cache, before, piece.segments, *listed, right, out, lse, scale, *q.stride()[:2],
            P=replace(config, protects=protects), ROWS=rows, BLOCK_Q=block_q, BLOCK_K=tile.keys, WIDE=wide,
            BIASES=before.bias is not None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
