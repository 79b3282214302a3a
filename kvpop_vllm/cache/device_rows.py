"""Decode rows at fixed addresses on a device that the host must not wait for.

A CUDA graph that is recorded with them serves every later step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.cache.ranks import Shares
from kvpop_vllm.cache.step import DecodeRows
from kvpop_vllm.requests import KERNELS_TAKE, NUMBERS, RequestSlots

PADDING = -1
"""Position of a row of padding: nothing is read or written for it."""
NULL_BLOCK = 0
"""Block that belongs to no request."""


def leading_decodes(counts: Sequence[int]) -> int:
    """Return the number of leading requests that are decoded: those of one token each, or all if none has more.

    Requests without tokens are padding of a captured batch, and are decoded too. A request of one token after longer
    ones is a chunk, because decode rows must have the indices of their tokens.
    """
    if max(counts, default=0) <= 1:
        return len(counts)
    return next(i for i, count in enumerate(counts) if count != 1)


class DeviceRows:
    """Tensors of the requests decoded in a step, allocated once and filled before each step.

    Args:
        layout: page layout of the layers.
        default: slots of a request that asks for nothing.
        capacity: largest number of requests of a step.
        columns: largest number of blocks of a request's state and tail.
        shares: budgets of all heads if they are unequal, else None.
        device: device of all tensors.
        longest: most protected tokens of a request.

    Attributes:
        numbers: ``[capacity]`` for each name of :data:`kvpop_vllm.requests.NUMBERS`; budgets ``[capacity, H]`` int32.
        table: ``[capacity, columns]`` int32, blocks of each request's state and tail, else :data:`NULL_BLOCK`.
        positions: ``[capacity]`` int64, :data:`PADDING` in rows of padding.
        prefix_table: ``[capacity, F]`` int32, prefix blocks of each request and the blocks after them.
        token_blocks: ``[capacity]`` int64, block of the new token if it is protected, else :data:`NULL_BLOCK`.
        token_slots: ``[capacity]`` int64, slot of the new token if it is protected, else 0.
    """

    def __init__(
        self,
        layout: PageLayout,
        default: RequestSlots,
        capacity: int,
        columns: int,
        shares: Shares | None,
        device: torch.device | str,
        longest: int = 0,
    ):
        self.layout, self.shares, self.protects = layout, shares, longest > 0
        self.numbers = {
            name: torch.full((capacity,), getattr(default, name) or 0, dtype=getattr(torch, dtype), device=device)
            for name, dtype in NUMBERS.items()
        }
        self.numbers["budget"] = self.numbers["budget"].unsqueeze(1).repeat(1, layout.num_kv_heads)
        self.table = torch.full((capacity, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((capacity,), PADDING, dtype=torch.int64, device=device)
        self.token_blocks, self.token_slots = torch.zeros(2, capacity, dtype=torch.int64, device=device)
        width = cdiv(longest, layout.block_slots)
        self.prefix_table = torch.full((capacity, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self._columns = torch.arange(columns, dtype=torch.int32, device=device)
        self._rows = torch.arange(capacity, device=device)

    def fill(
        self,
        rows: int,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        sent: Mapping[str, torch.Tensor] = {},  # noqa: B006
    ) -> None:
        """Fill the first ``rows`` rows, with operations on the device only.

        A row is padding if the engine gives it no length, if its token has no slot (-1), or if it has no
        block. The block is the prefix block of a protected token, otherwise the block of the first slot of
        the tail. Such rows occur after the requests of a captured batch, in dummy runs, and in warm-ups with
        blocks for keys and values only.

        Args:
            rows: number of rows to fill.
            lengths: ``[>= rows]`` int32, length of each request with the new token.
            block_table: ``[>= rows, W]`` int32, blocks of each request's prefix, state and tail.
            slot_mapping: ``[>= rows]`` int64, -1 if a token has no slot; other values are not used.
            sent: ``[n]`` each, numbers of the step's requests by name, in pinned CPU memory. Numbers that are not
                sent keep their values.
        """
        for name, values in sent.items():
            self.numbers[name][: len(values)].copy_(values, non_blocking=True)
        positions, newest, prefixes = self.positions[:rows], lengths[:rows] - 1, self.numbers["prefix"][:rows]
        tails = self._tails(block_table[:rows], prefixes)
        width, block = tails.shape[1], tails[:, self.layout.state_blocks]
        if self.protects:
            inside, block = self._fill_prefixes(newest, block_table[:rows], block)
        real = (slot_mapping[:rows] >= 0) & (block != NULL_BLOCK)
        positions.copy_(torch.where(real, newest, PADDING))
        # below 0 in rows of padding, which then have no blocks
        since = positions - prefixes if self.protects else positions
        in_use = self._columns[:width] < self._blocks(since).unsqueeze(1)
        self.table[:rows, :width].copy_(torch.where(in_use, tails, NULL_BLOCK))
        if self.protects:
            inside &= positions >= 0
            self.token_blocks[:rows].copy_(torch.where(inside, block, NULL_BLOCK))
            self.token_slots[:rows].copy_(torch.where(inside, newest % self.layout.block_slots, 0))

    def _fill_prefixes(
        self, newest: torch.Tensor, table: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill ``prefix_table`` and find the blocks of protected new tokens.

        Args:
            newest: ``[R]``, positions of the new tokens.
            table: ``[R, W]``, block table of the engine.
            block: ``[R]``, blocks of the tails' first slots.

        Returns:
            Which tokens are protected, ``[R]`` booleans, and ``block`` with their prefix blocks in place,
            ``[R]``.
        """
        width = min(self.prefix_table.shape[1], table.shape[1])
        self.prefix_table[: len(table), :width].copy_(table[:, :width])
        inside, columns = newest < self.numbers["prefix"][: len(table)], newest // self.layout.block_slots
        # rows of padding have position -1
        prefix_blocks = table.gather(1, columns.clamp(0, table.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        return inside, torch.where(inside, prefix_blocks, block)

    def _tails(self, table: torch.Tensor, prefixes: torch.Tensor) -> torch.Tensor:
        """Return the blocks ``[R, columns]`` after the prefix blocks of requests with ``prefixes [R]`` tokens.

        Beyond the end of a row, its last entry is repeated.
        """
        if not self.protects:
            return table[:, : self.table.shape[1]]
        size = self.layout.block_slots
        columns = (prefixes + size - 1).unsqueeze(1) // size + self._columns
        return table.gather(1, columns.clamp_max(table.shape[1] - 1))

    def _blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return an upper bound ``[R]`` of the blocks for state and slots of ``tokens + 1`` tokens.

        It is 0 where ``tokens`` is negative.
        """
        size = self.layout.block_slots
        counts = {self.numbers["budget"][: len(tokens), 0]: 1} if self.shares is None else self.shares.counts
        pages = [
            (((tokens + 1).clamp_max(budget) + size - 1) // size + self.layout.state_blocks) * many
            for budget, many in counts.items()
        ]
        heads = sum(counts.values())
        # all heads share the regions of a block, so that only the sum is rounded up
        blocks = (sum(pages) + heads - 1) // heads if heads > 1 else pages[0]
        return torch.where(tokens < 0, 0, blocks)

    def view(self, rows: int, drawn: bool, biased: bool) -> DecodeRows:
        """Return the first ``rows`` rows.

        Args:
            rows: number of decode rows.
            drawn: True if scores are drawn.
            biased: True if requests may begin with cartridges.
        """
        numbers = {name: self.numbers[name][:rows] for name in KERNELS_TAKE if drawn or name != "seed"}
        prefix = writes = None
        if self.protects:
            writes = self._rows[:rows], self.token_blocks[:rows], self.token_slots[:rows]
            made_slots = self.numbers["made_slots"] if biased else None
            prefix = Prefix(None, self.prefix_table, self.numbers["prefix"], made_slots).of(slice(0, rows))
        return DecodeRows(slice(0, rows), self.table[:rows], self.positions[:rows], numbers, (), prefix, writes)
