"""Shares of the KV heads of a layer in the slots of a request, and their pages in a step (DESIGN "Unequal shares").

Each block of a request holds one **region** per layer and head. Equal heads have the same page numbers. If heads retain
different numbers of tokens, the pages of a head may be regions of any layer and head. The regions of a request's blocks
are numbered block by block and assigned page by page: the first page of every head before the second of any. As a
sequence grows, heads whose budgets are full claim no more pages. The claimed regions are therefore always the first
ones, and less than one block is reserved beyond what is used.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvpop_vllm.cache.pages import PageLayout, Pages
from kvpop_vllm.cache.ranks import Division, Shares

MOST_MAPS = 256
"""Largest number of request budgets whose maps to regions are cached."""


def page_numbers(full: torch.Tensor, width: int) -> torch.Tensor:
    """Return the number ``[..., width, n]`` of each page in the order of assignment.

    The first page of every head comes before the second of any.

    Args:
        full: ``[..., n]`` pages of each of n heads. Entries beyond a head's pages repeat the number of
            another page.
        width: pages per head in the result.
    """
    claimed = torch.arange(width, device=full.device).unsqueeze(1) < full.unsqueeze(-2)
    # the number of a claimed page is how many are claimed before it
    return claimed.flatten(-2).cumsum(-1).view_as(claimed) - 1


class EqualHeads:
    """Heads that all have the request's budget, and the same page numbers.

    The other ways to share slots, :class:`HeadBudgets`, :class:`RegionShares` and
    :class:`kvpop_vllm.cache.divided_heads.SharesByVotes`, have the same interface.

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
        windows: torch.Tensor | Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[R, H]`` of a layer's heads and their pages ``[R, H, P]``, both int32.

        Args:
            layer: index of the layer.
            tails: ``[R, W]``, state and slot blocks of each request.
            compressed: ``[R]``, True for requests whose prompt has been compressed.
            budgets: ``[R]`` or ``[R, H]`` int32, B of each request or head.
            windows: ``[R]``, w of each request.
        """
        budgets = budgets if budgets.dim() == 2 else budgets.unsqueeze(1).expand(-1, self.heads)
        return budgets, tails.unsqueeze(1).expand(-1, self.heads, -1)

    def place_layers(self, layer: int, *of_rows) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return :meth:`place` of a layer, and of layers that are placed with it, for rows whose tensors stay as they are.

        Arguments are those of :meth:`place`.
        """
        return {layer: self.place(layer, *of_rows)}


def by_request(budgets: torch.Tensor) -> torch.Tensor:
    """Return B ``[R]`` of requests whose budgets are ``[R]``, or ``[R, H]`` with equal heads as a GPU's rows have them."""
    return budgets if budgets.dim() == 1 else budgets[:, 0].contiguous()


class HeadBudgets(EqualHeads):
    """Budgets of a layer's heads that follow from the request's. The heads have the same page numbers.

    Args:
        budgets: B ``[H]`` of each head, by the request's B.
        device: device of the tables.
    """

    by_layer = True

    def __init__(self, budgets: Mapping[int, Sequence[int]], device: torch.device | str = "cpu"):
        requests = sorted(budgets)
        heads = [list(budgets[budget]) for budget in requests]
        super().__init__(len(heads[0]))
        self._tables = tuple(torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in (requests, heads))
        self._sent = tuple(table.to(device) for table in self._tables)

    def place(self, layer, tails, compressed, budgets, windows):
        """Return what :meth:`EqualHeads.place` does. Budgets lie where the given ones do."""
        requests, heads = self._tables if budgets.device.type == "cpu" else self._sent
        rows = torch.searchsorted(requests, by_request(budgets)).clamp_max(len(requests) - 1)  # padding has any budget
        return super().place(layer, tails, compressed, heads[rows], windows)


class RegionMap(NamedTuple):
    """Map from the pages of each head to the regions of a request's blocks, for requests with one budget.

    Attributes:
        ordinal: ``[layers, H, P]``, index into the request's blocks.
        offset: ``[layers, H, P]`` int32, what is added to H times the block to get the region.
        budgets: ``[layers, H]`` int32.
        on_cpu: the same on the CPU.
    """

    ordinal: torch.Tensor
    offset: torch.Tensor
    budgets: torch.Tensor
    on_cpu: torch.Tensor


