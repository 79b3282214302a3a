"""Triton ``fill_rows``: what the layers of a decode step read of their requests, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvpop_vllm.cache.device_rows import NULL_BLOCK, PADDING, DeviceRows
from kvpop_vllm.cache.pages import cdiv

COLUMNS = 128
NULL, NONE = tl.constexpr(NULL_BLOCK), tl.constexpr(PADDING)


@dataclass(frozen=True)
class Sizes:
    """Compile-time constants of rows.

    Attributes:
        slots: N.
        state_blocks: blocks of a state.
        heads: H.
        columns, width: columns of the tables of tails and of prefixes.
        steps: 1 + m, lanes of a request's tokens are a power of two.
        compresses: True if prompts are compressed at their end.
        queries: last queries of a prompt that are stored then.
        adaptive: True if the heads of a layer divide their slots.
        budgets: number of unequal budgets, 1 if heads have equal ones.
    """

    slots: int
    state_blocks: int
    heads: int
    columns: int
    width: int
    steps: int
    compresses: bool
    queries: int
    adaptive: bool
    budgets: int

    @property
    def lanes(self) -> int:
        """Lanes that hold the tokens of a request."""
        return triton.next_power_of_2(self.steps)

    @property
    def budget_lanes(self) -> int:
        """Lanes that hold all budgets."""
        return triton.next_power_of_2(self.budgets)


class Rows(NamedTuple):
    """Tensors of :class:`kvpop_vllm.cache.device_rows.DeviceRows`, contiguous; those that are not used are None."""

    prefix: Any
    shift: Any
    left: Any
    budget: Any
    shared_budgets: Any
    table: Any
    positions: Any
    compressed: Any
    prefix_table: Any
    tokens: Any
    drafts: Any
    written: Any
    token_blocks: Any
    token_slots: Any


@triton.jit
def _blocks(tokens, P: tl.constexpr):
    """Return the number of blocks that hold so many tokens."""
    return (tokens + P.slots - 1) // P.slots


@triton.jit
def _entries(table, width, columns):
    """Return entries of a row of the engine's table, its last one beyond its end."""
    return tl.load(table + tl.minimum(tl.maximum(columns, 0), width - 1))


@triton.jit
def _blocks_in_use(rows, r, since, P: tl.constexpr):
    """Return the blocks of the state and slots of a request whose tail has ``since + 1`` tokens."""
    if rows.shared_budgets is None:
        pages = _blocks(tl.minimum(since + 1, tl.load(rows.budget + r * P.heads).to(tl.int64)), P) + P.state_blocks
    else:
        i = tl.arange(0, P.budget_lanes)
        budget = tl.load(rows.shared_budgets + i, mask=i < P.budgets, other=0)
        heads = tl.load(rows.shared_budgets + P.budgets + i, mask=i < P.budgets, other=0)
        pages = tl.sum((_blocks(tl.minimum(since + 1, budget), P) + P.state_blocks) * heads, 0)
        # all heads share the regions of a block, so that only the sum is rounded up
        all_heads = tl.sum(heads, 0)
        pages = (pages + all_heads - 1) // all_heads
    return tl.where(since < 0, 0, pages)


