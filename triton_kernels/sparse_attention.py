"""Attention under the running top-k mask: FlashAttention's forward and backward over visible keys alone.

The backward pass recomputes the softmax from the stored lse (Dao 2023, arXiv 2307.08691; docs/kernels.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LOG2E, PRECISION, common_dtype
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, store_rows
from kvpop_vllm.kernels.triton._prefill_attend import attend, block_rows, blocks_of, key_lists, listed
from kvpop_vllm.kernels.triton._prefill_plan import LAST, Piece, block_of, segment
from kvpop_vllm.kernels.triton._serving_pages import Cache, Heads, element_at, view
from kvpop_vllm.kernels.triton._tiles import BACKWARD, tile_of


@triton.jit
def _backward_queries(
    q, grad,  # [T, Hq, D]
    tokens,  # k, v [T, H, D]
    segments, blocks, lists, counts, skipped, room,
    lse, delta,  # [T, Hq]
    dq,  # [T, Hq, D], contiguous
    scale,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries, for all query heads of a KV head.

    Grid: 16 queries, H. 0.62 TFLOP: 1.3 ms; keys and values come from the L2 cache.
    """
    k, v = tokens
    padded: tl.constexpr = P.padded
    h, heads, row = tl.program_id(1).to(tl.int64), tl.num_programs(1), tl.arange(0, ROWS)
    numbers, first = block_of(segments, blocks, skipped + tl.program_id(0))
    query, head = first + row % BLOCK_Q, h * P.group + row // BLOCK_Q
    present = (query < numbers.length) & (row < BLOCK_Q * P.group)
    token = numbers.token.to(tl.int64)
    rows = load_rows(element_at(q, token + query, head), present, P)
    grads = load_rows(element_at(grad, token + query, head), present, P)
    place = (token + query) * heads * P.group + head  # index in [T, Hq]
    lse2 = tl.load(lse + place, mask=present, other=0.0) * LOG2E
    deltas = tl.load(delta + place, mask=present, other=0.0)
    acc = tl.zeros([ROWS, padded], tl.float32)
    list_of = h * tl.num_programs(0) + tl.program_id(0)
    lists += list_of * 2 * room
    count = tl.load(counts + 2 * list_of + 1)
    for start in range(0, count, BLOCK_K):
        index, until, inside = listed(lists, room, start, count, BLOCK_K)
        keys = load_rows(element_at(k, token + index, h), inside, P)
        values = load_rows(element_at(v, token + index, h), inside, P)
        logits = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        visible = (index[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
        weights = tl.exp2(tl.where(visible, logits - lse2[:, None], float("-inf")))
        dweights = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        dlogits = weights * (dweights - deltas[:, None])
        acc = tl.dot(dlogits.to(keys.dtype), keys, acc, input_precision=PRECISION)
    store_rows(dq + place * P.size, acc * scale, present, P)


@triton.jit
def _backward_keys(
    q, grad, tokens,
    order, gone,  # [H, B, S] int32, keys of each block; [H, B * S] int32
    lse, delta,
    dk, dv,  # [T, H, D], contiguous
    length, scale,
    P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, summed over the query heads of its group.

    All products are transposed, keys first.

    Grid: 64 keys, B, H. 0.82 TFLOP: 1.7 ms, and more where a range has queries that miss its keys.
    """
    k, v = tokens
    padded: tl.constexpr = P.padded
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, token, row = tl.num_programs(2), b * length, h * tl.num_programs(1) + b
    entry = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = entry < length
    index = tl.load(order + row * length + entry, mask=inside, other=length)
    until = tl.load(gone + row * length + index, mask=inside, other=0)
    keys = load_rows(element_at(k, token + index, h), inside, P)
    values = load_rows(element_at(v, token + index, h), inside, P)
    begin, end = tl.min(index, 0), tl.minimum(tl.max(until, 0), length)
    dk_acc = tl.zeros([BLOCK_K, padded], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, padded], tl.float32)
    for member in range(P.group):
        head = h * P.group + member
        for first in range(begin, end, BLOCK_Q):
            query = first + tl.arange(0, BLOCK_Q)
            present, scalar = query < length, (token + query) * heads * P.group + head
            queries = load_rows(element_at(q, token + query, head), present, P)
            grads = load_rows(element_at(grad, token + query, head), present, P)
            lse2 = tl.load(lse + scalar, mask=present, other=0.0) * LOG2E
            deltas = tl.load(delta + scalar, mask=present, other=0.0)
            logits = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (scale * LOG2E)
            visible = (index[:, None] <= query[None, :]) & (query[None, :] < until[:, None]) & present[None, :]
            weights = tl.exp2(tl.where(visible, logits - lse2[None, :], float("-inf")))
            dv_acc = tl.dot(weights.to(grads.dtype), grads, dv_acc, input_precision=PRECISION)
            dweights = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
            dlogits = weights * (dweights - deltas[None, :])
            dk_acc = tl.dot(dlogits.to(queries.dtype), queries, dk_acc, input_precision=PRECISION)
    place = ((token + index) * heads + h) * P.size
    store_rows(dk + place, dk_acc * scale, inside, P)
    store_rows(dv + place, dv_acc, inside, P)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, S, D]`` as ``[B * S, H, D]`` with a contiguous last axis, without a copy where possible."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def eviction_times(rank: torch.Tensor, cutoff: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """Return for each key ``[B, H, S]`` int32 the first query that does not see it; cutoffs must not rise."""
    leaves = torch.arange(rank.shape[-1], device=rank.device) + window
    below = torch.searchsorted((-cutoff).contiguous(), (-rank).contiguous(), right=True)
    gone = below.maximum(leaves).int()
    gone[..., :sinks] = LAST.value
    return gone


def _config(q, k):
    """Return the head layout of q ``[T, Hq, D]`` and k ``[T, H, D]``."""
    return Heads(size=q.shape[2], group=q.shape[1] // k.shape[1], wide=q.dtype == torch.float32)


def _piece(batch, heads, length, device):
    """Return the rows of the batch as segments without slots."""
    parts = [segment([length] * heads, length, request=b, token=b * length) for b in range(batch)]
    return Piece(parts, device)


@torch.library.custom_op(
    "kvpop::sparse_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gone, float scale) -> (Tensor, Tensor)",
)
def _attend(q, k, v, gone, scale):
    batch, query_heads, length, _ = q.shape
    heads = k.shape[1]
    q, k, v = map(_flat, (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    gone, right = gone.transpose(0, 1).flatten(1).contiguous(), gone.new_ones(batch, heads)
    piece, config = _piece(batch, heads, length, q.device), _config(q, k)
    pages = Cache(), Cache()
    attend(piece, config, blocks_of(config), view(q), (view(k), view(v)), *pages, gone, right, scale, out, lse)
    return tuple(x.unflatten(0, (batch, length)).transpose(1, 2) for x in (out, lse))


@_attend.register_fake
def _(q, k, v, gone, scale):
    batch, query_heads, length, size = q.shape
    out = q.new_empty(batch, length, query_heads, size).transpose(1, 2)
    return out, q.new_empty(batch, length, query_heads, dtype=torch.float32).transpose(1, 2)


@torch.library.custom_op(
    "kvpop::sparse_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor gone, Tensor out, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(grad, q, k, v, gone, out, lse, scale):
    batch, _, length, _ = q.shape
    heads = k.shape[1]
    q, k, v, out, grad = map(_flat, (q, k, v, out, grad))
    lse = lse.transpose(1, 2).flatten(0, 1).contiguous()
    gone = gone.transpose(0, 1).flatten(1).contiguous()
    piece, config = _piece(batch, heads, length, q.device), _config(q, k)
    delta = (out.float() * grad.float()).sum(-1)
    inputs = view(q), view(grad), (view(k), view(v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tile = tile_of(BACKWARD, config.wide, config.size)
    rows, block_q = block_rows(config, tile)
    launch = {"P": config, "BLOCK_K": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
    for grid, key_list in key_lists(piece, config, Cache(), gone, block_q):
        _backward_queries[grid](
            *inputs, piece.segments, *key_list, lse, delta, dq, scale, ROWS=rows, BLOCK_Q=block_q, **launch
        )  # fmt: skip
    # keys of a block live about equally long, so that its range has few queries that miss most of them
    born = torch.arange(length, device=q.device)
    lives = gone.view(heads, batch, length).clamp_max(length) - born
    order = lives.float().log2().int().argsort(dim=-1, stable=True).int()
    _backward_keys[triton.cdiv(length, tile.keys), batch, heads](
        *inputs, order, gone, lse, delta, dk, dv, length, scale, BLOCK_Q=tile.rows, **launch
    )
    return tuple(x.unflatten(0, (batch, length)).transpose(1, 2) for x in (dq, dk, dv))


@_attend_backward.register_fake
def _(grad, q, k, v, gone, out, lse, scale):
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad, _):
    return *_attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_gradients, setup_context=_save)


def sparse_attention(q, k, v, rank, cutoff, *, sinks, window, scale):
    """Implement :func:`kvpop_vllm.kernels.ops.sparse_attention`."""
    common = common_dtype("sparse_attention", q, k, v)
    gone = eviction_times(rank.int(), cutoff.int(), sinks, window)
    out, lse = _attend(q.to(common), k.to(common), v.to(common), gone, scale)
    return out.to(q.dtype), lse
