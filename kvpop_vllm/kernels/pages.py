"""Where every byte of a request's pages lies.

One vLLM block holds, per layer and KV head, ``N * C`` contiguous bytes, ``C = 2 * D * itemsize + 8``. A **slot block**
lays them out as four arrays, a **state block** as one flat float32 region::

    slot block   K [N, D] | V [N, D] | score float32 [N] | position int32 [N]
    state block  float32 [N * C / 4]

A request's block-table row is ``[state blocks..., slot blocks...]``. Slots have fixed roles: sinks ``[0, s)``, ring
``[s, s + w)``, long-range from there to B; only long-range slots use score and position (scorers that score at
insertion keep a token's score in its ring slot as well, and attention masses lie in every slot's score word). Slot 0 is
therefore never long-range, and its position word holds ``tokens_seen``, the number of tokens this head has processed. With
a threshold, the position word of slot 1 holds the number of filled long-range slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SLOTS = 64
"""Default number N of slots per block."""


def cdiv(a: int, b: int) -> int:
    """Ceiling division of two non-negative integers."""
    return -(-a // b)


def moment_floats(head_size: int) -> int:
    """float32 words of a head's moments: mean key [D], mean value [D], sum of the products of their deviations [D, D] with
    a row per channel of the key. Their number follows from the position."""
    return head_size * (head_size + 2)


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of the pages of one layer.

    Args:
        num_kv_heads: KV heads H of the layer (of this tensor-parallel rank).
        head_size: D, in elements.
        dtype: element type of K and V.
        block_slots: N, slots per block; a multiple of 16 so that each array starts at a multiple of 16 bytes.
        state_floats: float32 words of recurrent state per head; 0 for stateless policies.

    Raises:
        ValueError: ``block_slots`` is not a positive multiple of 16.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_slots: int = BLOCK_SLOTS
    state_floats: int = 0

    def __post_init__(self):
        if self.block_slots <= 0 or self.block_slots % 16:
            raise ValueError(
                f"slots per block must be a positive multiple of 16, got {self.block_slots}: change --block-size"
            )

    @property
    def slot_bytes(self) -> int:
        """C: bytes of one slot of one head: K, V, score and position."""
        return 2 * self.head_size * self.dtype.itemsize + 8

    @property
    def region_bytes(self) -> int:
        """N * C: bytes of one block of one head."""
        return self.block_slots * self.slot_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks that hold a request's recurrent state, before its slot blocks."""
        return cdiv(4 * self.state_floats, self.region_bytes)

    def blocks(self, length: int, budget: int) -> int:
        """Blocks a request of ``length`` tokens holds: state blocks + cdiv(min(length, budget), N)."""
        return self.state_blocks + cdiv(min(length, budget), self.block_slots)

    def view(self, raw: torch.Tensor) -> Pages:
        """Typed views of a layer's cache.

        Args:
            raw: ``[num_blocks, H, N, C]`` or ``[num_blocks, H, N * C]``, one byte per element, the bytes of one
                (block, head) contiguous; strides between blocks and heads are free.

        Raises:
            ValueError: the shape does not match this layout or a (block, head) region is not contiguous.
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


class Pages:
    """Typed views of one layer's cache; all share the bytes of ``raw [num_blocks, H, N * C]`` (uint8).

    Attributes:
        k, v: ``[num_blocks, H, N, D]`` in the layout's dtype.
        score: ``[num_blocks, H, N]`` float32. position: ``[num_blocks, H, N]`` int32.
        state: ``[num_blocks, H, N * C / 4]`` float32.
    """

    def __init__(self, layout: PageLayout, raw: torch.Tensor):
        n, d = layout.block_slots, layout.head_size
        typed, words, ints = raw.view(layout.dtype), raw.view(torch.float32), raw.view(torch.int32)
        shape = (raw.shape[0], layout.num_kv_heads, n, d)
        scores = 2 * n * d * layout.dtype.itemsize // 4
        self.layout, self.raw = layout, raw
        self.k = typed[..., : n * d].unflatten(-1, (n, d))
        self.v = typed[..., n * d : 2 * n * d].unflatten(-1, (n, d))
        self.score = words[..., scores : scores + n]
        self.position = ints[..., scores + n : scores + 2 * n]
        self.state = words
        assert self.k.shape == self.v.shape == shape

    @property
    def num_blocks(self) -> int:
        return self.raw.shape[0]

    def by_region(self) -> Pages:
        """Return the same bytes by region: block b of head h is region ``b * H + h``, of any head.

        Raises:
            ValueError: the regions do not lie one after another.
        """
        blocks, heads, size = self.raw.shape
        if not self.raw.is_contiguous():
            raise ValueError(f"regions of strides {self.raw.stride()} do not lie one after another")
        return self.layout.view(
            self.raw.as_strided((blocks * heads, heads, size), (size, 0, 1), self.raw.storage_offset())
        )

    def put(self, array: torch.Tensor, at: tuple, values: torch.Tensor) -> None:
        """``array[at] = values`` for one of the arrays and ``at = (block, head, slot)``, also where regions are the same for
        every head."""
        if self.raw.stride(1) == 0:
            array[:, 0][at[0], at[2]] = values
        else:
            array[at] = values


@dataclass(frozen=True)
class Prefix:
    """Protected tokens of R requests: token t lies in slot ``t % N`` of block ``t // N``, the same for every head.

    Attributes:
        pages: the layer's cache, by block. table: ``[R, F]`` int32 block numbers. tokens: ``[R]`` int64, p of each request, 0
            where nothing is protected.
    """

    pages: Pages
    table: torch.Tensor
    tokens: torch.Tensor

    def gather(self, r: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H, end - begin, D]`` of tokens ``[begin, end)`` of request r, copied."""
        n = self.pages.layout.block_slots
        blocks = self.table[r, begin // n : cdiv(end, n)].long()
        cut = slice(begin % n, begin % n + end - begin)
        return tuple(x[blocks].transpose(0, 1).flatten(1, 2)[:, cut] for x in (self.pages.k, self.pages.v))

    def write(self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``k, v [n, H, D]`` of n tokens to slots ``slots [n]`` of blocks ``blocks [n]``, int64."""
        self.pages.k[blocks, :, slots], self.pages.v[blocks, :, slots] = k, v
