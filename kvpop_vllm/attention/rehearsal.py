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
    pages, table = fresh_pages(rule, layout, most, length=length, device=device)
    told = torch.tensor(budgets, dtype=torch.int32, device=device)
    rows = min(tokens, requests)
    positions = torch.full((rows,), PADDING, dtype=torch.int64, device=device)
    valid = torch.zeros(rows, 1, dtype=torch.int32, device=device).expand(-1, len(budgets))
    prompts = torch.ones_like(positions) if rule.needs_prompt else None
    together = slice(0, rows), table.expand(rows, -1, -1), positions, valid, told
    yield pages, StepBatch(rows, *together, (), None, None, prompts), rows

    count, start = min(tokens, length), 0
    if rule.sequential:
        count = min(count, 2)
    else:
        grid = rule.decide_every
        start = min(most + (grid - 1 - most) % grid, length - count)  # as few tokens decided upon as can be
        pages.position[table[0, :, layout.state_blocks].long(), :, 0] = start  # tokens_seen
    chunk = PrefillChunk(0, count, start, table[0], count if rule.needs_prompt else None)
    none = slice(0, 0), table[:0], positions[:0], valid[:0], told
    yield pages, StepBatch(0, *none, (chunk,), None, None), count
