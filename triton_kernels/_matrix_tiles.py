"""Loads and stores of rows and of tiles of matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_mask(there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the mask ``[rows, PADDED]`` of the elements of rows of SIZE elements that are ``there [rows]``."""
    return there[:, None] & (tl.arange(0, PADDED) < SIZE)[None, :]


@triton.jit
def load_rows(rows, there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of SIZE elements ``[rows, PADDED]`` at the addresses ``rows``; elements that are not there are 0."""
    return tl.load(rows[:, None] + tl.arange(0, PADDED)[None, :], mask=row_mask(there, SIZE, PADDED), other=0.0)


@triton.jit
def store_rows(rows, values, there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store rows of SIZE elements ``values [rows, PADDED]`` at the addresses ``rows``, in the type found there."""
    place = rows[:, None] + tl.arange(0, PADDED)[None, :]
    tl.store(place, values.to(rows.dtype.element_ty), mask=row_mask(there, SIZE, PADDED))


@triton.jit
def tile(base, first, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows ``first ..`` and columns ``column ..`` of a contiguous float32 matrix ``[rows, columns]``.

    Elements outside the matrix are 0; ``first`` may be negative.
    """
    place, inside = _tile(base, first, rows, column, columns, ROWS, COLUMNS)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def store_tile(base, values, first, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile at rows ``first ..`` and columns ``column ..``, omitting elements outside the matrix."""
    place, inside = _tile(base, first, rows, column, columns, ROWS, COLUMNS)
    tl.store(place, values, mask=inside)


@triton.jit
def _tile(base, first, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the addresses of a tile's elements and a mask of those inside the matrix."""
    row, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = ((first + row >= 0) & (first + row < rows))[:, None] & (column + place < columns)[None, :]
    start = base + tl.cast(first, tl.int64) * columns + column
    return start + row[:, None] * columns + place[None, :], inside
