"""Pages of requests that hold random tokens, made without a prefill, on the default device."""

import torch

from kvpop_vllm.cache.pages import PageLayout, Pages
from kvpop_vllm.kernels.ops import RetentionRule


def empty_pages(layout: PageLayout, requests: int, budget: int, ahead: int = 0) -> tuple[Pages, torch.Tensor]:
    """Return zeroed pages of requests, and their table ``[R, H, P]`` of blocks in random order.

    Args:
        layout: layout of the pages.
        requests: R.
        budget: B.
        ahead: further blocks, which belong to no request.
    """
    blocks, heads = layout.blocks(budget, budget), layout.num_kv_heads
    raw = torch.zeros(requests * blocks + ahead, heads, layout.region_bytes, dtype=torch.uint8)
    table = torch.randperm(requests * blocks).int().view(requests, 1, blocks)
    return layout.view(raw), table.expand(-1, heads, -1)


def fill(pages: Pages, table: torch.Tensor, rule: RetentionRule, budget: int, tokens_seen: int) -> None:
    """Make every request hold random tokens, as after ``tokens_seen`` tokens; states of scorers are unchanged."""
    layout, rows = pages.layout, table[:, 0].long()
    states, blocks = rows[:, : layout.state_blocks], rows[:, layout.state_blocks :]
    unchanged = pages.state[states]
    for part in (pages.k, pages.v, pages.score):
        part.normal_()
    pages.state[states] = unchanged
    words = torch.zeros(blocks.shape[1] * layout.block_slots, dtype=torch.int32)
    long_range = rule.sinks + torch.randperm(tokens_seen - rule.first_long)[: budget - rule.first_long].int()
    words[rule.first_long : rule.first_long + len(long_range)] = long_range
    words[0] = tokens_seen
    pages.position[blocks] = words.view(1, -1, 1, layout.block_slots).expand(len(rows), -1, layout.num_kv_heads, -1)
