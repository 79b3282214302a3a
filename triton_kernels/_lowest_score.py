"""Search for the slot with the lowest effective score, one block of slots at a time."""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)


@triton.jit
def none_yet(BLOCK: tl.constexpr):
    """Return the initial state of a search: lowest score, its token and its slot, for each lane."""
    far = tl.full([BLOCK], FAR, tl.int32)
    return tl.full([BLOCK], float("inf"), tl.float64), far, far


@triton.jit
def lower_of(best, oldest, where, effective, token, slot, inside):
    """Update each lane with a block of slots: keep the lower score, of equal scores the older token.

    Scores that are NaN are never lower. Slots that are not ``inside`` are ignored.
    """
    lower = inside & ((effective < best) | ((effective == best) & (token < oldest)))
    return tl.where(lower, effective, best), tl.where(lower, token, oldest), tl.where(lower, slot, where)


@triton.jit
def lowest_of(best, oldest, where):
    """Return the lowest score of all lanes and its slot, or FAR as slot if there is none.

    Of equal scores the oldest token's slot is returned.
    """
    lowest = tl.min(best, 0)
    equal = (best == lowest) & (where != FAR)
    first = tl.min(tl.where(equal, oldest, FAR), 0)
    return lowest, tl.min(tl.where(equal & (oldest == first), where, FAR), 0)
