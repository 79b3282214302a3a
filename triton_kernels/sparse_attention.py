"""Attention under the running top-k mask: FlashAttention's forward and backward without the unseen blocks.

Softmax is computed online over blocks of keys. The backward pass recomputes it from the stored lse (Dao 2023,
arXiv 2307.08691). Before each pass the blocks of keys that a block of queries visits are listed, from one
number per block. A block is visited if it holds a sink, overlaps the window of some query, or its best rank
is within the largest cutoff of the queries. The lists take ``S**2 / (BLOCK_Q * BLOCK_K)`` int32 per head: in
the forward pass of 16-bit inputs 128 KiB at 16,384 tokens, 8 MiB at 131,072.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._softmax import add_block
from torch.autograd.function import once_differentiable

INT32_MAX = tl.constexpr(2**31 - 1)
LARGEST_HEAD = 128


@triton.jit
def _list_blocks(
    best_rank,  # [B * H, key blocks]
    best_cutoff,  # [B * H, query blocks]
    counts,  # [B * H, blocks with lists]
    lists,  # [B * H, blocks with lists, listed blocks]
    length, sinks, window, key_blocks, query_blocks,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, OF_QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List the key blocks that each query block visits (OF_QUERIES), or the query blocks per key block."""
    one = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    others = key_blocks if OF_QUERIES else query_blocks
    row = head * tl.num_programs(0) + one
    found = 0
    for start in range(0, others, WIDTH):
        many = start + tl.arange(0, WIDTH)
        same = tl.full([WIDTH], 0, tl.int32) + one
        key_block = many if OF_QUERIES else same
        query_block = same if OF_QUERIES else many
        rank = tl.load(best_rank + head * key_blocks + key_block, mask=key_block < key_blocks, other=INT32_MAX)
        cutoff = tl.load(best_cutoff + head * query_blocks + query_block, mask=query_block < query_blocks, other=-1)
        first_key, first_query = key_block * BLOCK_K, query_block * BLOCK_Q
        near = (first_key < sinks) | (first_key + BLOCK_K - 1 > first_query - window)
        seen = (near | (rank <= cutoff)) & (first_key < tl.minimum(first_query + BLOCK_Q, length))
        seen = seen & (many < others)
        flags = seen.to(tl.int32)
        tl.store(lists + row * others + found + tl.cumsum(flags, 0) - 1, many, mask=seen)
        found += tl.sum(flags, 0)
    tl.store(counts + row, found)


@triton.jit
def _visible(query, key, rank, cutoff, length, sinks, window):
    """Return the mask of the op; arguments broadcast, ``rank`` belongs to keys and ``cutoff`` to queries."""
    kept = (key < sinks) | (key > query - window) | (rank <= cutoff)
    return kept & (key <= query) & (key < length) & (query < length)


