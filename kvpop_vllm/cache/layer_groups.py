"""Cache groups of a model's layers, as vLLM forms them, and what a request takes of the pool that all groups share.

A group holds as many layers as the others, a request has a block table in each, and a block of the pool is a page in
every layer of a group. Layers of one kind are dealt to as many groups as they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpop_vllm.cache.accounting import CacheBytes, common_pages
from kvpop_vllm.cache.pages import cdiv

MOST_UNEVEN = 1.5
"""Ratio of the most to the fewest layers of a kind below which groups have as many layers as the former, in vLLM."""


def deal(kinds: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return the layers of each cache group, by kind.

    Args:
        kinds: layers of each kind, none of which is empty.
    """
    smallest, largest = min(map(len, kinds)), max(map(len, kinds))
    size = largest if largest < smallest * MOST_UNEVEN else smallest
    return [[list(layers[i :: cdiv(len(layers), size)]) for i in range(cdiv(len(layers), size))] for layers in kinds]


@dataclass(frozen=True)
class StockLayers:
    """Layers of one kind that a policy does not act on.

    Attributes:
        kind: their kind, as in transformers' configs.
        layers: their indices in the model.
        token_bytes: bytes of keys and values of a token in one of them, 0 for recurrent layers.
        tokens: most tokens that a query sees, None for all.
        aligned: True if what a query sees begins at a multiple of ``tokens``, as a chunk does.
        state_bytes: bytes of state in one of them, 0 for attention.
    """

    kind: str
    layers: tuple[int, ...]
    token_bytes: int = 0
    tokens: int | None = None
    aligned: bool = False
    state_bytes: int = 0

    def blocks(self, length: int, block_size: int, states: int = 1) -> int:
        """Return the most blocks that a request of ``length`` tokens holds in each group while it decodes.

        Args:
            length: tokens of the request.
            block_size: tokens per block.
            states: as in :class:`Pool`.
        """
        if self.state_bytes:
            return min(states, cdiv(length, block_size))
        if self.tokens is None or length < self.tokens:
            return cdiv(length, block_size)
        straddles = 0 if self.aligned else 1  # a window may begin inside of a block
        return min(cdiv(length, block_size), cdiv(self.tokens - straddles, block_size) + straddles)

    def held_bytes(self, length: int) -> int:
        """Return the bytes of keys, values or state that a request of ``length`` tokens uses in one layer."""
        tokens = length if self.tokens is None else min(self.tokens, length)
        return self.state_bytes or tokens * self.token_bytes


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block, in which each layer has a page.

    Attributes:
        page: bytes of a page of one layer, padding included.
        slots: N, tokens per block in the layers that a policy acts on, or of full attention in stock vLLM.
        stock: tokens per block in the other layers.
    """

    page: int
    slots: int
    stock: int

    @classmethod
    def of(cls, slot_bytes: int, multiple: int, stock: Sequence[StockLayers], stock_size: int) -> BlockSizes:
        """Return the sizes of a pool.

        Pages are as large as the largest: that of the layers of full attention. With recurrent layers N is the least
        multiple of ``multiple`` whose page holds a state, else see :func:`common_pages`.

        Args:
            slot_bytes: bytes of a token in a layer of full attention, all heads of a rank together.
            multiple: what divides N, in tokens; the number itself if there are no other layers.
            stock: the other layers.
            stock_size: tokens per block of the other layers with attention, before they are made larger.
        """
        # all pages of a pool have one size, and a state lies in one page
        page = max((layers.token_bytes for layers in stock), default=0) * stock_size
        if state := max((layers.state_bytes for layers in stock), default=0):
            slots = cdiv(max(page, state), multiple * slot_bytes) * multiple
            return cls(slots * slot_bytes, slots, stock_size)
        factor, count = common_pages(page, slot_bytes * multiple) if page else (1, 1)
        return cls(slot_bytes * multiple * count, multiple * count, stock_size * factor)

    @classmethod
    def of_stock(cls, token_bytes: int, block: int, stock: Sequence[StockLayers]) -> BlockSizes:
        """Return the sizes of a pool of stock vLLM, whose smaller pages take more tokens if they divide the largest, or padding.

        Args:
            token_bytes: bytes of a token in a layer of full attention, all heads of a rank together.
            block: tokens per block, before they are made more.
            stock: the other layers.
        """
        if any(layers.state_bytes for layers in stock):
            return cls.of(token_bytes, block, stock, block)
        tokens = [token_bytes, *(layers.token_bytes for layers in stock)]
        largest = max(tokens)
        sizes = [block * (1 if largest % size else largest // size) for size in tokens]
        return cls(largest * block, sizes[0], sizes[-1])


@dataclass(frozen=True)
class Pool:
    """The pool of a rank of the pipeline stage that has most bytes in a block.

    Attributes:
        sizes: sizes of a block.
        groups: number of groups of the layers that a policy acts on.
        full_layers: number of these layers in the stage.
        stock: layers of the other kinds, each with the number of its groups and its layers in the stage.
        pages: pages of a block, those of layers that fill up a group included.
        states: most states that a request holds in a recurrent layer: 2 where prefixes are cached, else 1.
    """

    sizes: BlockSizes
    groups: int
    full_layers: int
    stock: tuple[tuple[StockLayers, int, int], ...]
    pages: int
    states: int = 1

    @classmethod
    def of(
        cls, full: Sequence[int], stock: Sequence[StockLayers], stages: Sequence[tuple[int, int]], sizes: BlockSizes
    ) -> Pool:
        """Return the pool of a model.

        Args:
            full: indices in the model of the layers that a policy acts on.
            stock: the other layers.
            stages: layers of each pipeline stage, of each the first one and the one after the last.
            sizes: sizes of a block.
        """
        dealt = deal([full, *(kind.layers for kind in stock)])

        def among(layers: Sequence[int], stage: tuple[int, int]) -> int:
            return sum(stage[0] <= layer < stage[1] for layer in layers)

        def pages(stage: tuple[int, int]) -> int:
            return max(among(group, stage) for groups in dealt for group in groups)

        # every rank gets as many blocks as the one with the least room, which is the stage of most pages
        largest = max(stages, key=lambda stage: (pages(stage), among(full, stage)))
        counts = [
            (kind, len(groups), among(kind.layers, largest)) for kind, groups in zip(stock, dealt[1:], strict=True)
        ]
        return cls(sizes, len(dealt[0]), among(full, largest), tuple(counts), pages(largest))

    @property
    def has_states(self) -> bool:
        """True if some layers keep a recurrent state, whose size a block has then."""
        return any(kind.state_bytes for kind, *_ in self.stock)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in all layers of the stage."""
        return self.pages * self.sizes.page

    def stock_blocks(self, length: int) -> int:
        """Return the blocks that a request of ``length`` tokens holds in the groups that no policy acts on."""
        return sum(groups * self.blocks_of(kind, length) for kind, groups, _ in self.stock)

    def blocks_of(self, kind: StockLayers, length: int) -> int:
        """Return the blocks in each group of a kind; a block in which a state is cached has the policy's number of tokens."""
        size = self.sizes.slots if kind.state_bytes else self.sizes.stock
        return kind.blocks(length, size, self.states)

    def request(self, canonical: int, blocks: int, length: int) -> CacheBytes:
        """Return what a request holds.

        Args:
            canonical: bytes of keys and values in the layers that a policy acts on.
            blocks: blocks in each of their groups.
            length: tokens of the request.
        """
        stock = sum(layers * kind.held_bytes(length) for kind, _, layers in self.stock)
        total = blocks * self.groups + self.stock_blocks(length)
        return CacheBytes(canonical + stock, total * self.block_bytes, total)
