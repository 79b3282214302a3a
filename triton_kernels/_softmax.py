"""Online softmax in base 2, one block of keys at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LOG2E, PRECISION

LARGEST = tl.constexpr(3.4e38)


@triton.jit
def in_base_2(bias):
    """Return natural logarithms in base 2; finite ones stay finite."""
    return tl.minimum(tl.maximum(bias * LOG2E, -LARGEST), LARGEST)


@triton.jit
def faded(top, new_top):
    """Return the pivot of new maxima, 0 for rows without a visible key so far, and the factor of earlier sums."""
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    return pivot, tl.exp2(top - pivot)


@triton.jit
def add_block(logits, values, top, total, acc):
    """Return maxima, totals and sums of weighted values after a block of keys.

    Args:
        logits: ``[rows, keys]`` in base 2, -inf for keys that a row does not see.
        values: ``[keys, columns]``.
        top, total: ``[rows]``, maxima and totals so far.
        acc: ``[rows, columns]`` float32, sums so far.
    """
    new_top = tl.maximum(top, tl.max(logits, 1))
    pivot, fade = faded(top, new_top)
    weights = tl.exp2(logits - pivot[:, None])
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
    return new_top, total * fade + tl.sum(weights, 1), acc
