"""Byte layout of a request's pages.

One vLLM block holds, per layer and KV head, ``N * C`` contiguous bytes, ``C = 2 * D * itemsize + 8``. A
**slot block** stores four arrays. A **state block** is one flat float32 array::

    slot block   K [N, D] | V [N, D] | score float32 [N] | position int32 [N]
    state block  float32 [N * C / 4]

If drafts of speculative decoding are verified, the state blocks also hold up to m **staged drafts**, after the state
floats: of each draft K [D] | V [D] | queries | score float32 | position int32, at a multiple of 16 bytes and within one
block. Queries are only staged for rules that read attention. The draft at index i is staged if its position is
``tokens_seen + i`` and those before it are staged.

The page-table row of a request (of its tail, if it has a protected prefix) is
``[state blocks..., slot blocks...]``. Slots have fixed roles: sinks ``[0, s)``, ring ``[s, s + w)``,
long-range slots ``[s + w, B)``. In general only long-range slots use the score and position fields. Two cases
use more: scorers that score at insertion also store a token's score in its ring slot, and attention masses
are stored in the score field of every slot.

Slot 0 is never long-range, because the window holds at least one token. Its position field holds
``tokens_seen``, the number of tokens this head has processed. If the rule has a threshold, the position field
of slot 1 holds the number of filled long-range slots.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvpop_vllm.config import ConfigError

BLOCK_SLOTS = 64
"""Default number N of slots per block."""


def cdiv(a: int, b: int) -> int:
    """Return the quotient of two non-negative integers, rounded up."""
    return -(-a // b)


def moment_floats(head_size: int) -> int:
    """Return the number of float32 values in the moments of one head.

    The moments are the mean key ``[D]``, the mean value ``[D]`` and the sum of the products of their
    deviations ``[D, D]``, with one row per key channel. The number of evicted tokens is not stored: it
    follows from the position.
    """
    return head_size * (head_size + 2)


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of the pages of one layer.

    Args:
        num_kv_heads: KV heads H of the layer (of this tensor-parallel rank).
        head_size: D, in elements.
        dtype: element type of K and V.
        block_slots: N, slots per block; a multiple of 16 so that each array starts at a multiple of 16 bytes.
        state_floats: number of float32 values in the recurrent state of one head, 0 for stateless policies.
        drafts: m, largest number of drafts of a step, 0 without speculative decoding.
        draft_query_bytes: bytes of the queries that are staged with each draft of a KV head, 0 if none are
            (:meth:`kvpop_vllm.kernels.ops.RetentionRule.draft_query_bytes`).

    Raises:
        ConfigError: ``block_slots`` is not a positive multiple of 16, or a draft does not fit into a block.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_slots: int = BLOCK_SLOTS
    state_floats: int = 0
    drafts: int = 0
    draft_query_bytes: int = 0

    def __post_init__(self):
        if self.block_slots <= 0 or self.block_slots % 16:
            raise ConfigError(
                f"slots per block must be a positive multiple of 16, got {self.block_slots}: change --block-size"
            )
        if self.drafts and self.draft_bytes > self.region_bytes:
            raise ConfigError(
                f"a block of {self.block_slots} tokens has no room for a draft and its {self.draft_query_bytes} bytes of queries:"
                f" raise --block-size to {16 * cdiv(self.draft_bytes, 16 * self.slot_bytes)}, or leave --speculative-config out"
            )

    @property
    def slot_bytes(self) -> int:
        """Size C of one slot of one head, in bytes: K, V, score and position."""
        return 2 * self.head_size * self.dtype.itemsize + 8

    @property
    def region_bytes(self) -> int:
        """Size ``N * C`` of one block of one head, in bytes."""
        return self.block_slots * self.slot_bytes

    @property
    def state_blocks(self) -> int:
        """Number of blocks that hold a request's state and staged drafts; they precede its slot blocks."""
        if self.drafts:
            return self.draft_places[-1][0] + 1
        return cdiv(4 * self.state_floats, self.region_bytes)

    @property
    def draft_bytes(self) -> int:
        """Size of a staged draft of one head, in bytes: K, V, queries, score and position, at a multiple of 16."""
        return 16 * cdiv(self.slot_bytes + self.draft_query_bytes, 16)

    @property
    def draft_start(self) -> int:
        """Number of bytes of a request's state before the first staged draft, a multiple of 16."""
        return 16 * cdiv(4 * self.state_floats, 16)

    @functools.cached_property
    def draft_places(self) -> list[tuple[int, int]]:
        """State block and byte in it at which each staged draft begins; one does not go on in the next block."""
        places, (block, byte) = [], divmod(self.draft_start, self.region_bytes)
        for _ in range(self.drafts):
            if byte + self.draft_bytes > self.region_bytes:
                block, byte = block + 1, 0
            places.append((block, byte))
            byte += self.draft_bytes
        return places

    def blocks(self, length: int, budget: int) -> int:
        """Return the number of blocks of a request of ``length`` tokens: state blocks and slot blocks."""
        return self.state_blocks + cdiv(min(length, budget), self.block_slots)

    def view(self, raw: torch.Tensor) -> Pages:
        """Return typed views of a layer's cache.

        Args:
            raw: ``[num_blocks, H, N, C]`` or ``[num_blocks, H, N * C]``, one byte per element. The bytes of
                one (block, head) must be contiguous; strides between blocks and heads are free.

        Raises:
            ValueError: the shape does not match this layout, or a (block, head) region is not contiguous.
        """
        expected = (self.num_kv_heads, self.region_bytes)
        contiguous = raw.dim() in (3, 4) and raw.stride(-1) == 1 and (raw.dim() == 3 or raw.stride(2) == raw.shape[3])
        if not contiguous or raw.element_size() != 1 or (raw.shape[1], raw[0, 0].numel()) != expected:
            raise ValueError(
                f"cache of shape {tuple(raw.shape)} and strides {raw.stride()} does not hold (H, N * C) = {expected}"
            )
        flat = raw.view(torch.uint8).as_strided(
            (raw.shape[0], self.num_kv_heads, self.region_bytes),
            (raw.stride(0), raw.stride(1), 1),
            raw.storage_offset(),
        )
        return Pages(self, flat)


