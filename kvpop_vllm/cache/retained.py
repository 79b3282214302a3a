"""Which tokens a request's pages hold, head by head."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.pages import Pages


def slot_positions(pages: Pages, row: torch.Tensor, seen: int, *, sinks: int, window: int, budget: int) -> torch.Tensor:
    """The position of the token in each valid slot, in slot order.

    Sinks and ring follow from ``seen``; long-range slots say it in their position words. Equal budgets only.

    Args:
        pages: one layer's cache.
        row: the request's block numbers ``[P]`` or, per head, ``[H, P]``; state blocks first.
        seen: tokens the request has processed.
        sinks, window, budget: ``s``, ``w`` and ``B`` in tokens.

    Returns:
        ``[H, min(seen, budget)]`` int64.

    Raises:
        ValueError: the pages have not seen ``seen`` tokens (slot 0's position word says how many).
    """
    layout = pages.layout
    heads = torch.arange(layout.num_kv_heads).unsqueeze(1)
    slots = torch.arange(min(seen, budget))
    blocks = row.expand(layout.num_kv_heads, -1)[:, layout.state_blocks + slots // layout.block_slots].long()
    words = pages.position[blocks, heads, slots % layout.block_slots].long()
    if seen > 0 and (words[:, 0] != seen).any():
        raise ValueError(f"these pages have seen {words[:, 0].tolist()} tokens, not {seen}")
    newest = slots + (seen - 1 - slots) // window * window  # the ring: the newest token of each residue
    ring = (slots >= sinks) & (slots < sinks + window)
    return torch.where(slots < sinks, slots, torch.where(ring, newest, words))


def retained_positions(
    pages: Pages, row: torch.Tensor, seen: int, *, sinks: int, window: int, budget: int
) -> list[list[int]]:
    """The sorted positions a request holds after ``seen`` tokens, one list per KV head of one layer.

    Arguments and errors as in :func:`slot_positions`.
    """
    held = slot_positions(pages, row, seen, sinks=sinks, window=window, budget=budget)
    return held.sort(dim=-1).values.tolist()