@triton.jit
def _rows(base, first, stride, length, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows ``first ..`` of a matrix ``[length, D]`` as ``[ROWS, COLUMNS]``, 0 outside."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (first + row < length)[:, None]
    if D != COLUMNS:
        inside = inside & (column < D)[None, :]
    start = base + first.to(tl.int64) * stride
    return tl.load(start + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(base, values, first, stride, length, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store rows ``first ..`` of a matrix ``[length, D]``, omitting elements outside the matrix."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (first + row < length)[:, None] & (column < D)[None, :]
    start = base + first.to(tl.int64) * stride
    tl.store(start + row[:, None] * stride + column[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _forward(
    q, k, v, rank, cutoff, counts, lists, out, lse,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob,
    stride_oh, stride_os,
    heads, group, length, key_blocks, sinks, window, scale,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of a block of queries of one query head."""
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first
    row = tl.program_id(1).to(tl.int64)  # index in [B * Hq]
    batch, query_head = row // (heads * group), row % (heads * group)
    head = query_head // group
    kv_row = batch * heads + head
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    rank += kv_row * length
    first = query_block * BLOCK_Q
    queries = first + tl.arange(0, BLOCK_Q)
    block_q = _rows(q + batch * stride_qb + query_head * stride_qh, first, stride_qs, length, D, BLOCK_Q, PADDED)
    cutoffs = tl.load(cutoff + kv_row * length + queries, mask=queries < length, other=-1)

    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    visits = kv_row * tl.num_programs(0) + query_block
    lists += visits * key_blocks
    for i in range(tl.load(counts + visits)):
        start = tl.load(lists + i) * BLOCK_K
        keys = start + tl.arange(0, BLOCK_K)
        block_k = _rows(k, start, stride_ks, length, D, BLOCK_K, PADDED)
        ranks = tl.load(rank + keys, mask=keys < length, other=INT32_MAX)
        logits = tl.dot(block_q, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2E)
        visible = _visible(queries[:, None], keys[None, :], ranks[None, :], cutoffs[:, None], length, sinks, window)
        block_v = _rows(v, start, stride_vs, length, D, BLOCK_K, PADDED)
        top, total, acc = add_block(tl.where(visible, logits, float("-inf")), block_v, top, total, acc)
    total = tl.where(queries < length, total, 1.0)  # only rows behind the end see no key
    acc = acc / total[:, None]
    _store_rows(out + batch * stride_ob + query_head * stride_oh, acc, first, stride_os, length, D, BLOCK_Q, PADDED)
    tl.store(lse + row * length + queries, (top + tl.log2(total)) * LN2, mask=queries < length)


@triton.jit
def _backward_queries(
    q, k, v, rank, cutoff, counts, lists, out, grad, lse, delta, dq,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_ob,
    stride_oh, stride_os, stride_gb, stride_gh, stride_gs, stride_db, stride_dh, stride_ds,
    heads, group, length, key_blocks, sinks, window, scale,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of one query head, and ``delta`` for :func:`_backward_keys`.

    ``delta = sum(out * grad)``.
    """
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, query_head = row // (heads * group), row % (heads * group)
    head = query_head // group
    kv_row = batch * heads + head
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    rank += kv_row * length
    first = query_block * BLOCK_Q
    queries = first + tl.arange(0, BLOCK_Q)
    inside = queries < length
    block_q = _rows(q + batch * stride_qb + query_head * stride_qh, first, stride_qs, length, D, BLOCK_Q, PADDED)
    block_o = _rows(out + batch * stride_ob + query_head * stride_oh, first, stride_os, length, D, BLOCK_Q, PADDED)
    block_g = _rows(grad + batch * stride_gb + query_head * stride_gh, first, stride_gs, length, D, BLOCK_Q, PADDED)
    cutoffs = tl.load(cutoff + kv_row * length + queries, mask=inside, other=-1)
    lse2 = tl.load(lse + row * length + queries, mask=inside, other=0.0) * LOG2E
    deltas = tl.sum(block_o.to(tl.float32) * block_g.to(tl.float32), 1)
    tl.store(delta + row * length + queries, deltas, mask=inside)

    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    visits = kv_row * tl.num_programs(0) + query_block
    lists += visits * key_blocks
    for i in range(tl.load(counts + visits)):
        start = tl.load(lists + i) * BLOCK_K
        keys = start + tl.arange(0, BLOCK_K)
        block_k = _rows(k, start, stride_ks, length, D, BLOCK_K, PADDED)
        block_v = _rows(v, start, stride_vs, length, D, BLOCK_K, PADDED)
        ranks = tl.load(rank + keys, mask=keys < length, other=INT32_MAX)
        logits = tl.dot(block_q, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2E)
        visible = _visible(queries[:, None], keys[None, :], ranks[None, :], cutoffs[:, None], length, sinks, window)
        weights = tl.exp2(tl.where(visible, logits - lse2[:, None], float("-inf")))
        dweights = tl.dot(block_g, tl.trans(block_v), input_precision=PRECISION)
        dlogits = weights * (dweights - deltas[:, None])
        acc = tl.dot(dlogits.to(block_k.dtype), block_k, acc, input_precision=PRECISION)
    _store_rows(
        dq + batch * stride_db + query_head * stride_dh, acc * scale, first, stride_ds, length, D, BLOCK_Q, PADDED
    )


@triton.jit
def _backward_keys(
    q, k, v, rank, cutoff, counts, lists, grad, lse, delta, dk, dv,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, stride_gb,
    stride_gh, stride_gs, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    heads, group, length, query_blocks, sinks, window, scale,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, summed over the query heads of its group.

    All products are transposed, keys first.
    """
    key_block = tl.program_id(0)  # early keys have the most queries and start first
    kv_row = tl.program_id(1).to(tl.int64)
    batch, head = kv_row // heads, kv_row % heads
    start = key_block * BLOCK_K
    keys = start + tl.arange(0, BLOCK_K)
    block_k = _rows(k + batch * stride_kb + head * stride_kh, start, stride_ks, length, D, BLOCK_K, PADDED)
    block_v = _rows(v + batch * stride_vb + head * stride_vh, start, stride_vs, length, D, BLOCK_K, PADDED)
    ranks = tl.load(rank + kv_row * length + keys, mask=keys < length, other=INT32_MAX)
    cutoff += kv_row * length

    dk_acc = tl.zeros([BLOCK_K, PADDED], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, PADDED], tl.float32)
    visits = kv_row * tl.num_programs(0) + key_block
    lists += visits * query_blocks
    count = tl.load(counts + visits)
    for member in range(group):
        query_head = head * group + member
        row = kv_row * group + member
        q_head = q + batch * stride_qb + query_head * stride_qh
        grad_head = grad + batch * stride_gb + query_head * stride_gh
        for i in range(count):
            first = tl.load(lists + i) * BLOCK_Q
            queries = first + tl.arange(0, BLOCK_Q)
            inside = queries < length
            block_q = _rows(q_head, first, stride_qs, length, D, BLOCK_Q, PADDED)
            block_g = _rows(grad_head, first, stride_gs, length, D, BLOCK_Q, PADDED)
            cutoffs = tl.load(cutoff + queries, mask=inside, other=-1)
            lse2 = tl.load(lse + row * length + queries, mask=inside, other=0.0) * LOG2E
            deltas = tl.load(delta + row * length + queries, mask=inside, other=0.0)
            logits = tl.dot(block_k, tl.trans(block_q), input_precision=PRECISION) * (scale * LOG2E)
            visible = _visible(queries[None, :], keys[:, None], ranks[:, None], cutoffs[None, :], length, sinks, window)
            weights = tl.exp2(tl.where(visible, logits - lse2[None, :], float("-inf")))
            dv_acc = tl.dot(weights.to(block_g.dtype), block_g, dv_acc, input_precision=PRECISION)
            dweights = tl.dot(block_v, tl.trans(block_g), input_precision=PRECISION)
            dlogits = weights * (dweights - deltas[None, :])
            dk_acc = tl.dot(dlogits.to(block_q.dtype), block_q, dk_acc, input_precision=PRECISION)
    dk += batch * stride_dkb + head * stride_dkh
    dv += batch * stride_dvb + head * stride_dvh
    _store_rows(dk, dk_acc * scale, start, stride_dks, length, D, BLOCK_K, PADDED)
    _store_rows(dv, dv_acc, start, stride_dvs, length, D, BLOCK_K, PADDED)


def tiles(pass_name: str, padded: int, dtype: torch.dtype) -> dict:
    """Return block sizes and launch options of a pass, ``forward`` or ``backward``."""
    if dtype == torch.float32:
        if pass_name == "forward":
            return {"BLOCK_Q": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
        return {"BLOCK_Q": 32, "BLOCK_K": 32, "num_warps": 8, "num_stages": 1}
    warps = 8 if padded == 128 else 4
    if pass_name == "forward":
        return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": warps, "num_stages": 3}
    return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": warps, "num_stages": 2}


def _block_extreme(values: torch.Tensor, block: int, largest: bool) -> torch.Tensor:
    """Return the largest or smallest of each block of ``block`` values.

    ``[B, H, S]`` becomes ``[B, H, blocks]`` int32.
    """
    missing = -values.shape[-1] % block
    padded = torch.nn.functional.pad(values, (0, missing), value=-1 if largest else INT32_MAX.value)
    blocks = padded.unflatten(-1, (-1, block))
    return (blocks.amax(-1) if largest else blocks.amin(-1)).contiguous()


def _visits(rank, cutoff, sinks, window, block_q, block_k, of_queries):
    """Return counts and lists of :func:`_list_blocks`."""
    best_rank, best_cutoff = _block_extreme(rank, block_k, False), _block_extreme(cutoff, block_q, True)
    key_blocks, query_blocks = best_rank.shape[-1], best_cutoff.shape[-1]
    ones, others = (query_blocks, key_blocks) if of_queries else (key_blocks, query_blocks)
    rows = rank.shape[0] * rank.shape[1]
    counts = torch.empty(rows, ones, dtype=torch.int32, device=rank.device)
    lists = torch.empty(rows, ones, others, dtype=torch.int32, device=rank.device)
    _list_blocks[ones, rows](
        best_rank, best_cutoff, counts, lists, rank.shape[-1], sinks, window, key_blocks, query_blocks,
        BLOCK_Q=block_q, BLOCK_K=block_k, OF_QUERIES=of_queries, WIDTH=128, num_warps=1,
    )  # fmt: skip
    return counts, lists


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, copied if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rank, cutoff, sinks, window, scale):
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        batch, query_heads, length, size = q.shape
        heads = k.shape[1]
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        padded = max(16, triton.next_power_of_2(size))
        options = tiles("forward", padded, q.dtype)
        blocks = options["BLOCK_Q"], options["BLOCK_K"]
        counts, lists = _visits(rank, cutoff, sinks, window, *blocks, of_queries=True)
        _forward[triton.cdiv(length, blocks[0]), batch * query_heads](
            q, k, v, rank, cutoff, counts, lists, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, query_heads // heads, length, lists.shape[-1], sinks, window, scale, D=size, PADDED=padded, **options,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, rank, cutoff, out, lse)
        ctx.options = sinks, window, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        q, k, v, rank, cutoff, out, lse = ctx.saved_tensors
        sinks, window, scale = ctx.options
        batch, query_heads, length, size = q.shape
        heads = k.shape[1]
        grad = _unit_stride(grad)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(lse)
        padded = max(16, triton.next_power_of_2(size))
        options = tiles("backward", padded, q.dtype)
        blocks = options["BLOCK_Q"], options["BLOCK_K"]
        sizes = heads, query_heads // heads, length
        mask = sinks, window, scale
        counts, lists = _visits(rank, cutoff, sinks, window, *blocks, of_queries=True)
        _backward_queries[triton.cdiv(length, blocks[0]), batch * query_heads](
            q, k, v, rank, cutoff, counts, lists, out, grad, lse, delta, dq,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
            *sizes, lists.shape[-1], *mask, D=size, PADDED=padded, **options,
        )  # fmt: skip
        counts, lists = _visits(rank, cutoff, sinks, window, *blocks, of_queries=False)
        _backward_keys[triton.cdiv(length, blocks[1]), batch * heads](
            q, k, v, rank, cutoff, counts, lists, grad, lse, delta, dk, dv,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            *sizes, lists.shape[-1], *mask, D=size, PADDED=padded, **options,
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None, None


def sparse_attention(q, k, v, rank, cutoff, *, sinks, window, scale):
    """Implement :func:`kvpop_vllm.kernels.ops.sparse_attention`."""
    if q.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"sparse_attention in Triton takes heads of up to {LARGEST_HEAD}, got {q.shape[-1]}")
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if common not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"sparse_attention in Triton takes float32, float16 and bfloat16, got {common}: use impl='reference'"
        )
    rank, cutoff = (x.to(torch.int32).contiguous() for x in (rank, cutoff))
    out, lse = _SparseAttention.apply(q.to(common), k.to(common), v.to(common), rank, cutoff, sinks, window, scale)
    return out.to(q.dtype), lse
