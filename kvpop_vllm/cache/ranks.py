"""Budgets of the KV heads of each rank: the shards of a model, and the division of a request's slots among its heads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kvpop_vllm.cache.pages import cdiv
from kvpop_vllm.roles import Retention

MOST_DIVIDED = 1024
"""Largest number of request budgets whose shares are cached."""


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

    # a cached property writes to __dict__, which a frozen dataclass allows
    @cached_property
    def block_counts(self) -> BlockCounts:
        """Numbers of blocks of a request if there are no other ranks."""
        return BlockCounts((self,))

    def blocks_by_pages(self, state_blocks: int, block_slots: int) -> list[int]:
        """Return the number of blocks of a request by the number of pages that its tokens fill, up to the largest head's."""
        full: Counter[int] = Counter()
        # heads of as many pages are counted together, since a model has few sizes and many heads
        for budget, many in self.counts.items():
            full[cdiv(budget, block_slots)] += many
        heads = self.layers * self.heads
        pages = (sum(many * min(filled, limit) for limit, many in full.items()) for filled in range(max(full) + 1))
        # a block has a region for every head of every layer, so only the sum is rounded up
        return [cdiv(state_blocks * heads + slots, heads) for slots in pages]


class BlockCounts:
    """Numbers of blocks of a request in the rank that needs most, which are the same for every layer.

    Args:
        ranks: budgets of the heads of each rank.
    """

    def __init__(self, ranks: tuple[Shares, ...]):
        self._ranks, self._by_pages = ranks, {}

    def blocks(self, state_blocks: int, block_slots: int, length: int) -> int:
        """Return the number of blocks of a request of ``length`` tokens.

        Args:
            state_blocks: state pages per head.
            block_slots: N.
            length: tokens of the request.
        """
        sizes = state_blocks, block_slots
        if sizes not in self._by_pages:
            by_rank = [shares.blocks_by_pages(*sizes) for shares in self._ranks]
            # a rank whose largest head is full needs no more
            pages = range(max(map(len, by_rank)))
            self._by_pages[sizes] = [
                max(counts[min(filled, len(counts) - 1)] for counts in by_rank) for filled in pages
            ]
        by_pages = self._by_pages[sizes]
        return by_pages[min(cdiv(length, block_slots), len(by_pages) - 1)]


class Shard(NamedTuple):
    """Layers and KV heads of a rank: of both the first one and the one after the last."""

    layers: tuple[int, int]
    heads: tuple[int, int]


def heads_of_rank(rank: int, ranks: int, total: int, per_rank: int) -> slice:
    """Return the KV heads that a tensor-parallel rank holds.

    With more ranks than heads, several ranks hold the same head.

    Args:
        rank: the rank.
        ranks: number of ranks.
        total: KV heads of the model.
        per_rank: KV heads of each rank.
    """
    first = rank * total // ranks
    return slice(first, first + per_rank)


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

    def block_counts(self, budget: int, window: int) -> BlockCounts:
        """Return the numbers of blocks of a request with ``budget`` tokens and this window."""
        return self._divided(budget, window)[2]

    @cached_property
    def _cached(self) -> dict[tuple[int, int], tuple[Shares, tuple[Shares, ...], BlockCounts]]:
        return {}

    def _divided(self, budget: int, window: int) -> tuple[Shares, tuple[Shares, ...], BlockCounts]:
        """Return the budgets of all heads, those of the heads of each rank, and numbers of blocks."""
        size = budget, window
        if size not in self._cached:
            if len(self._cached) >= MOST_DIVIDED:
                self._cached.clear()
            with torch.device("cpu"):  # a model may be in the making on the meta device
                roles = Retention(budget, self.sinks, window)
                shares = Shares(tuple(map(tuple, self.allocate(roles, self.layers, self.heads).tolist())))
            by_rank = tuple(map(shares.of_shard, self.shards))
            self._cached[size] = shares, by_rank, BlockCounts(by_rank)
        return self._cached[size]
