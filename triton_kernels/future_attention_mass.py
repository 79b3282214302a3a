"""Transposed attention pass: an online log-sum-exp of each key over the queries after its window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION

LARGEST_HEAD = 128


@triton.jit
def _mass(
    q, k, lse, out,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    heads, group, length, window,
    reach,  # the last query of key t is t + reach
    scale,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the log mass of a block of keys under one query head."""
    row = tl.program_id(1).to(tl.int64)  # index in [B * Hq]
    batch, query_head = row // (heads * group), row % (heads * group)
    start = tl.program_id(0) * BLOCK_K  # early keys have the most queries and start first
    keys = start + tl.arange(0, BLOCK_K)
    column = tl.arange(0, PADDED)
    k += batch * stride_kb + (query_head // group) * stride_kh
    inside = (keys < length)[:, None] & (column < D)[None, :]
    block_k = tl.load(k + keys.to(tl.int64)[:, None] * stride_ks + column[None, :], mask=inside, other=0.0)
    q += batch * stride_qb + query_head * stride_qh
    lse += row * length

    top = tl.full([BLOCK_K], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    for first in range(start + window, tl.minimum(length, start + BLOCK_K + reach), BLOCK_Q):
        queries = first + tl.arange(0, BLOCK_Q)
        here = queries < length
        wanted = here[:, None]
        if D != PADDED:
            wanted = wanted & (column < D)[None, :]
        block_q = tl.load(q + queries.to(tl.int64)[:, None] * stride_qs + column[None, :], mask=wanted, other=0.0)
        normaliser = tl.load(lse + queries, mask=here, other=0.0) * LOG2E
        logits = tl.dot(block_k, tl.trans(block_q), input_precision=PRECISION) * (scale * LOG2E) - normaliser[None, :]
        age = queries[None, :] - keys[:, None]
        logits = tl.where((age >= window) & (age <= reach) & here[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - pivot) + tl.sum(tl.exp2(logits - pivot[:, None]), 1)
        top = new_top
    met = total > 0.0
    mass = tl.where(met, (top + tl.log2(tl.where(met, total, 1.0))) * LN2, float("-inf"))
    tl.store(out + row * length + keys, mass, mask=keys < length)


def tiles(padded: int, dtype: torch.dtype) -> dict:
    """Return block sizes and launch options for the padded head size and the dtype."""
    if dtype == torch.float32:
        return {"BLOCK_Q": 32, "BLOCK_K": 64, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8 if padded == 128 else 4, "num_stages": 3}


def future_attention_mass(q, k, lse, *, window, scale, lookahead=None):
    """Implement :func:`kvpop_vllm.kernels.ops.future_attention_mass`."""
    batch, query_heads, length, size = q.shape
    common = torch.promote_types(q.dtype, k.dtype)
    if size > LARGEST_HEAD:
        raise ValueError(f"future_attention_mass in Triton takes heads of up to {LARGEST_HEAD}, got {size}")
    if common not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"future_attention_mass in Triton takes float32, float16 and bfloat16, got {common}: use impl='reference'"
        )
    q, k = (x.detach().to(common) for x in (q, k))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    lse = lse.detach().float().contiguous()
    out = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    reach = length if lookahead is None else min(length, window + lookahead)
    padded = max(16, triton.next_power_of_2(size))
    options = tiles(padded, common)
    _mass[triton.cdiv(length, options["BLOCK_K"]), batch * query_heads](
        q, k, lse, out, *q.stride()[:3], *k.stride()[:3], k.shape[1], query_heads // k.shape[1],
        length, min(window, length), reach, scale, D=size, PADDED=padded, **options,
    )  # fmt: skip
    return out
