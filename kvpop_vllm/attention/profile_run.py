"""Worst-case steps for memory profiling, on temporary pages.

An engine that measures its memory before it has a cache runs these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvpop_vllm.attention.allocate import allocate_pages
from kvpop_vllm.attention.device_batch import PADDING
from kvpop_vllm.attention.prefill_chunks import PrefillChunk
from kvpop_vllm.attention.step_batch import Protection, StepBatch
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages, cdiv

SHORT = 64
"""Tokens of a chunk that take the most memory a token: a block of rows of the prefill kernels."""


def worst_case_batches(
    rule: RetentionRule,
    layout: PageLayout,
    budgets: Sequence[int],
    most: int,
    tokens: int,
    requests: int,
    length: int,
    device: torch.device,
    longest: int = 0,
) -> Iterator[tuple[Pages, StepBatch, int]]:
    """Yield the steps of one layer that take the most memory.

    The first step decodes up to ``requests`` rows of padding together. The second is a prefill chunk behind a
    full cache. If the rule processes tokens one by one, this chunk has two tokens, which represent all, and
    without a prefix it starts at position 0.

    Another step has as many chunks of :data:`SHORT` tokens as fit, because each chunk has a state of its own.

    With protected prompts, all requests have a prefix, which consists of the same block. The chunk lies
    behind the longest prefix that fits. A third step is a chunk that lies in the prefix except for its last
    two tokens.

    Args:
        rule: rule of the layer.
        layout: page layout of the layer.
        budgets: budgets of the layer's heads.
        most: largest budget of any layer.
        tokens: most tokens of a step.
        requests: most requests of a step.
        length: most tokens of a request.
        device: device of the steps.
        longest: most protected tokens of a request, 0 without protected prompts.

    Yields:
        Pages, step and its number of tokens.
    """
    pages, table = allocate_pages(layout, most, length=length, device=device)
    told = torch.tensor(budgets, dtype=torch.int32, device="cpu")
    sized = told.to(device)
    rows = min(tokens, requests)
    positions = torch.full((rows,), PADDING, dtype=torch.int64, device=device)
    prefix_table = torch.zeros(rows, cdiv(longest, layout.block_slots), dtype=torch.int32, device=device)
    protection = _protection(prefix_table, rows, table[:0], 0) if longest else None
    windows = torch.full((rows,), rule.window, dtype=torch.int32, device=device)
    decodes = rows, slice(0, rows), table.expand(rows, -1, -1), positions, sized.expand(rows, -1).contiguous(), windows
    seeds = torch.zeros(rows, dtype=torch.int64, device=device) if rule.seeded else None
    yield pages, StepBatch(*decodes, (), None, None, protection, seeds), rows

    def of_chunk(count: int, start: int, protected: int, several: int = 1):
        """Return a step of chunks of ``count`` tokens from position ``start`` on.

        ``protected`` is p of their requests, and ``several`` their number.
        """
        own = (protected, prefix_table[0]) if longest else (0, None)
        place = table[0], told, rule.window
        seed, protection = 0 if rule.seeded else None, None
        chunks = (PrefillChunk(i * count, (i + 1) * count, start, *place, *own, seed) for i in range(several))
        if longest:
            within = min(count, max(0, protected - start))
            protection = _protection(prefix_table[:1], within, table[:1], protected)
        none = slice(0, 0), table[:0], positions[:0], sized.expand(0, -1), windows[:0]
        return pages, StepBatch(0, *none, tuple(chunks), None, None, protection), several * count

    count, start, most_tokens = min(tokens, length), 0, min(tokens, length)
    if rule.sequential:
        count = min(count, 2)
    protected = min(longest, length - count)
    if protected or not rule.sequential:
        start = min(protected + most, length - count)
        pages.position[table[0, :, layout.state_blocks].long(), :, 0] = start  # tokens_seen
    yield of_chunk(count, start, protected)
    short = min(SHORT, length)
    if (several := min(requests, tokens // short)) > 1 and not rule.sequential:
        yield of_chunk(short, 0, 0, several)
    if longest:
        end = min(longest + 2, length)
        yield of_chunk(min(most_tokens, end), max(0, end - most_tokens), min(longest, end - 2))


def _protection(table: torch.Tensor, written: int, begun: torch.Tensor, protected: int) -> Protection:
    """Return the protected-prompt part of a step whose prefixes are in ``table [R, F]``.

    Args:
        table: ``[R, F]``, prefix blocks of padding.
        written: number of protected tokens that the step writes.
        begun: ``[B, H, P]``, pages of the tails that begin in the step.
        protected: p of the requests whose tails begin.
    """
    nothing = torch.zeros(len(table) + written, dtype=torch.int64, device=table.device)
    tokens = torch.full((len(begun),), protected, dtype=torch.int64, device="cpu")
    each = torch.arange(written, device=table.device)
    places = nothing[:written], nothing[:written]
    return Protection(table, nothing[: len(table)], each, *places, begun, table[: len(begun)], tokens)
