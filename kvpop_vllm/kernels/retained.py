"""Which tokens a request's pages hold, head by head."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import Pages
from kvpop_vllm.roles import Retention

EMPTY = -1
"""Stands for the position of a slot that is not filled."""


def filled_slots(pages: Pages, row: torch.Tensor) -> torch.Tensor:
    """Return the ``[H]`` int64 numbers of long-range slots that each head has filled under a rule with a threshold, as slot 1's
    position word says. row: ``[H, P]``."""
    heads = torch.arange(pages.layout.num_kv_heads)
    return pages.position[row[:, pages.layout.state_blocks].long(), heads, 1].long()


def held_tokens(
    pages: Pages, row: torch.Tensor, seen: int, rule: RetentionRule, budgets: torch.Tensor, protected: int = 0
) -> torch.Tensor:
    """Return which tokens a request holds after ``seen``, whatever its rule and its heads' budgets.

    Args:
        pages: one layer's cache, on the CPU. row: ``[H, P]`` as the kernels take it, of the tail. budgets: ``[H]`` int32.
            protected: p, tokens of its protected prefix.

    Returns:
        ``[H, seen]`` booleans.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens.
    """
    found = torch.zeros(len(budgets), seen, dtype=torch.bool)
    found[:, :protected] = True
    if seen <= protected:
        return found
    filled = filled_slots(pages, row) if rule.threshold is not None else None
    for budget in budgets.unique().tolist():
        retention = Retention(budget, rule.sinks, rule.window).behind(protected)
        slots = slot_positions(pages, row, seen, retention, filled)
        for head in (budgets == budget).nonzero().flatten().tolist():
            found[head, slots[head][slots[head] != EMPTY]] = True
    return found


def slot_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, filled: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the position of the token in each slot in use, in slot order.

    Sinks and ring follow from ``seen``; long-range slots say it in their position words. Equal budgets only.

    Args:
        pages: one layer's cache.
        row: the request's block numbers ``[P]`` or, per head, ``[H, P]``; state blocks first.
        seen: tokens the request has processed, more than ``retention.first``.
        filled: ``[H]`` long-range slots that each head has filled, where that depends on the tokens.

    Returns:
        ``[H, n]`` int64, :data:`EMPTY` in slots not filled; n is ``min(seen - p, budget)``, or less where ``filled`` says so.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens (slot 0's position word says how many).
    """
    layout, first, since = pages.layout, retention.first_long, seen - retention.first
    heads = torch.arange(layout.num_kv_heads).unsqueeze(1)
    count = min(since, retention.budget)
    if filled is not None and since > first:
        count = first + int(filled.max())
    slots = torch.arange(count)
    blocks = row.expand(layout.num_kv_heads, -1)[:, layout.state_blocks + slots // layout.block_slots].long()
    words = pages.position[blocks, heads, slots % layout.block_slots].long()
    if seen > 0 and (words[:, 0] != seen).any():
        raise ValueError(f"these pages have seen {words[:, 0].tolist()} tokens, not {seen}")
    newest = slots + (since - 1 - slots) // retention.window * retention.window  # the newest token of each residue
    fixed = retention.first + torch.where(slots < retention.sinks, slots, newest)
    found = torch.where(slots < first, fixed, words)
    if filled is not None:
        found = torch.where(slots < first + filled.unsqueeze(1), found, EMPTY)
    return found


def retained_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, filled: torch.Tensor | None = None
) -> list[list[int]]:
    """The sorted positions a request holds after ``seen`` tokens, one list per KV head of one layer.

    Arguments and errors as in :func:`slot_positions`.
    """
    found = slot_positions(pages, row, seen, retention, filled)
    return [sorted(t for t in head if t != EMPTY) for head in found.tolist()]
