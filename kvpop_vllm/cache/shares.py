"""Shares of the KV heads of a layer in the slots of a request (DESIGN "Unequal shares").

Each block of a request holds one **region** per layer and head. Equal heads have the same page numbers. If heads retain
different numbers of tokens, the pages of a head may be regions of any layer and head. The regions of a request's blocks
are numbered block by block and assigned page by page: the first page of every head before the second of any. As a
sequence grows, heads whose budgets are full claim no more pages. The claimed regions are therefore always the first
ones, and less than one block is reserved beyond what is used.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kvpop_vllm.cache.pages import PageLayout, Pages, cdiv
from kvpop_vllm.requests import Compression
from kvpop_vllm.roles import Retention

MOST_DIVIDED, MOST_MAPS = 1024, 256
"""Largest numbers of request budgets whose shares, and whose maps to regions, are cached."""


@dataclass(frozen=True)
class Shares:
    """Unequal budgets of all heads of all layers that share a request's blocks: those of one rank.

    Attributes:
        budgets: ``[layers][H]``, in tokens.
        first: index of the first of these layers.
    """

    budgets: tuple[tuple[int, ...], ...]
    first: int = 0

    @classmethod
    def of(cls, budgets: torch.Tensor, budget: int) -> Shares | None:
        """Return the shares of budgets ``[layers, H]``, or None if all of them equal ``budget``."""
        if (budgets == budget).all():
            return None
        return cls(tuple(tuple(layer) for layer in budgets.tolist()))

    def of_shard(self, shard: Shard) -> Shares:
        """Return the shares of the layers and heads of a rank, if these are the shares of a whole model."""
        layers = self.budgets[slice(*shard.layers)]
        return Shares(tuple(layer[slice(*shard.heads)] for layer in layers), shard.layers[0])

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


class Shard(NamedTuple):
    """Layers and KV heads of a rank: of both the first one and the one after the last."""

    layers: tuple[int, int]
    heads: tuple[int, int]


def heads_of_rank(rank: int, ranks: int, total: int, held: int) -> slice:
    """Return the KV heads that a tensor-parallel rank holds.

    With more ranks than heads, several ranks hold the same head.

    Args:
        rank: the rank.
        ranks: number of ranks.
        total: KV heads of the model.
        held: KV heads of each rank.
    """
    first = rank * total // ranks
    return slice(first, first + held)


def layers_of_stages(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return the first layer of each pipeline stage and the one after its last, as vLLM divides layers.

    Layers that remain go to the stages before the last one, one to each.
    """
    remaining, sizes = layers % stages, [layers // stages] * stages
    for i in range(2, remaining + 2):
        sizes[-i] += 1
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def shards_of(stages: Sequence[tuple[int, int]], heads: int, ranks: int) -> tuple[Shard, ...]:
    """Return the shards of a model: all tensor-parallel ranks of the first pipeline stage, then those of the next.

    Args:
        stages: layers of each pipeline stage, see :func:`layers_of_stages`.
        heads: KV heads of the model.
        ranks: number of tensor-parallel ranks.
    """
    slices = [heads_of_rank(rank, ranks, heads, max(1, heads // ranks)) for rank in range(ranks)]
    return tuple(Shard(layers, (chosen.start, chosen.stop)) for layers in stages for chosen in slices)


@dataclass(frozen=True)
class FixedBudgets:
    """Allocator that gives the same ``budgets [layers][H]`` to every request."""

    budgets: tuple[tuple[int, ...], ...]

    def __call__(self, retention: Retention, layers: int, heads: int) -> torch.Tensor:
        """Return the budgets ``[layers, H]`` int32."""
        return torch.tensor(self.budgets, dtype=torch.int32)


@dataclass(frozen=True)
class Division:
    """Division of the slots of a request among all heads of a model, and of these heads among ranks.

    A request holds as many blocks in every rank: those of the rank that needs most. Two divisions are equal if they
    give equal budgets, also in different processes.

    Attributes:
        allocate: function ``(retention, layers, H) -> budgets [layers, H]`` int32, a function of a module or an object
            that can be compared.
        sinks: s.
        layers: layers of the model.
        heads: KV heads of the model.
        shards: layers and heads of each rank (:func:`shards_of`).
        one_budget: True if all requests have the server's budget.
    """

    allocate: Callable[[Retention, int, int], torch.Tensor]
    sinks: int
    layers: int
    heads: int
    shards: tuple[Shard, ...]
    one_budget: bool = False

    def all_heads(self, budget: int, window: int) -> Shares:
        """Return the budgets of all heads of the model for a request with ``budget`` tokens and this window."""
        return self._divided(budget, window)[0]

    def shares(self, budget: int, window: int) -> tuple[Shares, ...]:
        """Return the budgets of the heads of each rank for a request with ``budget`` tokens and this window."""
        return self._divided(budget, window)[1]

    @cached_property
    def _cached(self) -> dict[tuple[int, int], tuple[Shares, tuple[Shares, ...]]]:
        return {}

    def _divided(self, budget: int, window: int) -> tuple[Shares, tuple[Shares, ...]]:
        """Return the budgets of all heads, and of the heads of each rank."""
        size = budget, window
        if size not in self._cached:
            if len(self._cached) >= MOST_DIVIDED:
                self._cached.clear()
            with torch.device("cpu"):  # a model may be in the making on the meta device
                roles = Retention(budget, self.sinks, window)
                shares = Shares(tuple(map(tuple, self.allocate(roles, self.layers, self.heads).tolist())))
            self._cached[size] = shares, tuple(map(shares.of_shard, self.shards))
        return self._cached[size]


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
        ordinal: ``[P, layers, H]``, index into the request's blocks.
        offset: ``[P, layers, H]``, what is added to H times the block to get the region.
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
        division: budgets for requests with other budgets; None if there are none.
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
        self._of_step = WeakIdKeyDictionary()

    def _map_of(self, size: tuple[int, int]) -> RegionMap:
        """Return the map for requests with a budget and a window."""
        if size not in self._maps:
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            self._maps[size] = self._map(self.division.shares(*size)[self.shard])
        return self._maps[size]

    def _maps_of(
        self, budgets: torch.Tensor, windows: torch.Tensor | Sequence[int]
    ) -> list[tuple[RegionMap, list[int]]]:
        """Return the maps of a step's requests and the indices of the requests of each, made once for all layers."""
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
        number = page_numbers(full.flatten(), int(full.max())).unflatten(1, full.shape)  # [P, layers, H]
        layer, head = number % per_block // shares.heads, number % shares.heads
        offset = layer * self.num_blocks * shares.heads + head
        budgets = torch.tensor(shares.budgets, dtype=torch.int32, device="cpu")
        sent = (tensor.to(self.device) for tensor in (number // per_block, offset, budgets))
        return RegionMap(*sent, budgets)

    def place(self, layer, tails, compressed, budgets, windows):
        """Return what :meth:`EqualHeads.place` does; budgets of heads follow from those of their requests.

        Entries of pages that are not claimed are the number of another region. Budgets lie where the given ones do.
        """
        layer -= self.shares.first
        on_cpu = budgets.device.type == "cpu"
        if self.division is None:
            return self._place(self.server, layer, tails, on_cpu)
        maps = self._maps_of(budgets, windows)
        if len(maps) == 1:
            return self._place(maps[0][0], layer, tails, on_cpu)
        width = max(len(regions.ordinal) for regions, _ in maps)
        table = tails.new_zeros(len(tails), self.shares.heads, width)
        by_head = budgets.new_zeros(len(tails), self.shares.heads)
        for regions, rows in maps:
            by_head[rows], table[rows, :, : len(regions.ordinal)] = self._place(regions, layer, tails[rows], on_cpu)
        return by_head, table

    def _place(self, regions: RegionMap, layer: int, tails: torch.Tensor, on_cpu: bool) -> tuple:
        """Return budgets and pages of requests with the budgets of a map, in a layer of this rank."""
        ordinal = regions.ordinal[:, layer].T  # [H, P]
        block = tails.long()[:, ordinal.clamp_max(tails.shape[1] - 1)]
        rows = (block * self.shares.heads + regions.offset[:, layer].T).int()
        return (regions.on_cpu if on_cpu else regions.budgets)[layer].expand(len(tails), -1), rows

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


cached_region_shares = functools.lru_cache(maxsize=8)(RegionShares)
"""The cached map that all layers of a rank share; arguments are those of :class:`RegionShares`."""


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

    def place(self, layer, tails, compressed, budgets, windows):
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
