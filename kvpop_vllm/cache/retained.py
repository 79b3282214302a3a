"""Which tokens a request's pages hold, head by head."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.pages import Pages
from kvpop_vllm.roles import Retention

STALE = -1
"""Stands for the position of a slot whose token is not held any more."""


def slot_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, counted: bool = False
) -> torch.Tensor:
    """The position of the token in each slot in use, in slot order.

    Sinks and ring follow from ``seen``; long-range slots say it in their position words. Equal budgets only.

    Args:
        pages: one layer's cache.
        row: the request's block numbers ``[P]`` or, per head, ``[H, P]``; state blocks first.
        seen: tokens the request has processed.
        counted: how many long-range slots a head fills depends on its tokens (a rule with a threshold), and lies in slot 0's
            score word.

    Returns:
        ``[H, n]`` int64, :data:`STALE` in ring slots whose token has been decided upon, and in slots that are not filled; n is ``min(seen, budget)`` for
        decisions at every step.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens (slot 0's position word says how many).
    """
    layout = pages.layout
    heads = torch.arange(layout.num_kv_heads).unsqueeze(1)
    slots = torch.arange(retention.extent(seen, retention.budget))
    blocks = row.expand(layout.num_kv_heads, -1)[:, layout.state_blocks + slots // layout.block_slots].long()
    words = pages.position[blocks, heads, slots % layout.block_slots].long()
    if seen > 0 and (words[:, 0] != seen).any():
        raise ValueError(f"these pages have seen {words[:, 0].tolist()} tokens, not {seen}")
    newest = slots + (seen - 1 - slots) // retention.ring * retention.ring  # the newest token of each residue
    ring = (slots >= retention.sinks) & (slots < retention.first_long)
    found = torch.where(slots < retention.sinks, slots, torch.where(ring, newest, words))
    stale = retention.stale(slots, seen)
    if counted:
        filled = pages.score[blocks[:, :1], heads, 0] if seen > 0 else torch.zeros(len(heads), 1)
        stale = stale | (slots - retention.first_long >= filled)
    return torch.where(stale, STALE, found)


def retained_positions(
    pages: Pages, row: torch.Tensor, seen: int, retention: Retention, counted: bool = False
) -> list[list[int]]:
    """The sorted positions a request holds after ``seen`` tokens, one list per KV head of one layer.

    Arguments and errors as in :func:`slot_positions`.
    """
    found = slot_positions(pages, row, seen, retention, counted)
    return [sorted(t for t in head if t != STALE) for head in found.tolist()]
