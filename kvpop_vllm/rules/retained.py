"""Tokens that a request's pages hold, per head."""

import torch

from kvpop_vllm.cache.pages import Pages
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.roles import Retention

EMPTY = -1
"""Position reported for an empty slot."""


def filled_slots(pages: Pages, row: torch.Tensor) -> torch.Tensor:
    """Return the number of filled long-range slots of each head under a rule with a threshold.

    The number is stored in the position word of slot 1.

    Args:
        pages: one layer's cache.
        row: ``[H, P]``, pages of the tail.

    Returns:
        ``[H]`` int64.
    """
    heads = torch.arange(pages.layout.num_kv_heads)
    return pages.position[row[:, pages.layout.state_blocks].long(), heads, 1].long()


def held_tokens(
    pages: Pages, row: torch.Tensor, tokens_seen: int, rule: RetentionRule, budgets: torch.Tensor, protected: int = 0
) -> torch.Tensor:
    """Return which of its first ``tokens_seen`` tokens a request holds, for any rule and any budgets of its heads.

    Args:
        pages: one layer's cache, on the CPU.
        row: ``[H, P]``, pages of the tail, as the kernels take them.
        tokens_seen: tokens that the request has processed.
        rule: rule of the layer.
        budgets: ``[H]`` int32.
        protected: p, tokens of the protected prefix.

    Returns:
        ``[H, tokens_seen]`` booleans.

    Raises:
        ValueError: the pages have not seen ``tokens_seen`` tokens.
    """
    is_held = torch.zeros(len(budgets), tokens_seen, dtype=torch.bool)
    is_held[:, :protected] = True
    if tokens_seen <= protected:
        return is_held
    filled = filled_slots(pages, row) if rule.threshold is not None else None
    retention = Retention(int(budgets.max()), rule.sinks, rule.window).after_prefix(protected)
    slots = slot_positions(pages, row, tokens_seen, retention, filled)
    # a tail after a prefix has no sink slots
    tail_budgets = budgets - rule.sinks if protected else budgets
    used = (torch.arange(slots.shape[1]) < tail_budgets.unsqueeze(1)) & (slots != EMPTY)
    heads = torch.arange(len(budgets)).unsqueeze(1).expand_as(slots)
    is_held[heads[used], slots[used]] = True
    return is_held


def held_after_prompt(
    pages: Pages,
    row: torch.Tensor,
    tokens_seen: int,
    rule: RetentionRule,
    budgets: torch.Tensor,
    after: RequestSlots,
    blocks: Pages,
    made_row: torch.Tensor | None,
) -> torch.Tensor:
    """Return which of its first ``tokens_seen`` tokens a request holds after the end of a compressed prompt.

    A made slot counts as the token whose key it has.

    Args:
        pages, row, tokens_seen, rule: as in :func:`held_tokens`, with the window after the prompt's end.
        budgets: ``[H]`` int32, slots of each head's tail.
        after: what the request is after the prompt's end.
        blocks: the cache by block, on the CPU.
        made_row: ``[F]``, blocks of the made slots, or None if there are none.

    Returns:
        ``[H, tokens_seen]`` booleans.
    """
    # made slots lie in front of the tail as a protected prefix of as many tokens would
    tail = held_tokens(pages, row, tokens_seen - after.shift, rule, budgets, after.made_slots)[:, after.made_slots :]
    is_held = torch.zeros(len(budgets), tokens_seen, dtype=torch.bool)
    is_held[:, after.made_slots + after.shift :] = tail
    if after.made_slots:
        slots, n = torch.arange(after.made_slots), pages.layout.block_slots
        positions = blocks.position[made_row.long()[slots // n], :, slots % n]  # [P, H]
        is_held.scatter_(1, positions.T.long(), True)
    return is_held


def slot_positions(
    pages: Pages,
    row: torch.Tensor,
    tokens_seen: int,
    retention: Retention,
    filled: torch.Tensor | None = None,
    heads: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the position of the token in each slot in use, in slot order.

    Positions in sinks and ring follow from ``tokens_seen``. Those in long-range slots are read from the position
    words. The heads must have the same budget.

    Args:
        pages: one layer's cache.
        row: the request's block numbers ``[P]`` or, per head, ``[H, P]``; state blocks first.
        tokens_seen: tokens that the request has processed, more than ``retention.first``.
        retention: budget, sinks and window.
        filled: ``[H]``, filled long-range slots of each head, if the number depends on the tokens.
        heads: ``[n]`` int64, KV heads to look at, on the device of the pages, None for all H.

    Returns:
        ``[H, n]`` int64, :data:`EMPTY` in slots that are not filled; n is ``min(tokens_seen - p, budget)``, or less
        with ``filled``.

    Raises:
        ValueError: the pages have not seen ``tokens_seen`` tokens (as stored in the position word of slot 0). Only pages
            on a CPU are asked.
    """
    layout, first, since, device = pages.layout, retention.first_long, tokens_seen - retention.first, pages.raw.device
    heads = (torch.arange(layout.num_kv_heads, device=device) if heads is None else heads).unsqueeze(1)
    count = min(since, retention.budget)
    if filled is not None and since > first:
        count = first + int(filled.max())
    slots = torch.arange(count, device=device)
    blocks = row.expand(layout.num_kv_heads, -1)[heads, layout.state_blocks + slots // layout.block_slots].long()
    words = pages.position[blocks, heads, slots % layout.block_slots].long()
    if device.type == "cpu" and tokens_seen > 0 and (words[:, 0] != tokens_seen).any():
        raise ValueError(f"these pages have seen {words[:, 0].tolist()} tokens, not {tokens_seen}")
    # newest token of each residue modulo w
    newest = slots + (since - 1 - slots) // retention.window * retention.window
    fixed = retention.first + torch.where(slots < retention.sinks, slots, newest)
    positions = torch.where(slots < first, fixed, words)
    if filled is not None:
        positions = torch.where(slots < first + filled.unsqueeze(1), positions, EMPTY)
    return positions