@triton.jit(
    do_not_specialize=["total", "decodes", "width", "stride"],
    do_not_specialize_on_alignment=["lengths", "table", "slot_mapping", "firsts"],
)
def _fill(
    rows,
    lengths,  # [R] int32
    table, stride, width,  # [R, W] int32
    slot_mapping, total,  # [T] int64
    firsts, decodes,  # [R + 1] int32, or None
    P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fill 128 columns of a row's tables, and its numbers. Grid: R, columns. 4 KB for 256 tail blocks: about 3 us."""
    r, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    table += r * stride
    prefix, first, drafts, decoded = tl.load(rows.prefix + r), r, tl.full([], 0, tl.int64), r >= 0
    start, left = tl.load(lengths + r).to(tl.int64) - 1, tl.full([], 0, tl.int64)
    if firsts is not None:
        first = tl.load(firsts + r).to(tl.int64)
        count, decoded = tl.load(firsts + r + 1).to(tl.int64) - first, r < decodes
        start += 1 - count
        start = tl.where((count > 0) & (decoded | (start > prefix)), start, NONE)
        drafts = tl.where(decoded, count - 1, -1)
    if P.compresses:
        start -= tl.load(rows.shift + r)
        left = tl.load(rows.left + r)
    compressed = (left > 0) & (start >= prefix)
    tail = _blocks(prefix, P) + _blocks(left, P)
    step = tl.arange(0, P.lanes)
    position = start + step
    inside, block = position < prefix, _entries(table, width, tail + P.state_blocks)
    prefix_block = _entries(table, width, tl.maximum(position, 0) // P.slots)
    if P.width > 0:
        block = tl.where(start < prefix, _entries(table, width, tl.maximum(start, 0) // P.slots), block)
    real = (tl.load(slot_mapping + tl.minimum(first, total - 1)) >= 0) & (block != NULL)
    c = tl.where(real, start, NONE)
    drafts = tl.where(c < 0, -1, drafts)
    end = c + tl.maximum(drafts, 0)
    blocks = _blocks_in_use(rows, r, end - prefix, P)
    if P.adaptive:
        blocks = tl.where(compressed & (c >= 0), P.columns, blocks)
    if P.compresses:  # the query of a token that votes is stored
        blocks = tl.where((end < prefix) & (end - prefix >= -P.queries) & (c >= 0), P.state_blocks, blocks)
    entries = tl.where(column < blocks, _entries(table, width, tail + column), NULL)
    tl.store(rows.table + r * P.columns + column, entries, mask=column < P.columns)
    if P.width > 0:
        ahead = tl.where(compressed, _blocks(left, P), 0)  # before the blocks of slots that are made
        entries = _entries(table, width, ahead + column)
        tl.store(rows.prefix_table + r * P.width + column, entries, mask=column < P.width)
    if tl.program_id(1) == 0:
        tl.store(rows.positions + r, c)
        if P.compresses:
            tl.store(rows.compressed + r, compressed)
        if firsts is not None:
            tl.store(rows.tokens + r, first)
            tl.store(rows.drafts + r, drafts.to(tl.int32))
            if P.width > 0:
                inside = inside & (position <= end) & (c >= 0) & decoded
                to, used = r * P.steps + step, step < P.steps
                tl.store(rows.written + to, tl.where(inside, first + step, 0), mask=used)
                tl.store(rows.token_blocks + to, tl.where(inside, prefix_block, NULL).to(tl.int64), mask=used)
                tl.store(rows.token_slots + to, tl.where(inside, position % P.slots, 0), mask=used)


def fill_rows(rows: DeviceRows, count, lengths, block_table, slot_mapping, firsts=None, decodes=None):
    """Implement :func:`kvpop_vllm.kernels.ops.fill_rows`."""
    if not count:
        return
    layout, compression, budgets = rows.layout, rows.compression, rows.shared_budgets
    columns, width = rows.table.shape[1], rows.prefix_table.shape[1]
    sizes = Sizes(
        slots=layout.block_slots,
        state_blocks=layout.state_blocks,
        heads=layout.num_kv_heads,
        columns=columns,
        width=width,
        steps=1 + layout.drafts,
        compresses=compression is not None,
        queries=0 if compression is None else compression.queries,
        adaptive=compression is not None and compression.adaptive_head_budgets,
        budgets=1 if budgets is None else budgets.shape[1],
    )
    numbers = (rows.numbers[name] for name in ("prefix", "shift", "left", "budget"))
    tables = rows.table, rows.positions, rows.compressed, rows.prefix_table
    tensors = Rows(
        *numbers, budgets, *tables, rows.tokens, rows.drafts, rows.written, rows.token_blocks, rows.token_slots
    )
    arguments = lengths, block_table, block_table.stride(0), block_table.shape[1], slot_mapping, len(slot_mapping)
    grid = count, cdiv(max(columns, width), COLUMNS)
    _fill[grid](tensors, *arguments, firsts, count if decodes is None else decodes, sizes, COLUMNS, num_warps=4)
