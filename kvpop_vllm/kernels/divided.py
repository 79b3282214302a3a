"""Heads that divide a layer's slots when the prompt is compressed (Ada-KV, arXiv:2407.11550).

A request holds as many blocks of a layer as with equal heads, and up to one more. Their regions are numbered
and assigned as in :mod:`kvpop_vllm.kernels.regions`, within one layer. The budget of each head is stored in
its state, so that the page table of the request can be derived from its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpop_vllm.kernels.ops import PromptVotes
from kvpop_vllm.kernels.pages import PageLayout, Pages
from kvpop_vllm.kernels.regions import divided_blocks, page_numbers


def divide(votes: torch.Tensor, budget: int, first: int, safe: float) -> torch.Tensor:
    """Return the budgets ``[H]`` int32 of heads that divide ``H * budget`` slots by votes.

    Each head has ``first`` slots for sinks and window. It retains its ``safe * budget`` best tokens,
    including sinks and window. The other slots go to the tokens with the most votes of all heads; of equal
    votes to the newer token, then to the lower head.

    Args:
        votes: ``[H, c]`` float32, votes for the tokens between sinks and window, oldest first.
        budget: B, the mean budget.
        first: s + w.
        safe: share of the budget that is guaranteed to every head.
    """
    heads, candidates = votes.shape
    room = budget - first
    if candidates <= room:
        return torch.full((heads,), budget, dtype=torch.int32, device=votes.device)
    newest_first = votes.flip(1)
    sure = max(0, int(safe * budget) - first)
    best = newest_first.argsort(dim=1, descending=True, stable=True)[:, :sure]
    asked = newest_first.scatter(1, best, torch.inf).T.flatten()
    winners = asked.argsort(descending=True, stable=True)[: heads * room] % heads
    return first + winners.bincount(minlength=heads).int()


def store_budgets(pages: Pages, row: torch.Tensor, budgets: torch.Tensor, votes: PromptVotes) -> None:
    """Write ``budgets [H]`` to a request's state.

    Args:
        pages: pages of the layer, indexed by region.
        row: ``[H, W]`` regions of the request's blocks, as for equal heads.
        budgets: B of each head.
        votes: parameters of the vote, which determine the offset in the state.
    """
    column, word = _place(pages.layout, votes)
    heads = torch.arange(len(row), device=row.device)
    pages.put(pages.state, (row[:, column].long(), heads, torch.full_like(heads, word)), budgets.float())


def load_page_table(
    pages: Pages, rows: torch.Tensor, votes: PromptVotes, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the budgets ``[R, H]`` and pages ``[R, H, P]``, int32, of requests with compressed prompts.

    Args:
        pages: pages of the layer, indexed by region.
        rows: ``[R, H, W]`` regions of the requests' blocks, as for equal heads.
        votes: parameters of the vote, which determine the offset in the state.
        width: P; by default that of the head with the most pages.
    """
    column, word = _place(pages.layout, votes)
    words = pages.state[:, 0][rows[:, :, column].long(), word]
    most = rows.shape[1] * rows.shape[2] * pages.layout.block_slots  # padding rows may hold any value
    return build_page_table(pages.layout, rows, words.nan_to_num(1).clamp(1, most).int(), width)


def build_page_table(
    layout: PageLayout, rows: torch.Tensor, budgets: torch.Tensor, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``budgets [R, H]`` and the pages ``[R, H, P]`` int32 of heads with these budgets.

    Args:
        layout: page layout of the layer.
        rows: as in :func:`load_page_table`.
        budgets: ``[R, H]`` int32.
        width: as in :func:`load_page_table`.
    """
    full = layout.state_blocks + (budgets + layout.block_slots - 1) // layout.block_slots
    heads, number = rows.shape[1], page_numbers(full, int(full.max()) if width is None else width).transpose(1, 2)
    at = (number // heads).clamp_max(rows.shape[2] - 1)
    request = torch.arange(len(rows), device=rows.device).view(-1, 1, 1)
    return budgets, rows[request, number % heads, at].int()


class DividedRegions:
    """Page tables of a layer whose heads divide their slots.

    Args:
        own: pages of the layer, indexed by block.
        votes: parameters of the vote that compresses prompts.
        budget: B, the mean budget of the heads.
    """

    def __init__(self, own: Pages, votes: PromptVotes, budget: int):
        self.pages, self.votes, self.budget = own.by_region(), votes, budget
        layout = own.layout
        self.held = layout.state_blocks + divided_blocks(layout.num_kv_heads, budget, layout.block_slots)

    def place(
        self, layer: int, tails: torch.Tensor, compressed: Sequence[bool] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` and pages ``[R, H, P]``, int32, of requests.

        If the prompt of a request has not been compressed yet, its heads are equal and all its blocks are
        listed.

        Args:
            layer: not used.
            tails: ``[R, W]``, state and slot blocks of each request.
            compressed: ``[R]``, True for requests whose prompt has been compressed.
        """
        layout = self.pages.layout
        heads = torch.arange(layout.num_kv_heads, device=tails.device)
        rows = tails.unsqueeze(1) * layout.num_kv_heads + heads.unsqueeze(1)
        known = torch.as_tensor(compressed, device=tails.device).unsqueeze(1)
        found, _ = load_page_table(self.pages, rows, self.votes, 1)
        budgets = torch.where(known, found, self.budget)
        width = max(self.held, layout.blocks(most := int(budgets.max()), most))  # equal heads: all that is held
        budgets, found = build_page_table(layout, rows, budgets, width)
        plain = rows[..., torch.arange(width, device=rows.device).clamp_max(rows.shape[2] - 1)].int()
        return budgets, torch.where(known.unsqueeze(2), found, plain)


def _place(layout: PageLayout, votes: PromptVotes) -> tuple[int, int]:
    """Return the state page that holds a head's budget, and the offset within that page."""
    return divmod(votes.state_floats(layout.head_size) - 1, layout.region_bytes // 4)
