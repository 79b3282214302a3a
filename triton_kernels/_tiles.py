"""Tiles of the attention kernels, by what the compiler reports (docs/kernels.md); no sweep on a GPU has run yet."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Shape of a program of attention.

    A block's page numbers are loaded before its keys, so that 5 stages of the pipeline of loads load one block of keys
    and values ahead, and 2 to 4 none.
    """

    rows: int  # queries times query heads of a KV head, at least; a power of two from 16 on
    keys: int  # of a block, at most; a power of two from 16 on
    warps: int
    stages: int


DECODE = {
    (False, 128): Tile(16, 64, 4, 5),
    (False, 256): Tile(16, 32, 4, 5),
    (True, 64): Tile(16, 32, 4, 5),
    (False, 512): Tile(16, 16, 8, 5),
    (True, 256): Tile(16, 16, 4, 5),
    (True, 512): Tile(16, 16, 8, 2),
}
"""Tiles of decoding, by whether products are in float32 and by the largest head size D.

In two bytes, two programs fit on a multiprocessor of an A100.
"""
PREFILL = {
    (False, 128): Tile(128, 64, 8, 5),
    (False, 256): Tile(64, 32, 8, 5),
    (True, 128): Tile(32, 32, 4, 5),
    (False, 512): Tile(32, 16, 8, 5),
    (True, 256): Tile(16, 16, 4, 5),
    (True, 512): Tile(16, 16, 8, 2),
}
"""Tiles of prefill, by the same."""
LARGE = 256
"""Head size D above which a program of other kernels has twice as many warps, for its registers."""
BACKWARD = {
    (False, 64): Tile(64, 64, 4, 2),
    (False, 128): Tile(64, 64, 8, 2),
    (True, 128): Tile(32, 32, 8, 1),
    (False, 256): Tile(32, 32, 8, 2),
    (True, 256): Tile(16, 16, 8, 1),
    (False, 512): Tile(16, 16, 8, 2),
}
"""Tiles of the backward pass of training, by hand."""
MASS = {
    (False, 64): Tile(64, 128, 4, 3),
    (False, 128): Tile(64, 128, 8, 3),
    (True, 128): Tile(32, 64, 8, 2),
    (False, 256): Tile(32, 64, 8, 3),
    (True, 256): Tile(16, 32, 4, 1),
    (False, 512): Tile(32, 32, 8, 2),
}
"""Tiles of the attention of future queries, by hand."""


def tile_of(table: dict[tuple[bool, int], Tile], wide: bool, size: int) -> Tile:
    """Return a table's tile of a head size D; ``wide`` says if products are in float32."""
    return next(tile for (for_wide, largest), tile in table.items() if for_wide == wide and size <= largest)
