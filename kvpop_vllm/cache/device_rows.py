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


def leading_decodes(counts: Sequence[int], longest: int = 1) -> int:
    """Return the number of leading requests that are decoded: those of up to ``longest`` tokens, or all if none has more.

    Requests without tokens are padding of a captured batch, and are decoded too. A request of few tokens after longer
    ones is a chunk, because without drafts decode rows must have the indices of their tokens.

    Args:
        counts: tokens of each request.
        longest: most tokens of a decoded request, ``1 + m``. What of them are drafts need not be known: the tokens of a
            short chunk are drafts that will all be accepted.
    """
    if max(counts, default=0) <= longest:
        return len(counts)
    return next(i for i, count in enumerate(counts) if not 1 <= count <= longest)


class DeviceRows:
    """Tensors of the requests decoded in a step, allocated once and filled before each step.

    With speculative decoding a request has up to m drafts after its first new token.

    Args:
        layout: page layout of the layers.
        default: slots of a request that asks for nothing.
        most: largest number of requests of a step.
        columns: largest number of blocks of a request's state and tail.
        shares: budgets of all heads if they are unequal, else None.
        device: device of all tensors.
        longest: most protected tokens of a request.

    Attributes:
        numbers: ``[most]`` each, by name of :data:`kvpop_vllm.requests.NUMBERS`; budgets are ``[most, H]`` int32.
        table: ``[most, columns]`` int32, blocks of each request's state and tail, else :data:`NULL_BLOCK`.
        positions: ``[most]`` int64, :data:`PADDING` in rows of padding.
        prefix_table: ``[most, F]`` int32, prefix blocks of each request and the blocks after them.
        tokens: ``[most]`` int64, index of the first new token of each request in the flat batch.
        drafts: ``[most]`` int32, number of new tokens after the first; -1 in rows of padding and of chunks.
        written: ``[most, 1 + m]`` int64, index of each new token that is protected, else 0 or that of the row.
        token_blocks: ``[most, 1 + m]`` int64, block of each new token that is protected, else :data:`NULL_BLOCK`.
        token_slots: ``[most, 1 + m]`` int64, slot of each new token that is protected, else 0.
    """

    def __init__(
        self,
        layout: PageLayout,
        default: RequestSlots,
        most: int,
        columns: int,
        shares: Shares | None,
        device: torch.device | str,
        longest: int = 0,
    ):
        self.layout, self.shares, self.protects = layout, shares, longest > 0
        self.numbers = {
            name: torch.full((most,), getattr(default, name) or 0, dtype=getattr(torch, dtype), device=device)
            for name, dtype in NUMBERS.items()
        }
        self.numbers["budget"] = self.numbers["budget"].unsqueeze(1).repeat(1, layout.num_kv_heads)
        self.table = torch.full((most, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((most,), PADDING, dtype=torch.int64, device=device)
        self._columns = torch.arange(columns, dtype=torch.int32, device=device)
        self._rows, self._steps = torch.arange(most, device=device), torch.arange(1 + layout.drafts, device=device)
        self.tokens, self.drafts = self._rows.clone(), torch.full((most,), -1, dtype=torch.int32, device=device)
        self.written, self.token_blocks, self.token_slots = self._rows.new_zeros(3, most, 1 + layout.drafts).unbind()
        if not layout.drafts:
            self.written.copy_(self._rows.unsqueeze(1))
        width = cdiv(longest, layout.block_slots)
        self.prefix_table = torch.full((most, width), NULL_BLOCK, dtype=torch.int32, device=device)

    def fill(
        self,
        rows: int,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        sent: Mapping[str, torch.Tensor] = {},  # noqa: B006
        firsts: torch.Tensor | None = None,
        decodes: int | None = None,
    ) -> None:
        """Fill the first ``rows`` rows, with operations on the device only.

        A row is padding if the engine gives it no length or no tokens, if its first token has no slot (-1), or if it
        has no block. The block is the prefix block of a protected token, otherwise the block of the first slot of
        the tail. Such rows occur after the requests of a captured batch, in dummy runs, and in warm-ups with
        blocks for keys and values only.

        Args:
            rows: number of rows to fill.
            lengths: ``[>= rows]`` int32, length of each request with the new tokens.
            block_table: ``[>= rows, W]`` int32, blocks of each request's prefix, state and tail.
            slot_mapping: ``[T]`` int64, -1 if a token has no slot; other values are not used.
            sent: ``[n]`` each, numbers of the step's requests by name, in pinned CPU memory. Numbers that are not
                sent keep their values.
            firsts: ``[> rows]`` int32, index of each request's first token, and their number; without speculative
                decoding None, which stands for a token of each request.
            decodes: number of rows that are decoded, by default all. The others have chunks that are computed after the
                step: of them, what is staged enters the cache.
        """
        for name, values in sent.items():
            self.numbers[name][: len(values)].copy_(values, non_blocking=True)
        prefixes, places, decoded = self.numbers["prefix"][:rows], slot_mapping[:rows], None
        starts, drafts = lengths[:rows] - 1, 0
        if firsts is not None:
            tokens, counts = firsts[:rows].long(), firsts[1 : rows + 1] - firsts[:rows]
            starts, decoded = lengths[:rows] - counts, self._rows[:rows] < (rows if decodes is None else decodes)
            places = slot_mapping[tokens.clamp_max(len(slot_mapping) - 1)]
            drafts = torch.where(decoded, counts - 1, -1)
            starts = torch.where((counts > 0) & (decoded | (starts > prefixes)), starts, PADDING)
        tails = self._tails(block_table[:rows], prefixes)
        width, block = tails.shape[1], tails[:, self.layout.state_blocks]
        if self.protects:
            inside, blocks = self._fill_prefixes(starts, block_table[:rows])
            block = torch.where(inside[:, 0], blocks[:, 0], block)
        real = (places >= 0) & (block != NULL_BLOCK)
        positions = self.positions[:rows].copy_(torch.where(real, starts, PADDING))
        ends = positions
        if firsts is not None:
            self.tokens[:rows].copy_(tokens)
            drafts = self.drafts[:rows].copy_(torch.where(positions < 0, -1, drafts))
            ends = positions + drafts.clamp_min(0)
        since = ends - prefixes if self.protects else ends
        in_use = self._columns[:width] < self._blocks(since).unsqueeze(1)
        self.table[:rows, :width].copy_(torch.where(in_use, tails, NULL_BLOCK))
        if self.protects:
            inside &= (self._steps <= ends.unsqueeze(1) - positions.unsqueeze(1)) & (positions >= 0).unsqueeze(1)
            if decoded is not None:
                inside &= decoded.unsqueeze(1)
                self.written[:rows].copy_(torch.where(inside, tokens.unsqueeze(1) + self._steps, 0))
            self.token_blocks[:rows].copy_(torch.where(inside, blocks, NULL_BLOCK))
            slots = (starts.unsqueeze(1) + self._steps) % self.layout.block_slots
            self.token_slots[:rows].copy_(torch.where(inside, slots, 0))

    def _fill_prefixes(self, starts: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill ``prefix_table`` and find the blocks of protected new tokens.

        Args:
            starts: ``[R]``, positions of the first new tokens.
            table: ``[R, W]``, block table of the engine.

        Returns:
            Which of the ``1 + m`` tokens from there on are protected, ``[R, 1 + m]`` booleans, and their prefix blocks,
            ``[R, 1 + m]``; other entries of these are of no use.
        """
        width = min(self.prefix_table.shape[1], table.shape[1])
        self.prefix_table[: len(table), :width].copy_(table[:, :width])
        positions = starts.unsqueeze(1) + self._steps
        inside = positions < self.numbers["prefix"][: len(table)].unsqueeze(1)
        columns = (positions // self.layout.block_slots).clamp(0, table.shape[1] - 1).long()
        return inside, table.gather(1, columns)

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
        blocks = (sum(pages) + heads - 1) // heads if heads > 1 else pages[0]
        return torch.where(tokens < 0, 0, blocks)

    def view(self, rows: int, drawn: bool, made: bool) -> DecodeRows:
        """Return the first ``rows`` rows.

        Args:
            rows: number of decode rows.
            drawn: True if scores are drawn.
            made: True if requests may begin with cartridges.
        """
        numbers = {name: self.numbers[name][:rows] for name in KERNELS_TAKE if drawn or name != "seed"}
        prefix = writes = drafts = None
        tokens = slice(0, rows)
        if self.layout.drafts:
            tokens, drafts = self.tokens[:rows], self.drafts[:rows]
        if self.protects:
            writes = tuple(x[:rows].flatten() for x in (self.written, self.token_blocks, self.token_slots))
            prefix = Prefix(None, self.prefix_table, self.numbers["prefix"], self.numbers["made"] if made else None)
            prefix = prefix.of(slice(0, rows))
        return DecodeRows(tokens, self.table[:rows], self.positions[:rows], numbers, (), prefix, writes, drafts)
