"""Unequal budgets within the blocks of a request (DESIGN "Pages").

Of a request's blocks each layer and head has one **region** a block. Where heads hold different numbers of tokens, a head's
pages may be regions of any layer and head: all those of a request's blocks are numbered, block by block, and handed out page
by page, the first page of every head before the second of any. As a sequence grows the heads whose budgets are full
claim no more, so that the regions claimed are always the first ones, and what is reserved is less than a block more than
what is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvpop_vllm.kernels.pages import PageLayout, Pages, cdiv


@dataclass(frozen=True)
class Shares:
    """Budgets of all heads of all layers that share a request's blocks.

    Attributes:
        budgets: ``[layers][H]``, tokens.
    """

    budgets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, budgets: torch.Tensor, budget: int) -> Shares | None:
        """Of budgets ``[layers, H]``; None where they are all B, which needs no regions."""
        if (budgets == budget).all():
            return None
        return cls(tuple(tuple(layer) for layer in budgets.tolist()))

    @property
    def layers(self) -> int:
        return len(self.budgets)

    @property
    def heads(self) -> int:
        return len(self.budgets[0])

    @cached_property
    def counts(self) -> Counter[int]:
        """How many heads have each budget."""
        return Counter(budget for layer in self.budgets for budget in layer)

    def blocks(self, state_blocks: int, block_slots: int, length: int) -> int:
        """Blocks that a request of ``length`` tokens holds, the same of every layer."""
        pages = sum(
            many * (state_blocks + cdiv(min(length, budget), block_slots)) for budget, many in self.counts.items()
        )
        return cdiv(pages, self.layers * self.heads)

    def pages_of_head(self, layout: PageLayout, layer: int, head: int) -> int:
        """State and slot pages of a head that is full."""
        budget = self.budgets[layer][head]
        return layout.blocks(budget, budget)


def divided_blocks(heads: int, budget: int, size: int) -> int:
    """Return the blocks of ``size`` slots that heads hold at most who divide ``heads * budget`` slots among them: the last page of each
    may be filled in part."""
    return cdiv(heads * (budget + size - 1) // size, heads)


def page_numbers(full: torch.Tensor, width: int) -> torch.Tensor:
    """Return in which order pages are handed out, ``[..., width, n]``: the first page of every head before the second of any.

    Args:
        full: ``[..., n]`` pages of each of n heads. Those that a head has not have the number of some other.
    """
    claimed = torch.arange(width, device=full.device).unsqueeze(1) < full.unsqueeze(-2)
    return claimed.flatten(-2).cumsum(-1).view_as(claimed) - 1


class RegionMap:
    """Which of a request's regions are the pages of which head.

    Args:
        shares: budgets of this rank's heads. layout: of all layers. num_blocks: of the pool. device: of the tables asked for.
    """

    def __init__(self, shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu"):
        self.shares, self.layout, self.num_blocks = shares, layout, num_blocks
        per_block = shares.layers * shares.heads
        full = torch.tensor(
            [[shares.pages_of_head(layout, i, h) for h in range(shares.heads)] for i in range(shares.layers)]
        )
        number = page_numbers(full.flatten(), int(full.max())).unflatten(1, full.shape)  # [P, layers, H]
        self.ordinal = (number // per_block).to(device)  # which of the request's blocks
        layer, head = number % per_block // shares.heads, number % shares.heads
        self.offset = (layer * num_blocks * shares.heads + head).to(device)
        self._budgets = torch.tensor(shares.budgets, dtype=torch.int32, device=device)

    def place(
        self, layer: int, tails: torch.Tensor, compressed: Sequence[bool] | torch.Tensor = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` int32 of a layer's heads, and the region numbers ``[R, H, P]`` int32 of their pages.

        Pages that have not been claimed yet, or never will be, have the number of some other region.

        Args:
            tails: ``[R, W]``, blocks of each request's state and slots. compressed: not used.
        """
        ordinal = self.ordinal[:, layer].T  # [H, P]
        block = tails.long()[:, ordinal.clamp_max(tails.shape[1] - 1)]
        rows = (block * self.shares.heads + self.offset[:, layer].T).int()
        return self._budgets[layer].expand(len(tails), -1), rows

    def view(self, storage: torch.Tensor) -> Pages:
        """All regions of the pool for the kernels: ``[layers * num_blocks * H, H, N * C]``, the same for every head.

        Args:
            storage: uint8, all layers one after another, each ``[num_blocks, H, N * C]``.

        Raises:
            ValueError: it holds less.
        """
        size, regions = self.layout.region_bytes, self.shares.layers * self.num_blocks * self.shares.heads
        if storage.numel() < regions * size:
            raise ValueError(
                f"{storage.numel()} bytes do not hold {self.num_blocks} blocks of {self.shares.layers} layers"
            )
        return self.layout.view(storage.as_strided((regions, self.shares.heads, size), (size, 0, 1)))


@functools.lru_cache(maxsize=8)
def region_map(shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu") -> RegionMap:
    """The map that all layers of an engine share."""
    return RegionMap(shares, layout, num_blocks, device)
