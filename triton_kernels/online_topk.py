"""Eviction times of tokens that are added one by one to k slots.

If the order is static, a token is evicted once k tokens that rank above it have arrived: at the k-th smallest
arrival among them, or at its own arrival if that is later. With the arrivals listed by rank, best first, this
is an order statistic of every prefix, which :mod:`running_topk` computes for all prefixes at once. If the
order changes with the query's position, one program per head processes the arrivals one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._draws import draw
from kvpop_vllm.kernels.triton._lowest_score import FAR, lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton.running_topk import _kth_smallest

NEVER = torch.iinfo(torch.int64).max
BLOCK = 2048


@triton.jit
def _effective(raw, token, q, log_gamma, key, decay_step, AGES: tl.constexpr, DRAWS: tl.constexpr):
    """Return the effective scores of tokens at q, float64; ``key`` is the key of the head's draws.

    Kernels are launched without fused multiply-adds, as in :mod:`_serving_retain`.
    """
    score, age = raw.to(tl.float64), q - token
    if DRAWS:
        score = draw(key, q, token)
    if AGES:
        score = score * age.to(tl.float64)
    return score + (age // decay_step).to(tl.float64) * log_gamma


@triton.jit(do_not_specialize=["held", "total", "topk", "window", "decay_step"])
def _simulate(
    score,  # [H, T] float32
    position,  # [H, T] int32
    log_gamma,  # [H] float64
    keys,  # [H] int64, keys of draws
    slots,  # [H, 3, k] int32: index, position and score bits of each slot's token; initially the held ones
    gone,  # [H, T] int64
    held, total, topk, window, decay_step,
    AGES: tl.constexpr, DRAWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process the arrivals of one head one by one.

    Once all slots are filled, the lowest of the tokens in the slots and the arrival is evicted.
    """
    h = tl.program_id(0).to(tl.int64)
    score += h * total
    position += h * total
    gone += h * total
    slots += h * 3 * topk
    gamma, key = tl.load(log_gamma + h), h
    if DRAWS:
        key = tl.load(keys + h)
    filled = held
    for j in range(held, total):
        raw, t = tl.load(score + j), tl.load(position + j)
        q = t + window
        target = filled
        if filled >= topk:
            best, oldest, where = none_yet(BLOCK)
            for start in range(0, topk, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                inside = slot < topk
                token = tl.load(slots + topk + slot, mask=inside, other=0)
                bits = tl.load(slots + 2 * topk + slot, mask=inside, other=0)
                token = tl.where(inside, token, q - 1)
                raws = bits.to(tl.float32, bitcast=True)
                effective = _effective(raws, token, q, gamma, key, decay_step, AGES, DRAWS)
                best, oldest, where = lower_of(best, oldest, where, effective, token, slot, inside)
            lowest, victim = lowest_of(best, oldest, where)
            stays = (_effective(raw, t, q, gamma, key, decay_step, AGES, DRAWS) >= lowest) & (victim != FAR)
            target = tl.where(stays, victim, -1)
            leaves = tl.where(stays, tl.load(slots + tl.where(stays, victim, 0), mask=stays, other=0), j)
            tl.store(gone + leaves, q.to(tl.int64))
        tl.debug_barrier()  # all threads have read the words that are overwritten
        tl.store(slots + target, j, mask=target >= 0)
        tl.store(slots + topk + target, t, mask=target >= 0)
        tl.store(slots + 2 * topk + target, raw.to(tl.int32, bitcast=True), mask=target >= 0)
        filled = tl.minimum(filled + 1, topk)
        tl.debug_barrier()  # the stores are visible before the next arrival


def online_topk(score, position, held, *, topk, window, log_gamma, decay_step=1, ages=False, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.online_topk`.

    Raises:
        ValueError: more tokens are held than there are slots.
    """
    (heads, total), device = score.shape, score.device
    if held > topk:
        raise ValueError(f"{held} tokens are held in {topk} slots")
    gone = torch.full((heads, total), NEVER, dtype=torch.int64, device=device)
    if total <= topk or total <= held:
        return gone
    if topk == 0 or decay_step == 1 and not ages and keys is None:
        return _static_order(score, position, held, topk, window, log_gamma, gone)
    score, position, log_gamma = score.float().contiguous(), position.int().contiguous(), log_gamma.contiguous()
    slots = torch.empty(heads, 3, topk, dtype=torch.int32, device=device)
    slots[:, 0, :held] = torch.arange(held, dtype=torch.int32, device=device)
    slots[:, 1, :held], slots[:, 2, :held] = position[:, :held], score[:, :held].view(torch.int32)
    _simulate[(heads,)](
        score, position, log_gamma, keys, slots, gone, held, total, topk, window, decay_step, AGES=ages,
        DRAWS=keys is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(max(16, topk))), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return gone


def _static_order(score, position, held, topk, window, log_gamma, gone):
    """Write the eviction times under a static order into ``gone`` and return it."""
    (heads, total), device = score.shape, score.device
    leaving = last = torch.arange(held, total, device=device).expand(heads, -1)  # evicted tokens, arrivals
    if topk:
        priority = score.double() - position.double() * log_gamma.unsqueeze(-1)
        newest = position.argsort(dim=-1, descending=True)
        order = newest.gather(-1, priority.gather(-1, newest).argsort(dim=-1, descending=True, stable=True))
        leaving = order[:, topk:]
        last = _kth_smallest(order.int(), topk, topk, total - topk).maximum(leaving.int())
    return gone.scatter_(-1, leaving, position[:, held : held + 1] + window + last.long() - held)
