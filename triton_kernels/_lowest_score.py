"""Search for the slot with the lowest effective score, one block of slots at a time."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Compile-time constants of the order in which tokens are evicted."""

    decay_step: int = 1
    mean: bool = False  # scores are sums over the queries so far
    ages: bool = False
    draws: bool = False
    residual: bool = False


@triton.jit
def _mix(x):
    """Return the finalizer of SplitMix64 of uint64 words."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def draw(key, q, t):
    """Return the draws of tokens t for an eviction at position q, float64 (:mod:`kvpop_vllm.kernels.draws`).

    The int64 ``key`` is that of request and head.
    """
    mixed = _mix(_mix((key + q).to(tl.uint64)) + t.to(tl.uint64) * GOLDEN)
    return (mixed >> 11).to(tl.int64).to(tl.float64)


@triton.jit
def effective(raw, t, q, log_gamma, factor, key, P: tl.constexpr):
    """Return the effective scores of tokens t at q, float64.

    They follow from raw scores, residuals (``factor``) if these count, and the head's ``key`` if scores are drawn.
    Kernels are launched without fused multiply-adds, so that every operation rounds as in the reference.
    """
    score, age = raw.to(tl.float64), q - t
    if P.draws:
        score = draw(key, q, t)
    if P.mean:
        score = score / age.to(tl.float64)
    if P.ages:
        score = score * age.to(tl.float64)
    if P.residual:
        score = score * factor.to(tl.float64)
    return score + (age // P.decay_step).to(tl.float64) * log_gamma


@triton.jit
def none_yet(BLOCK: tl.constexpr):
    """Return the initial state of a search: lowest score, its token and its slot, for each lane."""
    far = tl.full([BLOCK], FAR, tl.int32)
    return tl.full([BLOCK], float("inf"), tl.float64), far, far


@triton.jit
def lower_of(best, oldest, best_slot, raw, token, slot, inside, q, log_gamma, factor, key, P: tl.constexpr):
    """Update each lane with a block of slots: keep the lower effective score, of equal scores the older token.

    Scores that are NaN are never lower. Slots that are not ``inside`` are ignored.
    """
    score = effective(raw, tl.where(inside, token, q - 1), q, log_gamma, factor, key, P)
    lower = inside & ((score < best) | ((score == best) & (token < oldest)))
    return tl.where(lower, score, best), tl.where(lower, token, oldest), tl.where(lower, slot, best_slot)


@triton.jit
def lowest_of(best, oldest, best_slot):
    """Return the lowest score of all lanes and its slot, of equal scores the oldest token's; -1 if there is none."""
    lowest = tl.min(best, 0)
    equal = (best == lowest) & (best_slot != FAR)
    first = tl.min(tl.where(equal, oldest, FAR), 0)
    slot = tl.min(tl.where(equal & (oldest == first), best_slot, FAR), 0)
    return lowest, tl.where(slot == FAR, -1, slot)
