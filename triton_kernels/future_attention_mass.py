"""Transposed attention pass: an online log-sum-exp of each key over the queries after its window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION, common_dtype
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows
from kvpop_vllm.kernels.triton._serving_pages import Heads
from kvpop_vllm.kernels.triton._softmax import faded
from kvpop_vllm.kernels.triton._tiles import MASS, tile_of


@triton.jit(do_not_specialize=["queries", "length", "first", "window", "reach"])
def _mass(
    q, k, lse, out,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    heads, queries, length,  # H, Q, S
    first,  # position of the first query
    window,
    reach,  # the last query of key t is t + reach
    scale,
    P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute keys' log masses under a query head. Grid: 128 keys, B times Hq. 0.27 TFLOP: 0.6 ms; queries from L2."""
    row = tl.program_id(1).to(tl.int64)  # index in [B * Hq]
    batch, query_head = row // (heads * P.group), row % (heads * P.group)
    start = tl.program_id(0) * BLOCK_K  # early keys have the most queries and start first
    keys = start + tl.arange(0, BLOCK_K)
    k += batch * stride_kb + (query_head // P.group) * stride_kh
    block_k = load_rows(k + keys.to(tl.int64) * stride_ks, keys < length, P)
    q += batch * stride_qb + query_head * stride_qh
    lse += row * queries

    top = tl.full([BLOCK_K], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    begin = tl.maximum(start + window - first, 0)
    for query in range(begin, tl.minimum(start + BLOCK_K + reach - first, queries), BLOCK_Q):
        rows = query + tl.arange(0, BLOCK_Q)
        inside = rows < queries
        block_q = load_rows(q + rows.to(tl.int64) * stride_qs, inside, P)
        normaliser = tl.load(lse + rows, mask=inside, other=0.0) * LOG2E
        logits = tl.dot(block_k, tl.trans(block_q), input_precision=PRECISION) * (scale * LOG2E) - normaliser[None, :]
        age = first + rows[None, :] - keys[:, None]
        logits = tl.where((age >= window) & (age <= reach) & inside[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        pivot, fade = faded(top, new_top)
        total = total * fade + tl.sum(tl.exp2(logits - pivot[:, None]), 1)
        top = new_top
    met = total > 0.0
    mass = tl.where(met, (top + tl.log2(tl.where(met, total, 1.0))) * LN2, float("-inf"))
    tl.store(out + row * length + keys, mass, mask=keys < length)


@torch.library.custom_op(
    "kvpop::future_attention_mass",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor lse, int first, int window, int reach, float scale) -> Tensor",
)
def _log_mass(q, k, lse, first, window, reach, scale):
    (batch, query_heads, queries, size), length = q.shape, k.shape[2]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    lse = lse.float().contiguous()
    out = torch.empty(batch, query_heads, length, dtype=torch.float32, device=q.device)
    config = Heads(size=size, group=query_heads // k.shape[1], wide=q.dtype == torch.float32)
    tile = tile_of(MASS, config.wide, size)
    _mass[triton.cdiv(length, tile.keys), batch * query_heads](
        q, k, lse, out, *q.stride()[:3], *k.stride()[:3], k.shape[1], queries, length, first, window, reach, scale,
        P=config, BLOCK_Q=tile.rows, BLOCK_K=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@_log_mass.register_fake
def _(q, k, lse, first, window, reach, scale):
    return q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)


def future_attention_mass(q, k, lse, *, window, scale, lookahead=None, first=0):
    """Implement :func:`kvpop_vllm.kernels.ops.future_attention_mass`."""
    common, end = common_dtype("future_attention_mass", q, k), first + q.shape[2]
    window = min(window, end)  # of numbers that fit 32 bits
    reach = end if lookahead is None else min(end, window + lookahead)
    return _log_mass(q.to(common), k.to(common), lse, first, window, reach, scale)
