"""Scores that come one token late: that of token t + 1 decides on token t (DMS as its authors' code has it)."""

from __future__ import annotations

import torch

from kvpop_vllm.attention.fixed_budget import StepBatch
from kvpop_vllm.kernels.pages import Pages


def shift(given: torch.Tensor, pages: Pages, batch: StepBatch, sinks: int) -> torch.Tensor:
    """The score of every token of a step, which is that of the token after it.

    The score of a request's first token goes where the one before it lies, into the score word of its ring slot: with a
    window of two or more that token has not left it yet. A last token keeps its own until the next step
    replaces it. Requests whose step does not start where their cache ends are left alone, for the kernels to refuse.

    Args:
        given: ``[T, H]`` float32, by token of the flat batch; left as it is. sinks: s of requests without a prefix.

    Returns:
        ``[T, H]``.
    """
    shifted = given.clone()
    if batch.decodes:
        protected = None if batch.protection is None else batch.protection.tokens
        _replace(given[batch.tokens], pages, batch.table, batch.positions, batch.windows, protected, sinks)
    for chunk in batch.prefills:
        shifted[chunk.first : chunk.last - 1] = given[chunk.first + 1 : chunk.last]
        start = torch.full((1,), chunk.start, device=given.device)
        protected = torch.full_like(start, chunk.protected)
        own = chunk.row.unsqueeze(0), start, torch.full_like(start, chunk.window), protected, sinks
        _replace(given[chunk.first].unsqueeze(0), pages, *own)
    return shifted


def _replace(
    score: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    starts: torch.Tensor,
    windows: torch.Tensor,
    protected: torch.Tensor | None,
    sinks: int,
) -> None:
    """Write ``score [R, H]`` to the words of the tokens before ``starts [R]``, where those are in the ring; table ``[R, H, P]``,
    windows ``[R]``, protected ``[R]`` or None."""
    layout, words = pages.layout, pages.score
    seen = pages.position[table[:, 0, layout.state_blocks].long(), 0, 0]
    first = 0
    if protected is not None:
        sinks, first = torch.where(protected > 0, 0, sinks), protected
    since = starts - 1 - first - sinks
    there = (since >= 0) & (seen == starts)
    # the others write back a word of their own: choosing rows would have the host wait for a device
    slots = torch.where(there, sinks + since % windows, 0)
    columns = layout.state_blocks + slots // layout.block_slots
    blocks = table.gather(2, columns.view(-1, 1, 1).expand(-1, table.shape[1], 1))[..., 0].long()  # [R, H]
    # by place in memory: with unequal shares heads overlap in this view
    strides, heads = words.stride(), torch.arange(table.shape[1], device=words.device)
    places = words.storage_offset() + blocks * strides[0] + heads * strides[1]
    places += (slots % layout.block_slots).unsqueeze(1) * strides[2]
    memory = words.as_strided((words.untyped_storage().nbytes() // words.itemsize,), (1,), 0)
    memory[places] = torch.where(there.unsqueeze(1), score, memory[places])