class RegionShares(EqualHeads):
    """Budgets that follow from the request's: a map from the pages of each head to the regions of a request.

    Args:
        shares: budgets of this rank's heads for a request with the server's budget.
        layout: page layout, the same for all layers.
        num_blocks: blocks of the pool.
        device: device of the returned tables.
        division: budgets for requests with other budgets, None if there are none.
        shard: index of this rank among the shards of the division.
    """

    by_layer = True

    def __init__(
        self,
        shares: Shares,
        layout: PageLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        division: Division | None = None,
        shard: int = 0,
    ):
        self.shares, self.layout, self.num_blocks, self.device = shares, layout, num_blocks, device
        self.division = None if division is None or division.one_budget else division
        self.shard, self.server = shard, self._map(shares)
        self._maps: dict[tuple[int, int], RegionMap] = {}
        # by identity, and an entry goes with its tensor
        self._of_step = WeakIdKeyDictionary()

    def _map_of(self, size: tuple[int, int]) -> RegionMap:
        """Return the map for requests with a budget and a window."""
        if size not in self._maps:
            # requests may ask for any budget, so the maps of old ones must go
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            self._maps[size] = self._map(self.division.shares(*size)[self.shard])
        return self._maps[size]

    def _maps_of(
        self, budgets: torch.Tensor, windows: torch.Tensor | Sequence[int]
    ) -> list[tuple[RegionMap, list[int]]]:
        """Return the maps of a step's requests and the indices of the requests of each, made once for all layers."""
        # the tensor of budgets is the same for all layers of a step, and a new one in the next
        maps = self._of_step.get(budgets)
        if maps is None:
            rows: dict[tuple[int, int], list[int]] = {}
            sizes = zip(by_request(budgets).tolist(), torch.as_tensor(windows).tolist(), strict=True)
            for row, size in enumerate(sizes):
                rows.setdefault(size, []).append(row)
            maps = self._of_step[budgets] = [(self._map_of(size), chosen) for size, chosen in rows.items()]
        return maps

    def _map(self, shares: Shares) -> RegionMap:
        """Return the map for requests with these budgets."""
        layout, per_block = self.layout, shares.layers * shares.heads
        full = torch.tensor([[layout.blocks(budget, budget) for budget in layer] for layer in shares.budgets])
        # regions are handed out in this order: consecutive numbers fill one block of all layers after another
        number = page_numbers(full.flatten(), int(full.max())).T.unflatten(0, full.shape)  # [layers, H, P]
        layer, head = number % per_block // shares.heads, number % shares.heads
        offset = layer * self.num_blocks * shares.heads + head
        budgets = torch.tensor(shares.budgets, dtype=torch.int32, device="cpu")
        sent = (tensor.contiguous().to(self.device) for tensor in (number // per_block, offset.int(), budgets))
        return RegionMap(*sent, budgets)

    def place(self, layer, tails, compressed, budgets, windows):
        """Return what :meth:`EqualHeads.place` does; budgets of heads follow from those of their requests.

        Entries of pages that are not claimed are the number of another region. Budgets lie where the given ones do.
        """
        layer -= self.shares.first
        by_head, tables = self._place(slice(layer, layer + 1), tails, budgets, windows)
        return by_head[0], tables[:, 0]

    def place_layers(self, layer, tails, compressed, budgets, windows):
        """Return what :meth:`EqualHeads.place_layers` does, for all layers of the rank.

        To call torch takes longer than what it computes.
        """
        by_head, tables = self._place(slice(None), tails, budgets, windows)
        return dict(enumerate(zip(by_head.unbind(), tables.unbind(1), strict=True), self.shares.first))

    def _place(
        self, layers: slice, tails: torch.Tensor, budgets: torch.Tensor, windows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return budgets ``[L, R, H]`` and pages ``[R, L, H, P]`` in L layers of this rank."""
        on_cpu = budgets.device.type == "cpu"
        if self.division is None:
            return self._place_alike(self.server, layers, tails, on_cpu)
        maps = self._maps_of(budgets, windows)
        if len(maps) == 1:
            return self._place_alike(maps[0][0], layers, tails, on_cpu)
        count, width = len(maps[0][0].budgets[layers]), max(regions.ordinal.shape[2] for regions, _ in maps)
        table = tails.new_zeros(len(tails), count, self.shares.heads, width)
        by_head = budgets.new_zeros(count, len(tails), self.shares.heads)
        for regions, rows in maps:
            alike = self._place_alike(regions, layers, tails[rows], on_cpu)
            by_head[:, rows], table[rows, :, :, : regions.ordinal.shape[2]] = alike
        return by_head, table

    def _place_alike(self, regions: RegionMap, layers: slice, tails: torch.Tensor, on_cpu: bool) -> tuple:
        """Return what :meth:`_place` does, for requests with the budgets of a map."""
        # pages beyond a short request's row are not claimed, and no kernel reads them
        ordinal = regions.ordinal[layers].clamp_max(tails.shape[1] - 1)
        blocks = tails.int().index_select(1, ordinal.flatten()).view(len(tails), *ordinal.shape)
        by_head = (regions.on_cpu if on_cpu else regions.budgets)[layers]
        return by_head.unsqueeze(1).expand(-1, len(tails), -1), blocks.mul_(self.shares.heads).add_(
            regions.offset[layers]
        )

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
        # stride 0 over heads: a page number is a region's, whichever head it belongs to
        return self.layout.view(storage.as_strided((regions, self.shares.heads, size), (size, 0, 1)))


cached_region_shares = functools.lru_cache(maxsize=8)(RegionShares)
"""The cached map that all layers of a rank share. Arguments are those of :class:`RegionShares`."""
