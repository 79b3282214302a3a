"""Unequal budgets within the blocks of a request (DESIGN "Pages").

Each block of a request holds one **region** per layer and head. If heads retain different numbers of tokens,
the pages of a head may be regions of any layer and head. The regions of a request's blocks are numbered block
by block and assigned page by page: the first page of every head before the second of any. As a sequence
grows, heads whose budgets are full claim no more pages. The claimed regions are therefore always the first
ones, and less than one block is reserved beyond what is used.
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
        budgets: ``[layers][H]``, in tokens.
    """

    budgets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, budgets: torch.Tensor, budget: int) -> Shares | None:
        """Return the shares of budgets ``[layers, H]``, or None if all of them equal ``budget``."""
        if (budgets == budget).all():
            return None
        return cls(tuple(tuple(layer) for layer in budgets.tolist()))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.budgets)

    @property
    def heads(self) -> int:
        """Number H of KV heads per layer."""
        return len(self.budgets[0])

    @cached_property
    def counts(self) -> Counter[int]:
        """Number of heads with each budget."""
        return Counter(budget for layer in self.budgets for budget in layer)

    def blocks(self, state_blocks: int, block_slots: int, length: int) -> int:
        """Return the number of blocks of a request of ``length`` tokens, which is the same for every layer.

        Args:
            state_blocks: state pages per head.
            block_slots: N.
            length: tokens of the request.
        """
        pages = sum(
            many * (state_blocks + cdiv(min(length, budget), block_slots)) for budget, many in self.counts.items()
        )
        return cdiv(pages, self.layers * self.heads)

    def pages_of_head(self, layout: PageLayout, layer: int, head: int) -> int:
        """Return the number of state and slot pages of a head whose budget is full."""
        budget = self.budgets[layer][head]
        return layout.blocks(budget, budget)


def divided_blocks(heads: int, budget: int, size: int) -> int:
    """Return the largest number of blocks of heads that divide ``heads * budget`` slots among them.

    The last page of each head may be partially filled.

    Args:
        heads: H.
        budget: mean budget per head.
        size: slots per block.
    """
    return cdiv(heads * (budget + size - 1) // size, heads)


def page_numbers(full: torch.Tensor, width: int) -> torch.Tensor:
    """Return the number ``[..., width, n]`` of each page in the order of assignment.

    The first page of every head comes before the second of any.

    Args:
        full: ``[..., n]`` pages of each of n heads. Entries beyond a head's pages repeat the number of
            another page.
        width: pages per head in the result.
    """
    claimed = torch.arange(width, device=full.device).unsqueeze(1) < full.unsqueeze(-2)
    return claimed.flatten(-2).cumsum(-1).view_as(claimed) - 1


class RegionMap:
    """Map from the pages of each head to the regions of a request.

    Args:
        shares: budgets of this rank's heads.
        layout: page layout, the same for all layers.
        num_blocks: blocks of the pool.
        device: device of the returned tables.
    """

    def __init__(self, shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu"):
        self.shares, self.layout, self.num_blocks = shares, layout, num_blocks
        per_block = shares.layers * shares.heads
        full = torch.tensor(
            [[shares.pages_of_head(layout, i, h) for h in range(shares.heads)] for i in range(shares.layers)]
        )
        number = page_numbers(full.flatten(), int(full.max())).unflatten(1, full.shape)  # [P, layers, H]
        self.ordinal = (number // per_block).to(device)  # index into the request's blocks
        layer, head = number % per_block // shares.heads, number % shares.heads
        self.offset = (layer * num_blocks * shares.heads + head).to(device)
        self._budgets = torch.tensor(shares.budgets, dtype=torch.int32, device=device)

    def place(
        self, layer: int, tails: torch.Tensor, compressed: Sequence[bool] | torch.Tensor = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` of a layer's heads and the regions ``[R, H, P]`` of their pages.

        Both are int32. Entries of pages that are not claimed are the number of another region.

        Args:
            layer: index of the layer.
            tails: ``[R, W]``, state and slot blocks of each request.
            compressed: not used.
        """
        ordinal = self.ordinal[:, layer].T  # [H, P]
        block = tails.long()[:, ordinal.clamp_max(tails.shape[1] - 1)]
        rows = (block * self.shares.heads + self.offset[:, layer].T).int()
        return self._budgets[layer].expand(len(tails), -1), rows

    def view(self, storage: torch.Tensor) -> Pages:
        """Return all regions of the pool: ``[layers * num_blocks * H, H, N * C]``, the same for every head.

        Args:
            storage: uint8, all layers one after another, each ``[num_blocks, H, N * C]``.

        Raises:
            ValueError: ``storage`` is smaller than that.
        """
        size, regions = self.layout.region_bytes, self.shares.layers * self.num_blocks * self.shares.heads
        if storage.numel() < regions * size:
            raise ValueError(
                f"{storage.numel()} bytes do not hold {self.num_blocks} blocks of {self.shares.layers} layers"
            )
        return self.layout.view(storage.as_strided((regions, self.shares.heads, size), (size, 0, 1)))


@functools.lru_cache(maxsize=8)
def region_map(shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu") -> RegionMap:
    """Return the cached map that all layers of an engine share."""
    return RegionMap(shares, layout, num_blocks, device)
