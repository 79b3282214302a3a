"""Loads and stores of tiles of float32 matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(base, first, rows, stride, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows ``first ..`` and columns ``column ..`` of a float32 matrix ``[rows, columns]``.

    Elements outside the matrix are 0; ``first`` may be negative.
    """
    row, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = ((first + row >= 0) & (first + row < rows))[:, None] & (column + place < columns)[None, :]
    start = base + tl.cast(first, tl.int64) * stride + column
    return tl.load(start + row[:, None] * stride + place[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(base, values, first, rows, stride, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile at rows ``first ..`` and columns ``column ..``, omitting elements outside the matrix."""
    row, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = ((first + row >= 0) & (first + row < rows))[:, None] & (column + place < columns)[None, :]
    start = base + tl.cast(first, tl.int64) * stride + column
    tl.store(start + row[:, None] * stride + place[None, :], values, mask=inside)
