"""Attention of a piece's queries to keys with births and evictions.

The keys that a block of queries sees are listed first, so that no other key is loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._softmax import add_block
from kvpop_vllm.kernels.triton._tiles import PREFILL, tile_of

LISTED = 1024  # keys that are examined together when lists are built
LIST_BYTES = 64 << 20  # memory of the lists that exist at the same time


@triton.jit(do_not_specialize=["skipped", "held", "total", "room"])
def _list_keys(
    gone,  # [H, T] int32: index of the first query that does not see a key
    lists,  # [H, query blocks of this launch, room] int32
    counts,  # [H, query blocks of this launch] int32
    skipped, held, total, room,
    BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List the keys that some query of a block sees, in their order.

    The launch covers the blocks from ``skipped`` on.
    """
    h = tl.program_id(1).to(tl.int64)
    row = h * tl.num_programs(0) + tl.program_id(0)
    first = (skipped + tl.program_id(0)) * BLOCK_Q
    end = tl.minimum(total, held + first + BLOCK_Q)
    found = 0
    for start in range(0, end, WIDTH):
        key = start + tl.arange(0, WIDTH)
        seen = tl.load(gone + h * total + key, mask=key < end, other=0) > first
        flags = seen.to(tl.int32)
        tl.store(lists + row * room + found + tl.cumsum(flags, 0) - 1, key, mask=seen)
        found += tl.sum(flags, 0)
    tl.store(counts + row, found)


@triton.jit(do_not_specialize=["skipped", "held", "total", "room", "queries"])
def _attend_keys(
    q,  # [L, Hq, D]
    keys,  # [H, T, D]: retained tokens, then one token per query
    values, gone, lists, counts,
    out,  # [L, Hq, D]
    lse,  # [L, Hq]
    skipped, held, total, room, queries, scale, q_token, q_head,
    SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries, for all query heads of a KV head.

    ROWS is BLOCK_Q times GROUP, rounded up to a power of two.
    """
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    row, column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    query, head = (skipped + tl.program_id(0)) * BLOCK_Q + row % BLOCK_Q, h * GROUP + row // BLOCK_Q
    fits, present = column < SIZE, (query < queries) & (row < BLOCK_Q * GROUP)
    own = q + query[:, None].to(tl.int64) * q_token + head[:, None] * q_head + column[None, :]
    rows = tl.load(own, mask=present[:, None] & fits[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    keys += h * total * SIZE
    values += h * total * SIZE
    gone += h * total
    list_of = h * tl.num_programs(0) + tl.program_id(0)
    lists += list_of * room
    count = tl.load(counts + list_of)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(0, count, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        listed = entry < count
        key = tl.load(lists + entry, mask=listed, other=0)
        until = tl.load(gone + key, mask=listed, other=0)
        cells = key[:, None].to(tl.int64) * SIZE + column[None, :]
        inside = listed[:, None] & fits[None, :]
        block_k = tl.load(keys + cells, mask=inside, other=0.0)
        block_v = tl.load(values + cells, mask=inside, other=0.0)
        if WIDE:
            block_k, block_v = block_k.to(tl.float32), block_v.to(tl.float32)
        logits = tl.dot(rows, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2E)
        visible = (key - held)[None, :] <= query[:, None]
        visible = visible & (query[:, None] < until[None, :])
        logits = tl.where(visible, logits, float("-inf"))
        top, weight, acc = add_block(logits, block_v, top, weight, acc)
    weight = tl.where(present, weight, 1.0)  # every query sees itself
    acc = acc / weight[:, None]
    head += query.to(tl.int64) * heads  # index in [L, Hq]
    place = out + head[:, None] * SIZE + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=present[:, None] & fits[None, :])
    tl.store(lse + head, (top + tl.log2(weight)) * LN2, mask=present)


def attend(q, keys, values, gone, held, budget, scale, out, lse) -> None:
    """Compute softmax attention of queries to the keys that have been born and not evicted.

    Args:
        q: ``[L, Hq, D]``.
        keys, values: ``[H, held + L, D]``, contiguous; key ``held + i`` is born with query i.
        gone: ``[H, held + L]`` int32, index of the first query that does not see a key.
        held: number of retained tokens before the queries.
        budget: largest number of keys that a query sees.
        scale: factor on q . k.
        out: ``[L, Hq, D]``, contiguous; written.
        lse: ``[L, Hq]`` float32, contiguous; written.
    """
    (queries, query_heads, size), (heads, total, _) = q.shape, keys.shape
    group, padded = query_heads // heads, max(16, triton.next_power_of_2(size))
    wide = q.dtype != keys.dtype or q.dtype == torch.float32
    tile = tile_of(PREFILL, wide, size)
    rows = max(tile.rows, triton.next_power_of_2(group))
    block_q = rows // group
    blocks, room = triton.cdiv(queries, block_q), min(total, budget + block_q)
    some = min(blocks, max(1, LIST_BYTES // (4 * heads * room)))
    lists = torch.empty(heads, some, room, dtype=torch.int32, device=q.device)
    counts = torch.empty(heads, some, dtype=torch.int32, device=q.device)
    for skipped in range(0, blocks, some):
        grid, sizes = (min(some, blocks - skipped), heads), (skipped, held, total, room)
        _list_keys[grid](gone, lists, counts, *sizes, BLOCK_Q=block_q, WIDTH=LISTED, num_warps=4)
        _attend_keys[grid](
            q, keys, values, gone, lists, counts, out, lse, *sizes, queries, scale, *q.stride()[:2],
            SIZE=size, PADDED=padded, GROUP=group, ROWS=rows, BLOCK_Q=block_q, BLOCK_K=tile.keys, WIDE=wide,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
