"""Shares of the KV heads of a layer in the slots of a request (DESIGN "Unequal shares").

Each block of a request holds one **region** per layer and head. Equal heads have the same page numbers. If heads retain
different numbers of tokens, the pages of a head may be regions of any layer and head. The regions of a request's blocks
are numbered block by block and assigned page by page: the first page of every head before the second of any. As a
sequence grows, heads whose budgets are full claim no more pages. The claimed regions are therefore always the first
ones, and less than one block is reserved beyond what is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvpop_vllm.cache.pages import PageLayout, Pages, cdiv
from kvpop_vllm.requests import Compression


@dataclass(frozen=True)
class Shares:
    """Unequal budgets of all heads of all layers that share a request's blocks.

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


class EqualHeads:
    """Heads that all have the request's budget, and the same page numbers.

    The other ways to share slots, :class:`HeadBudgets` and :class:`SharesByVotes`, have the same interface.

    Args:
        heads: H.

    Attributes:
        by_layer: True if layers differ, so that each has a batch of its own.
    """

    by_layer = False

    def __init__(self, heads: int):
        self.heads = heads

    def place(
        self,
        layer: int,
        tails: torch.Tensor,
        compressed: Sequence[bool] | torch.Tensor,
        budgets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` of a layer's heads and their pages ``[R, H, P]``, both int32.

        Args:
            layer: index of the layer.
            tails: ``[R, W]``, state and slot blocks of each request.
            compressed: ``[R]``, True for requests whose prompt has been compressed.
            budgets: ``[R]`` or ``[R, H]`` int32, B of each request or head.
        """
        budgets = budgets if budgets.dim() == 2 else budgets.unsqueeze(1).expand(-1, self.heads)
        return budgets, tails.unsqueeze(1).expand(-1, self.heads, -1)


class HeadBudgets(EqualHeads):
    """Budgets of heads that are fixed for all requests. The heads of a layer have the same page numbers.

    Args:
        budgets: ``[layers, H]`` int32 on the CPU.
        device: device of the tables.
    """

    by_layer = True

    def __init__(self, budgets: torch.Tensor, device: torch.device | str = "cpu"):
        super().__init__(budgets.shape[1])
        self._budgets, self._sent = budgets, budgets.to(device)

    def place(self, layer, tails, compressed, budgets):
        """Return what :meth:`EqualHeads.place` does; the fixed budgets take the place of those that are given.

        They lie where the given ones do.
        """
        table = self._budgets if budgets.device.type == "cpu" else self._sent
        return super().place(layer, tails, compressed, table[layer].expand(len(tails), -1))


class FixedShares(HeadBudgets):
    """Budgets that are fixed for all requests: a map from the pages of each head to the regions of a request.

    Args:
        shares: budgets of this rank's heads.
        layout: page layout, the same for all layers.
        num_blocks: blocks of the pool.
        device: device of the returned tables.
    """

    def __init__(self, shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu"):
        super().__init__(torch.tensor(shares.budgets, dtype=torch.int32, device="cpu"), device)
        self.shares, self.layout, self.num_blocks = shares, layout, num_blocks
        per_block = shares.layers * shares.heads
        full = torch.tensor([[layout.blocks(budget, budget) for budget in layer] for layer in shares.budgets])
        number = page_numbers(full.flatten(), int(full.max())).unflatten(1, full.shape)  # [P, layers, H]
        self.ordinal = (number // per_block).to(device)  # index into the request's blocks
        layer, head = number % per_block // shares.heads, number % shares.heads
        self.offset = (layer * num_blocks * shares.heads + head).to(device)

    def place(self, layer, tails, compressed, budgets):
        """Return what :meth:`HeadBudgets.place` does, with regions of each head's own.

        Entries of pages that are not claimed are the number of another region.
        """
        budgets, _ = super().place(layer, tails, compressed, budgets)
        ordinal = self.ordinal[:, layer].T  # [H, P]
        block = tails.long()[:, ordinal.clamp_max(tails.shape[1] - 1)]
        rows = (block * self.shares.heads + self.offset[:, layer].T).int()
        return budgets, rows

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
def fixed_shares(
    shares: Shares, layout: PageLayout, num_blocks: int, device: torch.device | str = "cpu"
) -> FixedShares:
    """Return the cached map that all layers of an engine share."""
    return FixedShares(shares, layout, num_blocks, device)


class SharesByVotes(EqualHeads):
    """Heads that divide a layer's slots when the prompt is compressed (Ada-KV, arXiv:2407.11550).

    A request holds as many blocks of a layer as with equal heads, and up to one more. Regions are assigned within one
    layer. The budget of each head is stored in its state, so that the page table can be derived from the blocks.

    Args:
        blocks: pages of the layer, indexed by block.
        compression: way in which prompts are compressed.
        budget: B, the mean budget of the heads.
    """

    by_layer = True

    def __init__(self, blocks: Pages, compression: Compression, budget: int):
        self.pages, self.compression, self.budget = blocks.by_region(), compression, budget
        layout = blocks.layout
        self.blocks = layout.state_blocks + divided_blocks(layout.num_kv_heads, budget, layout.block_slots)

    def place(self, layer, tails, compressed, budgets):
        """Return what :meth:`EqualHeads.place` does.

        If the prompt of a request has not been compressed yet, its heads are equal and all its blocks are listed.
        """
        layout = self.pages.layout
        heads = torch.arange(layout.num_kv_heads, device=tails.device)
        rows = tails.unsqueeze(1) * layout.num_kv_heads + heads.unsqueeze(1)
        divided = torch.as_tensor(compressed, device=tails.device).unsqueeze(1)
        stored, _ = load_page_table(self.pages, rows, self.compression, 1)
        budgets = torch.where(divided, stored, self.budget)
        width = max(self.blocks, layout.blocks(most := int(budgets.max()), most))  # equal heads: all that is held
        budgets, table = build_page_table(layout, rows, budgets, width)
        plain = rows[..., torch.arange(width, device=rows.device).clamp_max(rows.shape[2] - 1)].int()
        return budgets, torch.where(divided.unsqueeze(2), table, plain)


def store_budgets(pages: Pages, row: torch.Tensor, budgets: torch.Tensor, compression: Compression) -> None:
    """Write ``budgets [H]`` to a request's state.

    Args:
        pages: pages of the layer, indexed by region.
        row: ``[H, W]`` regions of the request's blocks, as for equal heads.
        budgets: B of each head.
        compression: way in which prompts are compressed, which determines the offset in the state.
    """
    column, word = _place(pages.layout, compression)
    heads = torch.arange(len(row), device=row.device)
    pages.put(pages.state, (row[:, column].long(), heads, torch.full_like(heads, word)), budgets.float())


def load_page_table(
    pages: Pages, rows: torch.Tensor, compression: Compression, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the budgets ``[R, H]`` and pages ``[R, H, P]``, int32, of requests with compressed prompts.

    Args:
        pages: pages of the layer, indexed by region.
        rows: ``[R, H, W]`` regions of the requests' blocks, as for equal heads.
        compression: way in which prompts are compressed, which determines the offset in the state.
        width: P; by default that of the head with the most pages.
    """
    column, word = _place(pages.layout, compression)
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


def _place(layout: PageLayout, compression: Compression) -> tuple[int, int]:
    """Return the state page that holds a head's budget, and the offset within that page."""
    return divmod(compression.state_floats(layout.head_size) - 1, layout.region_bytes // 4)
