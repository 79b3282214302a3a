"""Online softmax in base 2, one block of keys at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LOG2E, PRECISION
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows

LARGEST = tl.constexpr(3.4e38)


@triton.jit
def faded(top, new_top):
    """Return the pivot of new maxima, 0 for rows without a visible key so far, and the factor of earlier sums."""
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    return pivot, tl.exp2(top - pivot)


@triton.jit
def nothing_yet(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return maxima, totals and sums of rows of queries that have met no key."""
    zeros = tl.zeros([ROWS], tl.float32)
    return zeros - float("inf"), zeros, tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def add_sinks(sinks, present, sums):
    """Add attention sinks to the softmax of rows of queries: keys whose value is 0, seen by every row.

    Args:
        sinks: ``[rows]``, addresses of the rows' natural logarithms.
        present: ``[rows]``, mask of the rows that have one.
        sums: as in :func:`add_keys`.
    """
    top, total, acc = sums
    logits = tl.load(sinks, mask=present, other=float("-inf")) * LOG2E
    new_top = tl.maximum(top, logits)
    pivot, fade = faded(top, new_top)
    return new_top, total * fade + tl.exp2(logits - pivot), acc * fade[:, None]


@triton.jit
def add_keys(k, v, present, bias, visible, rows, scale, sums, P: tl.constexpr):
    """Add a block of keys and values to the softmax of rows of queries.

    Args:
        k, v: ``[keys]``, addresses of the keys and values.
        there: ``[keys]``, mask of those that are loaded.
        bias: ``[keys]``, natural logarithms that are added to the logits, or None.
        visible: mask of the keys that a row sees, ``[rows, keys]`` or ``[1, keys]``.
        rows: ``[rows, P.padded]``, queries.
        sums: maxima in base 2 ``[rows]``, totals ``[rows]`` and sums of weighted values ``[rows, P.padded]`` so far.

    Returns:
        Logits in base 2, and the new ``sums``.
    """
    top, total, acc = sums
    keys, values = load_rows(k, present, P), load_rows(v, present, P)
    if P.wide:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    logits = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
    if bias is not None:  # finite ones stay finite in base 2
        logits += tl.minimum(tl.maximum(bias * LOG2E, -LARGEST), LARGEST)[None, :]
    logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    pivot, fade = faded(top, new_top)
    weights = tl.exp2(logits - pivot[:, None])
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
    return logits, (new_top, total * fade + tl.sum(weights, 1), acc)
