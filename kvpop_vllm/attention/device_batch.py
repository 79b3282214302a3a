"""Engine steps on a device that the host must not wait for.

Decode rows are kept in tensors with fixed addresses, so that a CUDA graph recorded with them serves every
later step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvpop_vllm.attention.prefill_chunks import PrefillChunk, made_of
from kvpop_vllm.attention.step_batch import Protection, RequestSettings, StepBatch
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import RegionMap
from kvpop_vllm.roles import Retention

PADDING = -1
"""Position of a row of padding: nothing is read or written for it."""
NULL_BLOCK = 0
"""Block that belongs to no request."""


@dataclass(frozen=True)
class Split:
    """Division of a step into decode rows and chunks, as known to the host.

    Attributes:
        decodes: number of requests with one token each, or padding; they come first.
        tokens: number of tokens of the step.
        chunks: (request, first token, tokens) of the other requests.
    """

    decodes: int
    tokens: int
    chunks: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, ends: Sequence[int]) -> Split:
        """Return the division of the flat batch in which request i has the tokens ``[ends[i], ends[i + 1])``.

        A request of one token behind longer ones is a chunk, because decode rows must have the indices of
        their tokens.
        """
        counts = [after - before for before, after in zip(ends[:-1], ends[1:], strict=True)]
        if max(counts, default=0) <= 1:
            return cls(len(counts), len(counts), ())
        decodes = next(i for i, count in enumerate(counts) if count != 1)
        chunks = tuple((i, ends[i], counts[i]) for i in range(decodes, len(counts)) if counts[i])
        return cls(decodes, ends[-1], chunks)


class DecodeRows:
    """Tensors of the requests decoded in a step, allocated once and filled before each step.

    Args:
        layout: page layout of the layers.
        retention: budget, sinks and window of all heads and layers.
        most: largest number of requests of a step.
        columns: largest number of blocks of a request's state and tail.
        heads_with: number of heads over all layers with each budget; empty if all heads have the request's.
        device: device of all tensors.
        longest: most protected tokens of a request.
        cartridges: True if requests may begin with cartridges.

    Attributes:
        table: ``[most, columns]`` int32, blocks of each request's state and tail, else :data:`NULL_BLOCK`.
        positions: ``[most]`` int64, :data:`PADDING` in rows of padding.
        budgets: ``[most, H]`` int32, B of each request.
        windows: ``[most]`` int32, w of each request.
        protected: ``[most]`` int64, p of each request.
        prefix_table: ``[most, F]`` int32, prefix blocks of each request and the blocks behind them.
        blocks: ``[most]`` int64, block of the new token if it is protected, else :data:`NULL_BLOCK`.
        slots: ``[most]`` int64, slot of the new token if it is protected, else 0.
        seeds: ``[most]`` int64, seed of the draws of each request.
        made: ``[most]`` int64, slots of cartridges of each request, None without any.
    """

    def __init__(
        self,
        layout: PageLayout,
        retention: Retention,
        most: int,
        columns: int,
        heads_with: Mapping[int, int],
        device: torch.device | str,
        longest: int = 0,
        cartridges: bool = False,
    ):
        self.layout, self.retention, self.heads_with, self.protects = layout, retention, dict(heads_with), longest > 0
        self.table = torch.full((most, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((most,), PADDING, dtype=torch.int64, device=device)
        self.budgets = torch.full((most, layout.num_kv_heads), retention.budget, dtype=torch.int32, device=device)
        self.windows = torch.full((most,), retention.window, dtype=torch.int32, device=device)
        self.protected, self.blocks, self.slots, self.seeds = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.made = torch.zeros_like(self.protected) if cartridges else None
        blocks = cdiv(longest, layout.block_slots)
        self.prefix_table = torch.full((most, blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._columns = torch.arange(columns, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)

    def fill(
        self,
        rows: int,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        sent: Mapping[str, torch.Tensor] = {},  # noqa: B006
    ) -> None:
        """Fill the first ``rows`` rows, with operations on the device only.

        A row is padding if the engine gives it no length, if its token has no slot (-1), or if it has no
        block. The block is the prefix block of a protected token, otherwise the block of the first slot of
        the tail. Such rows occur behind the requests of a captured batch, in dummy runs, and in warm-ups with
        blocks for keys and values only.

        Args:
            rows: number of rows to fill.
            lengths: ``[>= rows]`` int32, length of each request with the new token.
            block_table: ``[>= rows, W]`` int32, blocks of each request's prefix, state and tail.
            slots: ``[>= rows]`` int64, -1 if a token has none; other values are not used.
            sent: ``protected``, ``budgets``, ``windows``, ``seeds`` and ``made`` of each request of the step, like
                the attributes of the same names, in pinned CPU memory. Attributes that are not sent keep their
                values.
        """
        positions, asked = self.positions[:rows], lengths[:rows] - 1
        for name, values in sent.items():
            getattr(self, name)[: len(values)].copy_(values, non_blocking=True)
        tails = self._tails(block_table, slice(0, rows))
        width, block = tails.shape[1], tails[:, self.layout.state_blocks]
        if self.protects:
            inside, block = self._fill_prefixes(asked, block_table[:rows], block)
        real = (slots[:rows] >= 0) & (block != NULL_BLOCK)
        positions.copy_(torch.where(real, asked, PADDING))
        since = positions - self.protected[:rows] if self.protects else positions
        held = self._columns[:width] < self._blocks(since).unsqueeze(1)
        self.table[:rows, :width].copy_(torch.where(held, tails, NULL_BLOCK))
        if self.protects:
            inside &= positions >= 0
            self.blocks[:rows].copy_(torch.where(inside, block, NULL_BLOCK))
            self.slots[:rows].copy_(torch.where(inside, asked % self.layout.block_slots, 0))

    def _fill_prefixes(
        self, asked: torch.Tensor, table: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill ``prefix_table`` and find the blocks of protected new tokens.

        Args:
            asked: ``[R]``, positions of the new tokens.
            table: ``[R, W]``, block table of the engine.
            block: ``[R]``, blocks of the tails' first slots.

        Returns:
            Which tokens are protected, ``[R]`` booleans, and ``block`` with their prefix blocks in place,
            ``[R]``.
        """
        most = min(self.prefix_table.shape[1], table.shape[1])
        self.prefix_table[: len(table), :most].copy_(table[:, :most])
        inside, columns = asked < self.protected[: len(table)], asked // self.layout.block_slots
        own = table.gather(1, columns.clamp(0, table.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        return inside, torch.where(inside, own, block)

    def _tails(self, block_table: torch.Tensor, chosen: slice) -> torch.Tensor:
        """Return the blocks behind the prefix blocks of some requests, ``[R, columns]``.

        Beyond the end of a row, its last entry is repeated.
        """
        if not self.protects:
            return block_table[chosen, : self.table.shape[1]]
        size = self.layout.block_slots
        columns = (self.protected[chosen] + size - 1).unsqueeze(1) // size + self._columns
        return block_table[chosen].gather(1, columns.clamp_max(block_table.shape[1] - 1))

    def beginning(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables ``[n, columns]`` and prefix tables ``[n, F]`` of some rows."""
        return tuple(torch.stack([whole[i] for i in chosen]) for whole in (self.table, self.prefix_table))

    def batch(
        self,
        split: Split,
        lengths: Sequence[int],
        block_table: torch.Tensor,
        regions: RegionMap | None = None,
        layer: int = 0,
        sizes: RequestSettings = RequestSettings(),  # noqa: B008
    ) -> StepBatch:
        """Return the step of one layer. Decode rows are views of the filled tensors, or made from them.

        Args:
            split: division of the step.
            lengths: length of each request with its new tokens, exact for chunks.
            block_table: ``[requests, W]`` int32.
            regions: as in :meth:`StepPlan.batch`.
            layer: as in :meth:`StepPlan.batch`.
            sizes: the values that were sent to :meth:`fill`.
        """
        rows, heads, chosen = split.decodes, self.layout.num_kv_heads, [i for i, _, _ in split.chunks]
        blocks = self._tails(block_table, slice(chosen[0], chosen[-1] + 1)) if chosen else self.table[:0]
        kept, drawn = self.retention, None if sizes.seeds is None else sizes.seeds.tolist()
        first = chosen[0] if chosen else 0
        if regions is None:
            own, others = (x.unsqueeze(1).expand(-1, heads, -1) for x in (self.table[:rows], blocks))
            budgets = self.budgets[:rows]
        else:
            (budgets, own), (_, others) = (regions.place(layer, tails) for tails in (self.table[:rows], blocks))

        def budgets_of(i: int) -> torch.Tensor:
            one = kept.budget if sizes.budgets is None else sizes.budgets[i]
            each = [one] * heads if regions is None else regions.shares.budgets[layer]
            return torch.tensor(each, dtype=torch.int32, device="cpu")

        chunks = tuple(
            PrefillChunk(
                start,
                start + count,
                lengths[i] - count,
                others[i - first],
                budgets_of(i),
                kept.window if sizes.windows is None else sizes.windows[i],
                *self._prefix(i, block_table, sizes.protected),
                None if drawn is None else drawn[i],
                made=0 if sizes.made is None else sizes.made[i],
            )
            for i, start, count in split.chunks
        )
        protection = self._protection(rows, chunks, others) if self.protects else None
        ahead = None if drawn is None else self.seeds[:rows]
        told = self.positions[:rows], budgets, self.windows[:rows]
        return StepBatch(rows, slice(0, rows), own, *told, chunks, None, None, protection, ahead)

    def _prefix(
        self, i: int, block_table: torch.Tensor, protected: Sequence[int] | None
    ) -> tuple[int, torch.Tensor | None]:
        """Return p and the prefix blocks ``[F]`` of request i.

        The blocks are copied, because kernels are compiled for one alignment.
        """
        if not self.protects or protected is None:
            return 0, None
        return protected[i], block_table[i, : self.prefix_table.shape[1]].clone()

    def _protection(self, rows: int, chunks: Sequence[PrefillChunk], others: torch.Tensor) -> Protection:
        """Return the protected-prompt part of a step.

        Tails that begin in a decode row are not included, because a CUDA graph cannot hold that.

        Args:
            rows: number of decode rows.
            chunks: chunks of the step.
            others: ``[.., H, P]``, pages of tails of requests with chunks.
        """
        size, device = self.layout.block_slots, self.table.device
        begun = [chunk for chunk in chunks if chunk.protected and chunk.start <= chunk.protected < chunk.end]
        written, blocks, slots = [self._rows[:rows]], [self.blocks[:rows]], [self.slots[:rows]]
        for chunk in chunks:
            if (count := min(chunk.end, chunk.protected) - chunk.start) > 0:
                each = torch.arange(count, device=device)
                written.append(chunk.first + each)
                blocks.append(chunk.prefix_row[(chunk.start + each) // size].long())
                slots.append((chunk.start + each) % size)
        places = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (written, blocks, slots))
        tails, table = others[:0], self.prefix_table[:0]
        if begun:
            tails, table = (torch.stack(parts) for parts in zip(*((c.row, c.prefix_row) for c in begun), strict=True))
        tokens = torch.tensor([chunk.protected for chunk in begun], dtype=torch.int64, device="cpu")
        of_begun = tails, table, tokens
        if self.made is None:
            return Protection(self.prefix_table[:rows], self.protected[:rows], *places, *of_begun)
        made = self.made[:rows], made_of([chunk.made for chunk in begun])
        return Protection(self.prefix_table[:rows], self.protected[:rows], *places, *of_begun, *made)

    def _blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return an upper bound ``[rows]`` of the blocks for state and slots of ``tokens + 1`` tokens.

        It is 0 where ``tokens`` is negative.
        """
        size = self.layout.block_slots
        heads_with = self.heads_with or {self.budgets[: len(tokens), 0]: 1}
        pages = [
            (((tokens + 1).clamp_max(budget) + size - 1) // size + self.layout.state_blocks) * many
            for budget, many in heads_with.items()
        ]
        heads = sum(heads_with.values())
        blocks = (sum(pages) + heads - 1) // heads if heads > 1 else pages[0]
        return torch.where(tokens < 0, 0, blocks)
