"""Scores that arrive one token late: the score of token t + 1 decides about token t (DMS, authors' code)."""

import torch

from kvpop_vllm.cache.chunks import send
from kvpop_vllm.cache.pages import Pages
from kvpop_vllm.cache.step import StepBatch


def shift(gate_scores: torch.Tensor, pages: Pages, batch: StepBatch, sinks: int) -> torch.Tensor:
    """Return the shifted scores of a step: each token gets the score of the token after it.

    The score of a request's first token in the step belongs to the token before it. It is written to the
    score word of that token's ring slot; with a window of two or more, that token has not left the window
    yet. The last token keeps its own score until the next step replaces it. Nothing is written for requests
    whose step does not start where their cache ends; the kernels refuse them.

    Args:
        gate_scores: ``[T, H]`` float32, by token of the flat batch; not modified.
        pages: pages of the layer, modified in place.
        batch: the step.
        sinks: s of requests without a prefix.

    Returns:
        ``[T, H]``.
    """
    shifted, chunks = gate_scores.clone(), batch.chunks
    if batch.decodes:
        prefixes = None if batch.prefix is None else batch.prefix.tokens
        _replace(gate_scores[batch.tokens], pages, batch.table, batch.positions, batch.windows, prefixes, sinks)
    if len(chunks):
        device, prefixes = gate_scores.device, [record.prefix for record in chunks.slots]
        columns = chunks.firsts, chunks.starts, chunks.windows, prefixes
        firsts, starts, windows, prefixes = chunks.once("first tokens", lambda: send(columns, device))
        for first, length in zip(chunks.firsts, chunks.lengths, strict=True):
            shifted[first : first + length - 1] = gate_scores[first + 1 : first + length]
        _replace(gate_scores[firsts], pages, chunks.table, starts, windows, prefixes, sinks)
    return shifted


def _replace(
    score: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    starts: torch.Tensor,
    windows: torch.Tensor,
    prefixes: torch.Tensor | None,
    sinks: int,
) -> None:
    """Write scores to the words of the tokens before ``starts``, where those tokens are in the ring.

    Args:
        score: ``[R, H]``.
        pages: pages of the layer, modified in place.
        table: ``[R, H, P]``.
        starts: ``[R]``.
        windows: ``[R]``.
        prefixes: ``[R]``, or None.
        sinks: s of requests without a prefix.
    """
    layout, words = pages.layout, pages.score
    tokens_seen = pages.position[table[:, 0, layout.state_blocks].long(), 0, 0]
    first = 0
    if prefixes is not None:
        sinks, first = torch.where(prefixes > 0, 0, sinks), prefixes
    since = starts - 1 - first - sinks
    in_ring = (since >= 0) & (tokens_seen == starts)
    # Selecting rows would make the host wait for the device. Other rows repeat one of these, as the pages of a row below
    # its prefix's end may be another request's. If there is none, all rows write back one word.
    rows = torch.where(in_ring, torch.arange(len(in_ring), device=in_ring.device), in_ring.int().argmax())
    slots = torch.where(in_ring, sinks + since % windows, 0)[rows]
    score, table = score[rows], table[rows]
    columns = layout.state_blocks + slots // layout.block_slots
    blocks = table.gather(2, columns.view(-1, 1, 1).expand(-1, table.shape[1], 1))[..., 0].long()  # [R, H]
    # index the flat memory, because with unequal shares heads overlap in this view
    strides, heads = words.stride(), torch.arange(table.shape[1], device=words.device)
    places = words.storage_offset() + blocks * strides[0] + heads * strides[1]
    places += (slots % layout.block_slots).unsqueeze(1) * strides[2]
    memory = words.as_strided((words.untyped_storage().nbytes() // words.itemsize,), (1,), 0)
    memory[places] = torch.where(in_ring[rows].unsqueeze(1), score, memory[places])
