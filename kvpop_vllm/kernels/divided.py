"""A layer's heads that divide the budget of each request among them when its prompt is compressed (Ada-KV, arXiv:2407.11550).

A request holds a layer's blocks as if its heads were equal, and up to one more. Their regions are numbered and handed out as in
:mod:`kvpop_vllm.kernels.regions`, of one layer alone. What each head has got lies in its state, so that whoever holds a request's blocks
can tell where its pages are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpop_vllm.kernels.ops import PromptVotes
from kvpop_vllm.kernels.pages import PageLayout, Pages
from kvpop_vllm.kernels.regions import divided_blocks, page_numbers


def divide(votes: torch.Tensor, budget: int, first: int, safe: float) -> torch.Tensor:
    """Return the budgets ``[H]`` int32 of heads that share ``H * budget`` slots by the votes for their tokens.

    Each head has ``first`` slots for sinks and window, and keeps its ``safe * budget`` best tokens, those of sinks and window counted
    among them. The rest goes to the tokens of most votes, whosever they are; of equal votes to the newer, then to the lower head.

    Args:
        votes: ``[H, c]`` float32, for the tokens behind the sinks and before the window, oldest first.
        budget: B, the mean. first: s + w.
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


def keep_budgets(pages: Pages, row: torch.Tensor, budgets: torch.Tensor, votes: PromptVotes) -> None:
    """Write ``budgets [H]`` to a request's state; row ``[H, W]``: regions of its blocks, as of equal heads."""
    column, word = _place(pages.layout, votes)
    heads = torch.arange(len(row), device=row.device)
    pages.put(pages.state, (row[:, column].long(), heads, torch.full_like(heads, word)), budgets.float())


def settle(
    pages: Pages, rows: torch.Tensor, votes: PromptVotes, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the budgets ``[R, H]`` int32 and pages ``[R, H, P]`` int32 of requests whose prompts have been compressed.

    Args:
        pages: the layer's, by region. rows: ``[R, H, W]`` regions of their blocks, as of equal heads. width: P; by default that of the
            head that has most.
    """
    column, word = _place(pages.layout, votes)
    words = pages.state[:, 0][rows[:, :, column].long(), word]
    most = rows.shape[1] * rows.shape[2] * pages.layout.block_slots  # a row of no request may say anything
    return arranged(pages.layout, rows, words.nan_to_num(1).clamp(1, most).int(), width)


def arranged(
    layout: PageLayout, rows: torch.Tensor, budgets: torch.Tensor, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``budgets [R, H]`` and the pages ``[R, H, P]`` int32 of such heads; rows, width as in :func:`settle`."""
    full = layout.state_blocks + (budgets + layout.block_slots - 1) // layout.block_slots
    heads, number = rows.shape[1], page_numbers(full, int(full.max()) if width is None else width).transpose(1, 2)
    at = (number // heads).clamp_max(rows.shape[2] - 1)
    request = torch.arange(len(rows), device=rows.device).view(-1, 1, 1)
    return budgets, rows[request, number % heads, at].int()


class DividedRegions:
    """Where the pages of a layer's requests are.

    Args:
        own: the layer's pages, by block. votes: by which prompts are compressed. budget: B, the mean of heads.
    """

    def __init__(self, own: Pages, votes: PromptVotes, budget: int):
        self.pages, self.votes, self.budget = own.by_region(), votes, budget
        layout = own.layout
        self.held = layout.state_blocks + divided_blocks(layout.num_kv_heads, budget, layout.block_slots)

    def place(
        self, layer: int, tails: torch.Tensor, compressed: Sequence[bool] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` int32 and pages ``[R, H, P]`` int32 of requests; as of equal heads, and all that is held, where
        the prompt has not been compressed yet.

        Args:
            layer: not used. tails: ``[R, W]``, blocks of each request's state and slots. compressed: of each, whether its prompt has been.
        """
        layout = self.pages.layout
        heads = torch.arange(layout.num_kv_heads, device=tails.device)
        rows = tails.unsqueeze(1) * layout.num_kv_heads + heads.unsqueeze(1)
        known = torch.as_tensor(compressed, device=tails.device).unsqueeze(1)
        found, _ = settle(self.pages, rows, self.votes, 1)
        budgets = torch.where(known, found, self.budget)
        width = max(self.held, layout.blocks(most := int(budgets.max()), most))  # equal heads: all that is held
        budgets, found = arranged(layout, rows, budgets, width)
        plain = rows[..., torch.arange(width, device=rows.device).clamp_max(rows.shape[2] - 1)].int()
        return budgets, torch.where(known.unsqueeze(2), found, plain)


def _place(layout: PageLayout, votes: PromptVotes) -> tuple[int, int]:
    """Return in which of a head's state pages its budget lies, and in which word of that."""
    return divmod(votes.state_floats(layout.head_size) - 1, layout.region_bytes // 4)
