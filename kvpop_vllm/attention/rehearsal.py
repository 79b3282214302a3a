"""The steps that take the most memory, on pages that are thrown away: an engine that measures its need before it has a cache runs
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvpop_vllm.attention.device_step import PADDING
from kvpop_vllm.attention.fixed_budget import PrefillChunk, StepBatch
from kvpop_vllm.attention.fresh import fresh_pages
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages


def largest_steps(
    rule: RetentionRule,
    layout: PageLayout,
    budgets: Sequence[int],
    most: int,
    tokens: int,
    requests: int,
    length: int,
    device: torch.device,
) -> Iterator[tuple[Pages, StepBatch, int]]:
    """Pages, a step of one layer and its number of tokens: requests decoded together, as rows of padding, then a prefill chunk
    behind a full cache. Where tokens are done one by one, two stand for all.

    Args:
        budgets: of the layer's heads. most: the largest budget of any layer. tokens, requests: of a step at most.
        length: of a request at most.
    """
    pages, table = fresh_pages(layout, most, length=length, device=device)
    told = torch.tensor(budgets, dtype=torch.int32, device=device)
    rows = min(tokens, requests)
    positions = torch.full((rows,), PADDING, dtype=torch.int64, device=device)
    yield pages, StepBatch(rows, slice(0, rows), table.expand(rows, -1, -1), positions, told, (), None, None), rows

    count, start = min(tokens, length), 0
    if rule.sequential:
        count = min(count, 2)
    else:
        start = min(most, length - count)
        pages.position[table[0, :, layout.state_blocks].long(), :, 0] = start  # tokens_seen
    chunk = PrefillChunk(0, count, start, table[0])
    yield pages, StepBatch(0, slice(0, 0), table[:0], positions[:0], told, (chunk,), None, None), count
