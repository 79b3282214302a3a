"""Tiles of float32 matrices in memory."""

from __future__ import annotations

import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")  # float32 products as three of tensor cores, good to about 2**-22


@triton.jit
def tile(base, first, rows, stride, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows ``first ..`` and columns ``column ..`` of a float32 matrix ``[rows, columns]``, zero outside; first may be negative."""
    row, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = ((first + row >= 0) & (first + row < rows))[:, None] & (column + place < columns)[None, :]
    start = base + tl.cast(first, tl.int64) * stride + column
    return tl.load(start + row[:, None] * stride + place[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(base, values, first, rows, stride, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = ((first + row >= 0) & (first + row < rows))[:, None] & (column + place < columns)[None, :]
    start = base + tl.cast(first, tl.int64) * stride + column
    tl.store(start + row[:, None] * stride + place[None, :], values, mask=inside)
