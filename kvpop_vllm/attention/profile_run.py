"""Worst-case steps for memory profiling, on temporary pages.

An engine that measures its memory before it has a cache runs these steps.
"""

from collections.abc import Iterator, Sequence

import torch

from kvpop_vllm.cache.allocate import allocate_pages
from kvpop_vllm.cache.device_rows import DeviceRows
from kvpop_vllm.cache.divided_heads import SharesByVotes
from kvpop_vllm.cache.pages import PageLayout, Pages, cdiv
from kvpop_vllm.cache.shares import EqualHeads, HeadBudgets
from kvpop_vllm.cache.step import Between, RequestBlocks, Span, StepBatch, StepPlan
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.rounds import intervals

SHORT = 64
"""Tokens of a chunk that take the most memory a token: a block of rows of the prefill kernels."""


def worst_case_batches(
    rule: RetentionRule,
    layout: PageLayout,
    budgets: Sequence[int],
    largest: int,
    tokens: int,
    requests: int,
    length: int,
    device: torch.device,
    longest: int = 0,
) -> Iterator[tuple[Pages, StepBatch, int]]:
    """Yield the steps of one layer that take the most memory.

    The first step decodes up to ``requests`` rows of padding together, each with as many drafts as it may have. The
    second is a prefill chunk after a full cache. If the rule processes tokens one by one, this chunk has two tokens,
    which represent all, and without a prefix it starts at position 0.

    Another step has as many chunks of :data:`SHORT` tokens as fit, after full caches, because each chunk has a state and
    candidates of its own.

    With protected prompts, all requests have a prefix, which consists of the same block. The chunk lies
    after the longest prefix that fits. A third step is a chunk that lies in the prefix except for its last
    two tokens.

    Args:
        rule: rule of the layer.
        layout: page layout of the layer.
        budgets: budgets of the layer's heads.
        largest: largest budget of any layer.
        tokens: most tokens of a step.
        requests: most requests of a step.
        length: most tokens of a request.
        device: device of the steps.
        longest: most protected tokens of a request, 0 without protected prompts.

    Yields:
        Pages, step and its number of tokens.
    """
    pages, table = allocate_pages(layout, largest, length=length, device=device)
    shares = HeadBudgets({max(budgets): budgets}, device)
    slots = RequestSlots(0, 0, max(budgets), rule.window, 0 if rule.seeded else None)
    blocks = torch.zeros(1, cdiv(longest, layout.block_slots), dtype=torch.int32, device=device)
    steps = 1 + layout.drafts

    def step(rows: int, spans: list[Span]) -> tuple[Pages, StepBatch, int]:
        padding = DeviceRows(layout, slots, rows, table.shape[2], None, device, longest).view(rows, rule.seeded, False)
        place = RequestBlocks(*(x.expand(max(1, len(spans)), -1) for x in (table[0, :1], blocks)))
        plan = StepPlan(layout, spans, place, rows=padding, checks=False)
        return pages, plan.batch(shares), rows * steps + sum(span.length for span in spans)

    def chunks(length: int, start: int, prefix: int, several: int = 1) -> tuple[Pages, StepBatch, int]:
        """Return a step of chunks of ``length`` tokens from position ``start`` on, after prefixes of ``prefix`` tokens."""
        protected = slots._replace(prefix=prefix)
        return step(0, [Span(i, i * length, start, length, protected) for i in range(several)])

    yield step(min(tokens // steps, requests), [])
    count, start, most_tokens = min(tokens, length), 0, min(tokens, length)
    if rule.sequential:
        count = min(count, 2)
    prefix = min(longest, length - count)
    if prefix or not rule.sequential:
        start = min(prefix + largest, length - count)
        pages.position[table[0, :, layout.state_blocks].long(), :, 0] = start  # tokens_seen
    yield chunks(count, start, prefix)
    short = min(SHORT, length)
    if (several := min(requests, tokens // short)) > 1 and not rule.sequential:
        yield chunks(short, min(largest, length - short), 0, several)
    if longest:
        end = min(longest + 2, length)
        yield chunks(min(most_tokens, end), max(0, end - most_tokens), min(longest, end - 2))


def worst_case_between(
    rule: RetentionRule, layout: PageLayout, budgets: Sequence[int], length: int, device: torch.device
) -> tuple[Pages, Pages, EqualHeads, Between] | None:
    """Return what may lie between two steps of one layer and takes the most memory, or None if nothing does.

    It is the compression of a prompt of ``length`` tokens, or a round of a full cache. All blocks are the same one. The
    arguments are those of :func:`worst_case_batches`.

    Returns:
        Pages, blocks, shares and requests, for
        :meth:`kvpop_vllm.attention.layer.FixedBudgetAttention.between_steps`.
    """
    if not rule.compresses and rule.rounds is None:
        return None
    budget, heads = max(budgets), layout.num_kv_heads
    blocks = layout.view(torch.zeros(1, heads, layout.region_bytes, dtype=torch.uint8, device=device))
    slots = RequestSlots(length * rule.compresses, 0, budget, rule.window, 0 if rule.seeded else None)
    after, start, pages, shares = None, slots.prefix, blocks, HeadBudgets({budget: budgets}, device)
    if rule.compresses:
        after = [rule.compression.after(slots)]
        if rule.compression.adaptive_head_budgets:
            shares = SharesByVotes(blocks, rule.compression, budget)
            pages = shares.pages
    else:
        start = budget * intervals(rule.rounds.every, budget, rule.sinks, rule.window)[0]
        blocks.position[:, :, 0] = start  # tokens_seen
    width = cdiv(length, layout.block_slots) + layout.blocks(budget, budget)
    table = torch.zeros(1, width, dtype=torch.int32, device=device)
    return pages, blocks, shares, Between.of([start], [slots], after, table, layout.block_slots)
