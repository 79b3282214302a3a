"""Scores that are drawn anew at every eviction, by the formula of :mod:`kvpop_vllm.kernels.draws`."""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """The finalizer of SplitMix64, of uint64."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def draw(key, q, t):
    """Draws of tokens t when one is evicted at position q, float64; key: of request and head, int64."""
    mixed = _mix(_mix((key + q).to(tl.uint64)) + t.to(tl.uint64) * GOLDEN)
    return (mixed >> 11).to(tl.int64).to(tl.float64)
