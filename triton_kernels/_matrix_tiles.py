"""Loads and stores of rows and of tiles of matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_mask(present, P: tl.constexpr):
    """Return the mask ``[rows, P.padded]`` of the elements of rows of D elements that are ``there [rows]``."""
    return present[:, None] & (tl.arange(0, P.padded) < P.size)[None, :]


@triton.jit
def load_rows(rows, present, P: tl.constexpr):
    """Load rows of D elements ``[rows, P.padded]`` at the addresses ``rows``; elements that are not there are 0."""
    return tl.load(rows[:, None] + tl.arange(0, P.padded)[None, :], mask=row_mask(present, P), other=0.0)


@triton.jit
def store_rows(rows, values, present, P: tl.constexpr):
    """Store rows of D elements ``values [rows, P.padded]`` at the addresses ``rows``, in the type found there."""
    place = rows[:, None] + tl.arange(0, P.padded)[None, :]
    tl.store(place, values.to(rows.dtype.element_ty), mask=row_mask(present, P))


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
