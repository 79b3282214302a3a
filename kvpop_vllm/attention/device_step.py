"""Engine steps on a device that the host must not wait for: decode rows in tensors that keep their addresses, so that a CUDA
graph recorded with them serves every later step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvpop_vllm.attention.fixed_budget import PrefillChunk, StepBatch
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.kernels.regions import RegionMap
from kvpop_vllm.roles import Retention

PADDING = -1
"""Position of a row for which nothing is read or written."""
NULL_BLOCK = 0
"""The block that belongs to no request."""


@dataclass(frozen=True)
class Split:
    """What the host knows of a step: the first ``decodes`` requests have one token each, or are padding; ``chunks`` are
    (request, first token, tokens) of the others."""

    decodes: int
    tokens: int
    chunks: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, ends: Sequence[int]) -> Split:
        """Of the flat batch, in which request i has the tokens ``[ends[i], ends[i + 1])``.

        A request of one token behind longer ones is a chunk: the rows of decodes must be those of their tokens.
        """
        counts = [after - before for before, after in zip(ends[:-1], ends[1:], strict=True)]
        if max(counts, default=0) <= 1:
            return cls(len(counts), len(counts), ())
        decodes = next(i for i, count in enumerate(counts) if count != 1)
        chunks = tuple((i, ends[i], counts[i]) for i in range(decodes, len(counts)) if counts[i])
        return cls(decodes, ends[-1], chunks)


class DecodeRows:
    """Tensors of the requests decoded in a step, allocated once and filled before each.

    Args:
        layout: of the layers' pages. retention: of all heads and layers. most: requests of a step. columns: of a request's
            block-table row, at most. heads_with: how many heads of all layers have each budget. device: of all tensors.

    Attributes:
        table: ``[most, columns]`` int32, blocks of each request, :data:`NULL_BLOCK` where it holds none. positions: ``[most]``
            int64, :data:`PADDING` in rows of padding. budgets: ``[H]`` int32, B.
    """

    def __init__(
        self,
        layout: PageLayout,
        retention: Retention,
        most: int,
        columns: int,
        heads_with: Mapping[int, int],
        device: torch.device | str,
    ):
        self.layout, self.retention, self.heads_with = layout, retention, dict(heads_with)
        self.table = torch.full((most, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((most,), PADDING, dtype=torch.int64, device=device)
        self.budgets = torch.full((layout.num_kv_heads,), retention.budget, dtype=torch.int32, device=device)
        self._columns = torch.arange(columns, dtype=torch.int32, device=device)

    def fill(self, rows: int, lengths: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor) -> None:
        """The first ``rows`` rows, by operations of the device alone.

        Padding is a row that the engine gives no length, or whose token it gives no slot (-1), or that has no block for its
        first slot: rows behind the requests of a captured batch, dummy runs, warm-ups with blocks for keys and values only.

        Args:
            lengths: ``[>= rows]`` int32, of each request with the new token. block_table: ``[>= rows, W]`` int32, state blocks
                first. slots: ``[>= rows]`` int64, -1 where a token has none; else not used.
        """
        width, positions = min(self.table.shape[1], block_table.shape[1]), self.positions[:rows]
        table = block_table[:rows, :width]
        real = (slots[:rows] >= 0) & (table[:, self.layout.state_blocks] != NULL_BLOCK)
        positions.copy_(torch.where(real, lengths[:rows] - 1, PADDING))
        held = self._columns[:width] < self._blocks(positions).unsqueeze(1)
        self.table[:rows, :width].copy_(torch.where(held, table, NULL_BLOCK))

    def batch(
        self,
        split: Split,
        lengths: Sequence[int],
        block_table: torch.Tensor,
        regions: RegionMap | None = None,
        layer: int = 0,
    ) -> StepBatch:
        """The step as one layer sees it; decode rows are views of the tensors that :meth:`fill` filled, or made of them.

        Args:
            lengths: of each request with its new tokens, exact for chunks. block_table: ``[requests, W]`` int32.
            regions, layer: as in :meth:`StepBatch.build`.
        """
        rows, heads, chosen = split.decodes, self.layout.num_kv_heads, [i for i, _, _ in split.chunks]
        blocks = block_table[chosen[0] : chosen[-1] + 1, : self.table.shape[1]] if chosen else self.table[:0]
        if regions is None:
            budgets = self.budgets
            own, others = (x.unsqueeze(1).expand(-1, heads, -1) for x in (self.table[:rows], blocks))
        else:
            budgets = regions.budgets(layer)
            own, others = regions.rows(layer, self.table[:rows]), regions.rows(layer, blocks)
        chunks = tuple(
            PrefillChunk(first, first + count, lengths[i] - count, others[i - chosen[0]])
            for i, first, count in split.chunks
        )
        return StepBatch(rows, slice(0, rows), own, self.positions[:rows], budgets, chunks, None, None)

    def _blocks(self, positions: torch.Tensor) -> torch.Tensor:
        """``[rows]``, blocks that requests of ``positions + 1`` tokens hold; 0 in rows of padding."""
        size = self.layout.block_slots
        pages = [
            (((positions + 1).clamp_max(budget) + size - 1) // size + self.layout.state_blocks) * many
            for budget, many in self.heads_with.items()
        ]
        heads = sum(self.heads_with.values())
        blocks = (sum(pages) + heads - 1) // heads if heads > 1 else pages[0]
        return torch.where(positions < 0, 0, blocks)
