"""Scores drawn anew at every eviction, by the formula of :mod:`kvpop_vllm.kernels.draws`."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """Return the finalizer of SplitMix64 of uint64 words."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def draw(key, q, t):
    """Return the draws of tokens t for an eviction at position q, float64.

    Args:
        key: int64 key of request and head.
        q: position of the eviction.
        t: positions of the tokens.
    """
    mixed = _mix(_mix((key + q).to(tl.uint64)) + t.to(tl.uint64) * GOLDEN)
    return (mixed >> 11).to(tl.int64).to(tl.float64)
