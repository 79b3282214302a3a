"""Prefill chunks of a step, one by one and as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvpop_vllm.kernels.chunks import Chunks, send
from kvpop_vllm.kernels.ops import AfterPrompt
from kvpop_vllm.kernels.pages import Pages, Prefix


@dataclass(frozen=True)
class PrefillChunk:
    """Chunk of one request: tokens ``[first, last)`` of the flat batch, from position ``start`` on.

    Attributes:
        first: index of the first token in the flat batch.
        last: index behind the last token.
        start: position of the first token.
        row: ``[H, P]`` int32, pages of the tail; None as long as no layer is chosen.
        budgets: ``[H]`` int32, B of each head, on the CPU; None in the same way.
        window: w.
        protected: p, tokens of the protected prefix.
        prefix_row: ``[F]`` int32, blocks of the prefix.
        seed: seed of the draws, if the policy draws.
        after: sizes behind the prompt's end, if the chunk is part of a prompt that is compressed at its end, else None.
        made_row: ``[F]`` int32, blocks of the slots that are then made of the prompt.
        follows: True if the previous chunk of the step compresses the prompt. Heads that divide their slots
            have separate pages only after that.
        made: number of the prefix's first tokens that have biases: slots of cartridges, or of a prompt.
    """

    first: int
    last: int
    start: int
    row: torch.Tensor | None
    budgets: torch.Tensor | None
    window: int
    protected: int = 0
    prefix_row: torch.Tensor | None = None
    seed: int | None = None
    after: AfterPrompt | None = None
    made_row: torch.Tensor | None = None
    follows: bool = False
    made: int = 0

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.last - self.first

    def cut_at_prompts_end(self, after: AfterPrompt, made_row: torch.Tensor) -> list[PrefillChunk]:
        """Return the chunk, cut where its prompt, the protected tokens, is compressed."""
        cut = self.first + min(self.end, self.protected) - self.start
        parts = [replace(self, last=cut, after=after, made_row=made_row)]
        if cut < self.last:
            prefix = {"protected": after.made, "prefix_row": made_row, "made": after.made}
            parts.append(replace(self, first=cut, start=self.protected - after.shift, follows=True, **prefix))
        return parts


@dataclass(frozen=True)
class ChunkGroup:
    """Chunks that are prefilled in one call.

    Attributes:
        tokens: indices of their tokens in the flat batch.
        chunks: start, length, budgets and window of each.
        table: ``[R, H, P]`` int32, pages of their tails.
        prefix_table: ``[R, F]`` int32, their prefix blocks, None if no request has a prefix.
        protected: ``[R]`` int64 on the CPU, p of each.
        seeds: ``[R]`` int64, seeds of the draws, None if nothing is drawn.
        made: ``[R]`` int64 on the CPU, slots of cartridges of each, None if no request has any.
    """

    tokens: slice | torch.Tensor
    chunks: Chunks
    table: torch.Tensor
    prefix_table: torch.Tensor | None
    protected: torch.Tensor
    seeds: torch.Tensor | None
    made: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[PrefillChunk]) -> ChunkGroup:
        """Return the group of some chunks of a step, in their order."""
        lengths = [part.last - part.first for part in parts]
        tokens = slice(parts[0].first, parts[-1].last)
        device = parts[0].row.device
        if sum(lengths) < tokens.stop - tokens.start:  # decoded tokens or padding lie between them
            tokens = send([i for part in parts for i in range(part.first, part.last)], device)
        budgets = torch.stack([part.budgets for part in parts])
        chunks = Chunks([part.start for part in parts], lengths, budgets, [part.window for part in parts])
        protected = torch.tensor([part.protected for part in parts], device="cpu")
        table, seeds, prefixes = torch.stack([part.row for part in parts]), None, None
        if any(protected):
            prefixes = torch.stack([part.prefix_row for part in parts])
        if parts[0].seed is not None:
            seeds = send([part.seed for part in parts], device)
        made = made_of([part.made for part in parts])
        return cls(tokens, chunks, table, prefixes, protected, seeds, made)

    def prefix(self, pages: Pages) -> Prefix | None:
        """Return the protected prefixes as the kernels take them, or None; ``pages`` are by block."""
        return None if self.prefix_table is None else Prefix(pages, self.prefix_table, self.protected, self.made)


def made_of(counts: Sequence[int]) -> torch.Tensor | None:
    """Return the slots of cartridges of requests, ``[R]`` int64 on the CPU, or None if no request has any."""
    return torch.tensor(counts, dtype=torch.int64, device="cpu") if any(counts) else None


def as_kernels_count(
    after: Sequence[AfterPrompt], starts: Sequence[int], protected: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return the first position, p, and the number of prefix tokens with biases of requests, as the kernels take them.

    Prompts are held until their end and compressed then. Behind its end, a prompt leaves a prefix of the slots that
    were made of it.

    Args:
        after: sizes of each request behind its prompt.
        starts: first position of each request in the step.
        protected: tokens of each prompt.
    """
    counts = [
        (start - own.shift, own.made, own.made) if start >= p else (start, p, 0)
        for own, start, p in zip(after, starts, protected, strict=True)
    ]
    return tuple(map(list, zip(*counts, strict=True))) if counts else ([], [], [])
