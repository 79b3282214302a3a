"""Eviction times of tokens that are added one by one to k slots, for all segments of a piece at once.

If the order is static, they are order statistics of prefixes (docs/kernels.md), found by :mod:`running_topk` for all
together. Otherwise one program per head and segment processes the arrivals one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._lowest_score import Order, effective, lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton._prefill_plan import LAST, Piece, numbers_of, segment
from kvpop_vllm.kernels.triton.running_topk import kth_smallest

NEVER = torch.iinfo(torch.int64).max
BLOCK = 2048


@triton.jit
def held_long(segment, topk):
    """Return the number of long-range slots that a head uses before the piece, of ``topk``, the address of its k."""
    return tl.minimum(tl.maximum(segment.start - segment.sinks - segment.window, 0), tl.load(topk))


@triton.jit(do_not_specialize=["entries"])
def _simulate(
    score, position,  # [H, E] float32 and int32, overwritten with those of each slot's token
    log_gamma, keys,  # [H] float64; [R, H] int64, keys of draws
    slots, gone,  # [H, E] int32; slots is a workspace, the entry of each slot's token
    segments, topk, entries,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process the arrivals of one head of a segment one by one.

    Once all slots are filled, the lowest of the tokens in the slots and the arrival is evicted. The first entries are
    the slots, and more of them than the head has are never filled. P is an :class:`Order`.

    Grid: segments, H. S arrivals, one after another, read 8 bytes of each slot from caches: about 2 us each, 16 ms.
    """
    s, h, heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    numbers = numbers_of(segments, s)
    topk += s * heads + h
    filled, room, total = held_long(numbers, topk), tl.load(topk), numbers.filled + numbers.leaving
    score += h * entries + numbers.entry
    position += h * entries + numbers.entry
    gone += h * entries + numbers.entry
    slots += h * entries + numbers.entry
    gamma, key = tl.load(log_gamma + h), h
    if P.draws:
        key = tl.load(keys + numbers.request * heads + h)
    for start in range(0, filled, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(slots + slot, slot, mask=slot < filled)
    tl.debug_barrier()
    for j in range(numbers.filled, total):
        raw, t = tl.load(score + j), tl.load(position + j)
        q = t + numbers.window
        target = filled
        if filled >= room:
            best, oldest, best_slot = none_yet(BLOCK)
            for start in range(0, room, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                inside = slot < room
                raws = tl.load(score + slot, mask=inside, other=0.0)
                token = tl.load(position + slot, mask=inside, other=0)
                best, oldest, best_slot = lower_of(
                    best, oldest, best_slot, raws, token, slot, inside, q, gamma, raws, key, P
                )
            lowest, victim = lowest_of(best, oldest, best_slot)
            stays = (effective(raw, t, q, gamma, raw, key, P) >= lowest) & (victim >= 0)
            target = tl.where(stays, victim, -1)
            leaves = tl.where(stays, tl.load(slots + tl.where(stays, victim, 0), mask=stays, other=0), j)
            tl.store(gone + leaves, numbers.length - total + j)
        tl.debug_barrier()  # all threads have read the words that are overwritten
        tl.store(slots + target, j, mask=target >= 0)
        tl.store(score + target, raw, mask=target >= 0)
        tl.store(position + target, t, mask=target >= 0)
        filled = tl.minimum(filled + 1, room)
        tl.debug_barrier()  # the stores are visible before the next arrival


def eviction_times(piece: Piece, score, position, *, log_gamma, decay_step=1, ages=False, keys=None) -> torch.Tensor:
    """Return ``[H, E]`` int32: the first query of its segment that does not see an entry's token, or :data:`LAST`.

    The values of long-range slots that are not in use before the piece have no meaning.

    Args:
        piece: the piece.
        score: ``[H, E]`` float32, -inf for slots that are not in use; overwritten.
        position: ``[H, E]`` int32, -1 for slots that are not in use; overwritten.
        log_gamma, decay_step, ages: as in :func:`kvpop_vllm.kernels.ops.online_topk`.
        keys: ``[R, H]`` int64 keys of draws, or None.
    """
    gone = torch.full(score.shape, LAST.value, dtype=torch.int32, device=score.device)
    if not piece.evicts:
        return gone
    if decay_step == 1 and not ages and keys is None:
        return _static_order(piece, score, position, log_gamma, gone)
    _simulate[len(piece), len(score)](
        score, position, log_gamma, keys, torch.empty_like(gone), gone, piece.segments, piece.topk, piece.entries,
        P=Order(decay_step=decay_step, ages=ages, draws=keys is not None),
        BLOCK=min(BLOCK, triton.next_power_of_2(max(16, piece.most_slots))), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return gone


def _static_order(piece: Piece, score, position, log_gamma, gone):
    """Write the eviction times under a static order into ``gone`` and return it."""
    owner, first, topk, arrival = piece.entry_numbers
    priority = score.double() - position.double() * log_gamma.unsqueeze(-1)
    newest = position.argsort(dim=-1, descending=True)
    order = newest.gather(-1, priority.gather(-1, newest).argsort(dim=-1, descending=True, stable=True))
    if len(piece) > 1:
        order = order.gather(-1, owner[order].argsort(dim=-1, stable=True))
    rank = torch.arange(order.shape[-1], device=order.device)
    above = rank.clamp_min(1).expand_as(order)
    left = (first + topk).minimum(above)
    last = kth_smallest(order.int(), left.int(), above.int()).maximum(order)
    evicted = torch.where(rank - first >= topk, last + arrival, LAST.value)
    return gone.scatter_(-1, order, evicted.int())


def online_topk(score, position, retained, *, topk, window, log_gamma, decay_step=1, ages=False, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.online_topk`."""
    (heads, total), device = score.shape, score.device
    if total == retained:
        return torch.full((heads, total), NEVER, dtype=torch.int64, device=device)
    piece = Piece([segment([topk] * heads, total - retained, position=retained + window, window=window)], device)
    unused = piece.entries - total
    entry = torch.cat([torch.arange(retained, device=device), torch.arange(retained, total, device=device) + unused])
    scores = torch.full((heads, piece.entries), -torch.inf, device=device)
    positions = torch.full((heads, piece.entries), -1, dtype=torch.int32, device=device)
    scores[:, entry], positions[:, entry] = score.float(), position.int()
    order = {"log_gamma": log_gamma.contiguous(), "decay_step": decay_step, "ages": ages}
    gone = eviction_times(piece, scores, positions, keys=None if keys is None else keys.unsqueeze(0), **order)[:, entry]
    return torch.where(gone == LAST.value, NEVER, position[:, retained : retained + 1] + window + gone)
