"""Which tokens a request's pages hold, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import Pages
from kvpop_vllm.roles import Retention

STALE = -1
"""Stands for the position of a slot whose token is not held any more."""


@dataclass(frozen=True)
class Divided:
    """The shares of heads that divide a layer's budget.

    Attributes:
        row: ``[H, P]`` region numbers of each head's pages, state pages first, -1 where it has none. capacity, filled:
            ``[H]`` long-range slots that a head may fill, and has filled.
    """

    row: torch.Tensor
    capacity: torch.Tensor
    filled: torch.Tensor


def divided(pages: Pages, row: torch.Tensor, rule: RetentionRule) -> Divided:
    """What the heads of a request have in their states; row: ``[H, P]`` regions of the request as kernels take them."""
    layout, heads = pages.layout, torch.arange(pages.layout.num_kv_heads).unsqueeze(1)
    state = row[:, : layout.state_blocks].long()
    words = pages.state[state, heads].flatten(1)[:, rule.state_floats(layout.head_size) - rule.share_floats :]
    numbers = words[:, 2 : rule.share_floats].long()
    own = row[numbers % len(heads), (layout.state_blocks + numbers // len(heads)).clamp(0, row.shape[1] - 1)]
    return Divided(torch.cat([row[:, : layout.state_blocks], own.where(numbers >= 0, -1)], 1), *words[:, :2].long().T)


def counted(pages: Pages, row: torch.Tensor) -> torch.Tensor:
    """``[H]`` long-range slots that each head has filled under a rule with a threshold: slot 0's score word says it. row ``[H, P]``."""
    heads = torch.arange(pages.layout.num_kv_heads)
    return pages.score[row[:, pages.layout.state_blocks].long(), heads, 0].long()


def held_tokens(
    pages: Pages, row: torch.Tensor, seen: int, rule: RetentionRule, budgets: torch.Tensor, prompt: int | None = None
) -> torch.Tensor:
    """Which tokens a request holds after ``seen``, whatever its rule and its heads' shares.

    Args:
        pages: one layer's cache, on the CPU. row: ``[H, P]`` as the kernels take it. budgets: ``[H]`` int32. prompt: tokens of
            its prompt, where decisions depend on them.

    Returns:
        ``[H, seen]`` booleans.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens.
    """
    found, filled = torch.zeros(len(budgets), seen, dtype=torch.bool), None
    if rule.share_pages:
        shares = divided(pages, row, rule)
        row, filled = shares.row, shares.filled
    elif rule.threshold is not None:
        filled = counted(pages, row)
    roles = {"sinks": rule.sinks, "window": rule.window, "decide_every": rule.decide_every}
    for budget in budgets.unique().tolist():
        kept = Retention(budget, **roles, prompt_grid=rule.prompt_grid).for_prompt(prompt)
        slots = slot_positions(pages, row, seen, kept, filled)
        for head in (budgets == budget).nonzero().flatten().tolist():
            found[head, slots[head][slots[head] != STALE]] = True
    return found


def slot_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, filled: torch.Tensor | None = None
) -> torch.Tensor:
    """The position of the token in each slot in use, in slot order.

    Sinks and ring follow from ``seen``; long-range slots say it in their position words. Equal budgets only.

    Args:
        pages: one layer's cache.
        row: the request's block numbers ``[P]`` or, per head, ``[H, P]``; state blocks first.
        seen: tokens the request has processed.
        filled: ``[H]`` long-range slots that each head has filled, where that depends on the tokens.

    Returns:
        ``[H, n]`` int64, :data:`STALE` in ring slots whose token has been decided upon and in slots not filled; n is ``min(seen, budget)`` for
        decisions at every step.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens (slot 0's position word says how many).
    """
    layout = pages.layout
    heads = torch.arange(layout.num_kv_heads).unsqueeze(1)
    extent = retention.extent(seen, retention.budget)
    if filled is not None and retention.decided(seen) > retention.sinks:
        extent = retention.first_long + int(filled.max())
    slots = torch.arange(extent)
    blocks = row.expand(layout.num_kv_heads, -1)[:, layout.state_blocks + slots // layout.block_slots].long()
    words = pages.position[blocks.clamp_min(0), heads, slots % layout.block_slots].long()
    if seen > 0 and (words[:, 0] != seen).any():
        raise ValueError(f"these pages have seen {words[:, 0].tolist()} tokens, not {seen}")
    newest = slots + (seen - 1 - slots) // retention.ring * retention.ring  # the newest token of each residue
    ring = (slots >= retention.sinks) & (slots < retention.first_long)
    found = torch.where(slots < retention.sinks, slots, torch.where(ring, newest, words))
    if filled is not None:
        found = torch.where(slots < retention.first_long + filled.unsqueeze(1), found, STALE)
    return torch.where(retention.stale(slots, seen), STALE, found)


def retained_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, filled: torch.Tensor | None = None
) -> list[list[int]]:
    """The sorted positions a request holds after ``seen`` tokens, one list per KV head of one layer.

    Arguments and errors as in :func:`slot_positions`.
    """
    found = slot_positions(pages, row, seen, retention, filled)
    return [sorted(t for t in head if t != STALE) for head in found.tolist()]
