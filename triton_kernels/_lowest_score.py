"""Which of a row of slots has the lowest effective score, a block of slots at a time."""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)


@triton.jit
def none_yet(BLOCK: tl.constexpr):
    """What a search starts with: each lane's lowest score, the token that has it, and its slot."""
    far = tl.full([BLOCK], FAR, tl.int32)
    return tl.full([BLOCK], float("inf"), tl.float64), far, far


@triton.jit
def lower_of(best, oldest, where, effective, token, slot, inside):
    """What each lane has seen and the slots of a block that are inside: the lower, of equal ones the older token. Scores that are no
    number are never lower."""
    lower = inside & ((effective < best) | ((effective == best) & (token < oldest)))
    return tl.where(lower, effective, best), tl.where(lower, token, oldest), tl.where(lower, slot, where)


@triton.jit
def lowest_of(best, oldest, where):
    """The lowest score of all lanes and the slot that has it, of equal ones the oldest token's; FAR where there is none."""
    lowest = tl.min(best, 0)
    equal = (best == lowest) & (where != FAR)
    first = tl.min(tl.where(equal, oldest, FAR), 0)
    return lowest, tl.min(tl.where(equal & (oldest == first), where, FAR), 0)