class StagedDraft(NamedTuple):
    """Views of a draft of one head that is staged in the pages.

    Attributes:
        k, v: ``[D]`` in the layout's dtype.
        q: ``[draft_query_bytes]`` uint8, the queries of the head's group.
        score: ``[1]`` float32, gate score.
        position: ``[1]`` int32, position of the draft, -1 if none is staged here.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor


class Pages:
    """Typed views of one layer's cache, which all share the bytes of ``raw``.

    Attributes:
        layout: byte layout of the pages.
        raw: ``[num_blocks, H, N * C]`` uint8.
        k, v: ``[num_blocks, H, N, D]`` in the layout's dtype.
        score: ``[num_blocks, H, N]`` float32.
        position: ``[num_blocks, H, N]`` int32.
        state: ``[num_blocks, H, N * C / 4]`` float32.
    """

    def __init__(self, layout: PageLayout, raw: torch.Tensor):
        n, d = layout.block_slots, layout.head_size
        typed, words, ints = raw.view(layout.dtype), raw.view(torch.float32), raw.view(torch.int32)
        shape = (raw.shape[0], layout.num_kv_heads, n, d)
        # in words, after the keys and values of all slots
        scores = 2 * n * d * layout.dtype.itemsize // 4
        self.layout, self.raw = layout, raw
        self.k = typed[..., : n * d].unflatten(-1, (n, d))
        self.v = typed[..., n * d : 2 * n * d].unflatten(-1, (n, d))
        self.score = words[..., scores : scores + n]
        self.position = ints[..., scores + n : scores + 2 * n]
        self.state = words
        assert self.k.shape == self.v.shape == shape

    @functools.cached_property
    def arrays(self) -> tuple:
        """Arrays k, v, score, position and state, and strides between blocks and between heads of k and of score."""
        strides = *self.k.stride()[:2], *self.score.stride()[:2]
        return self.k, self.v, self.score, self.position, self.state, *strides

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self.raw.shape[0]

    def by_region(self) -> Pages:
        """Return views of the same bytes indexed by region.

        Block b of head h is region ``b * H + h``. Any head may use any region.

        Raises:
            ValueError: the regions are not contiguous.
        """
        blocks, heads, size = self.raw.shape
        if not self.raw.is_contiguous():
            raise ValueError(f"regions of strides {self.raw.stride()} do not lie one after another")
        return self.layout.view(
            self.raw.as_strided((blocks * heads, heads, size), (size, 0, 1), self.raw.storage_offset())
        )

    def write(self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``k, v [n, H, D]`` of n tokens to slots ``slots [n]`` of blocks ``blocks [n]``, int64."""
        self.k[blocks, :, slots], self.v[blocks, :, slots] = k, v

    def put(self, array: torch.Tensor, index: tuple, values: torch.Tensor) -> None:
        """Assign ``array[index] = values``, also for pages that are indexed by region.

        Args:
            array: one of the arrays of these pages.
            index: indices (block, head, slot).
            values: the values to write.
        """
        # heads of regions are the same memory, and torch refuses to write to a tensor that overlaps itself
        if self.raw.stride(1) == 0:
            array[:, 0][index[0], index[2]] = values
        else:
            array[index] = values

    def draft(self, row: torch.Tensor, head: int, index: int) -> StagedDraft:
        """Return the staged draft at ``index`` of a head whose page-table row is ``row [P]``."""
        layout, (column, byte) = self.layout, self.layout.draft_places[index]
        data = self.raw[int(row[column]), head, byte : byte + layout.draft_bytes]
        size, queries = layout.head_size * layout.dtype.itemsize, layout.draft_query_bytes
        k, v, q, words = data[: 2 * size + queries + 8].split([size, size, queries, 8])
        return StagedDraft(
            k.view(layout.dtype), v.view(layout.dtype), q, words[:4].view(torch.float32), words[4:].view(torch.int32)
        )

    def staged(self, table: torch.Tensor, tokens_seen: torch.Tensor) -> torch.Tensor:
        """Return the number of drafts that heads have staged, ``[n, H]`` int64.

        Args:
            table: ``[n, H, P]`` int64 pages of n requests, those of state first.
            tokens_seen: ``[n, H]``, of each head.
        """
        layout, words = self.layout, self.state.view(torch.int32)
        heads, counts = torch.arange(layout.num_kv_heads, device=table.device), torch.zeros_like(tokens_seen).long()
        complete = torch.ones_like(counts, dtype=torch.bool)
        before = 2 * layout.head_size * layout.dtype.itemsize + layout.draft_query_bytes + 4  # the position
        # positions follow one another: the first place without its position ends them, though older drafts may follow
        for column, byte in layout.draft_places:
            complete &= words[table[..., column], heads, (byte + before) // 4] == tokens_seen + counts
            counts += complete
        return counts

    def load_states(self, rows: torch.Tensor, heads: torch.Tensor, weights) -> tuple[torch.Tensor, ...]:
        """Return the mLSTM states of heads: C ``[1, H, F, Dv]``, z ``[1, H, F]`` and m ``[1, H]``.

        Args:
            rows: ``[H, pages]`` state blocks of each head.
            heads: ``[H]`` indices of the heads in the pages.
            weights: the scorer.
        """
        flat = self.state[rows, heads.unsqueeze(1)].flatten(1)
        cells, width = weights.features * weights.value_size, weights.state_floats
        c = flat[:, :cells].unflatten(1, (weights.features, weights.value_size))
        return c.unsqueeze(0), flat[None, :, cells : width - 1], flat[None, :, width - 1]

    def store_states(self, rows: torch.Tensor, heads: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Write states to the pages from which :meth:`load_states` reads them."""
        c, z, m = state
        flat = torch.cat([c[0].flatten(1), z[0], m[0].unsqueeze(1)], 1)
        region = self.state.shape[-1]
        # a state goes on in the next block, and the blocks of a request need not be neighbours
        for i in range(rows.shape[1]):
            part = flat[:, i * region : (i + 1) * region]
            self.put(self.state[..., : part.shape[1]], (rows[:, i], heads, slice(None)), part)


@dataclass(frozen=True)
class Prefix:
    """Protected tokens of R requests.

    Token t is stored in slot ``t % N`` of block ``t // N``, for every head. The score fields of the first
    ``biased[r]`` tokens hold a bias, in natural logarithms: queries see them with the logit ``scale * q . k + bias``.
    A bias is any finite number. The score fields of all other tokens are not used.

    Attributes:
        pages: the layer's cache, indexed by block, None as long as no layer is chosen.
        table: ``[R, F]`` int32 block numbers.
        tokens: ``[R]`` int64, p of each request, 0 for a request without protected tokens.
        biased: ``[R]`` int64, number of leading tokens that have a bias, at most p, on the device of ``tokens``; None
            if no request has any.
    """

    pages: Pages | None
    table: torch.Tensor
    tokens: torch.Tensor
    biased: torch.Tensor | None = None

    def on(self, pages: Pages) -> Prefix:
        """Return the prefixes in the pages of a layer."""
        return Prefix(pages, self.table, self.tokens, self.biased)  # in every layer, so not by replace()

    def of(self, requests: slice) -> Prefix:
        """Return the prefixes of these requests."""
        biased = None if self.biased is None else self.biased[requests]
        return replace(self, table=self.table[requests], tokens=self.tokens[requests], biased=biased)

    def gather(self, r: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copied keys and values ``[H, end - begin, D]`` of tokens ``[begin, end)`` of request r."""
        return tuple(self._copied(x, r, begin, end) for x in (self.pages.k, self.pages.v))

    def bias(self, r: int, end: int) -> torch.Tensor | None:
        """Return the biases ``[H, n]`` float32 of those of the first ``end`` tokens of request r that have one, or None."""
        count = 0 if self.biased is None else min(int(self.biased[r]), end)
        return self._copied(self.pages.score, r, 0, count) if count else None

    def _copied(self, array: torch.Tensor, r: int, begin: int, end: int) -> torch.Tensor:
        """Return the part ``[H, end - begin, ..]`` of an array of the pages that belongs to tokens ``[begin, end)``."""
        n = self.pages.layout.block_slots
        blocks = self.table[r, begin // n : cdiv(end, n)].long()
        # the first block may begin before the first of these tokens
        return array[blocks].transpose(0, 1).flatten(1, 2)[:, begin % n : begin % n + end - begin]
