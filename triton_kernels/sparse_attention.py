"""Attention under the running top-k mask: FlashAttention's forward and backward over visible keys alone.

The cutoff never rises, so a key is seen by queries from its own to the one behind its eviction: the forward pass is that of
prefill (:mod:`_prefill_attend`), over lists of what a block of queries sees. The backward pass recomputes the softmax from the
stored lse (Dao 2023, arXiv 2307.08691): dq over the same lists, dk and dv over a block's range of queries. Blocks are of keys
that live about equally long, so that a range has few queries that miss most of its keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LOG2E, PRECISION
from kvpop_vllm.kernels.triton._prefill_attend import attend, block_rows, key_lists
from kvpop_vllm.kernels.triton._prefill_plan import LAST, LENGTH, TOKEN, Piece, Segment, number
from kvpop_vllm.kernels.triton._serving_pages import Before, Cache, KernelConfig
from kvpop_vllm.kernels.triton._tiles import BACKWARD, tile_of
from torch.autograd.function import once_differentiable

LARGEST_HEAD = 128


@triton.jit
def _backward_queries(
    q, grad,  # [T, Hq, D]
    tokens,  # k, v [T, H, D] and their strides between tokens and heads
    segments, blocks, lists, counts, skipped, room,
    lse, delta,  # [T, Hq]
    dq,  # [T, Hq, D], contiguous
    scale, q_token, q_head, grad_token, grad_head,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries, for all query heads of a KV head."""
    k, v, k_token, k_head, v_token, v_head = tokens
    padded: tl.constexpr = P.padded
    h, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at = blocks + 2 * (skipped + tl.program_id(0))
    s, first = tl.load(at), tl.load(at + 1)
    token = number(segments, s, TOKEN).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, padded)
    query, head = first + row % BLOCK_Q, h * P.group + row // BLOCK_Q
    fits = (column < P.size)[None, :]
    present = (query < number(segments, s, LENGTH)) & (row < BLOCK_Q * P.group)
    inside, place = present[:, None] & fits, token + query
    rows = tl.load(q + (place * q_token + head * q_head)[:, None] + column[None, :], mask=inside, other=0.0)
    at_grad = grad + (place * grad_token + head * grad_head)[:, None] + column[None, :]
    grads = tl.load(at_grad, mask=inside, other=0.0)
    place = place * heads * P.group + head  # index in [T, Hq]
    lse2 = tl.load(lse + place, mask=present, other=0.0) * LOG2E
    deltas = tl.load(delta + place, mask=present, other=0.0)
    acc = tl.zeros([ROWS, padded], tl.float32)
    list_of = h * tl.num_programs(0) + tl.program_id(0)
    lists += list_of * 2 * room
    count = tl.load(counts + 2 * list_of + 1)
    for start in range(0, count, BLOCK_K):
        entry = start + tl.arange(0, BLOCK_K)
        index = tl.load(lists + entry, mask=entry < count, other=0)
        until = tl.load(lists + room + entry, mask=entry < count, other=0)
        there, key = (entry < count)[:, None] & fits, token + index
        block_k = tl.load(k + (key * k_token + h * k_head)[:, None] + column[None, :], mask=there, other=0.0)
        block_v = tl.load(v + (key * v_token + h * v_head)[:, None] + column[None, :], mask=there, other=0.0)
        logits = tl.dot(rows, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2E)
        visible = (index[None, :] <= query[:, None]) & (query[:, None] < until[None, :])
        weights = tl.exp2(tl.where(visible, logits - lse2[:, None], float("-inf")))
        dweights = tl.dot(grads, tl.trans(block_v), input_precision=PRECISION)
        dlogits = weights * (dweights - deltas[:, None])
        acc = tl.dot(dlogits.to(block_k.dtype), block_k, acc, input_precision=PRECISION)
    tl.store(dq + place[:, None] * P.size + column[None, :], (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _backward_keys(
    q, grad, tokens,
    order,  # [H, B, S] int32, keys of each block
    gone,  # [H, B * S] int32
    lse, delta,
    dk, dv,  # [T, H, D], contiguous
    length, scale, q_token, q_head, grad_token, grad_head,
    P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, summed over the query heads of its group.

    All products are transposed, keys first.
    """
    k, v, k_token, k_head, v_token, v_head = tokens
    padded: tl.constexpr = P.padded
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    batch, heads, first_token = tl.num_programs(1), tl.num_programs(2), b * length
    entry, column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, padded)
    listed, fits = entry < length, (column < P.size)[None, :]
    index = tl.load(order + (h * batch + b) * length + entry, mask=listed, other=length)
    until = tl.load(gone + (h * batch + b) * length + index, mask=listed, other=0)
    inside, key = listed[:, None] & fits, first_token + index
    block_k = tl.load(k + (key * k_token + h * k_head)[:, None] + column[None, :], mask=inside, other=0.0)
    block_v = tl.load(v + (key * v_token + h * v_head)[:, None] + column[None, :], mask=inside, other=0.0)
    begin, end = tl.min(index, 0), tl.minimum(tl.max(until, 0), length)
    dk_acc = tl.zeros([BLOCK_K, padded], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, padded], tl.float32)
    for member in range(P.group):
        head = h * P.group + member
        for first in range(begin, end, BLOCK_Q):
            query = first + tl.arange(0, BLOCK_Q)
            there, place = query < length, first_token + query
            wanted, scalar = there[:, None] & fits, place * heads * P.group + head
            block_q = tl.load(q + (place * q_token + head * q_head)[:, None] + column[None, :], mask=wanted, other=0.0)
            at_grad = grad + (place * grad_token + head * grad_head)[:, None] + column[None, :]
            block_g = tl.load(at_grad, mask=wanted, other=0.0)
            lse2 = tl.load(lse + scalar, mask=there, other=0.0) * LOG2E
            deltas = tl.load(delta + scalar, mask=there, other=0.0)
            logits = tl.dot(block_k, tl.trans(block_q), input_precision=PRECISION) * (scale * LOG2E)
            visible = (index[:, None] <= query[None, :]) & (query[None, :] < until[:, None]) & there[None, :]
            weights = tl.exp2(tl.where(visible, logits - lse2[None, :], float("-inf")))
            dv_acc = tl.dot(weights.to(block_g.dtype), block_g, dv_acc, input_precision=PRECISION)
            dweights = tl.dot(block_v, tl.trans(block_g), input_precision=PRECISION)
            dlogits = weights * (dweights - deltas[None, :])
            dk_acc = tl.dot(dlogits.to(block_q.dtype), block_q, dk_acc, input_precision=PRECISION)
    place = (key * heads + h)[:, None] * P.size + column[None, :]
    tl.store(dk + place, (dk_acc * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + place, dv_acc.to(dv.dtype.element_ty), mask=inside)


def _rows_of_batch(batch: int, length: int, heads: int, device: torch.device) -> Piece:
    """Return the rows of a batch as segments without slots."""
    return Piece([Segment(b, b * length, length, 0, 0, 0, 1, [length] * heads) for b in range(batch)], device)


def _no_slots(k: torch.Tensor, v: torch.Tensor, gone: torch.Tensor) -> Cache:
    """Return a cache of which no slot is in use, as the kernels of prefill take it."""
    return Cache(k, v, *[gone] * 3, *[0] * 4, gone, 0, 0, 0)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return ``[B, H, S, D]`` as ``[B * S, H, D]`` with a contiguous last axis, without a copy where that is possible."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def eviction_times(rank: torch.Tensor, cutoff: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """Return for each key ``[B, H, S]`` int32 the first query that does not see it.

    Args:
        rank: ``[B, H, S]``.
        cutoff: ``[B, H, S]``, which must not rise.
        sinks: s.
        window: w.
    """
    leaves = torch.arange(rank.shape[-1], device=rank.device) + window
    below = torch.searchsorted((-cutoff).contiguous(), (-rank).contiguous(), right=True)
    gone = below.maximum(leaves).int()
    gone[..., :sinks] = LAST.value
    return gone


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gone, scale):
        batch, query_heads, length, size = q.shape
        heads, piece = k.shape[1], _rows_of_batch(batch, length, k.shape[1], q.device)
        padded, group = max(16, triton.next_power_of_2(size)), query_heads // heads
        config = KernelConfig(size, padded, group, 64, 0, 1, 64, 0, 1, "none")
        q, k, v = map(_flat, (q, k, v))
        tokens = k, v, *k.stride()[:2], *v.stride()[:2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        gone, right = gone.transpose(0, 1).flatten(1).contiguous(), gone.new_ones(batch, heads)
        attend(piece, config, q, tokens, _no_slots(k, v, gone), Before(), gone, right, scale, out, lse)
        ctx.save_for_backward(q, k, v, gone, out, lse)
        ctx.options = piece, config, scale
        out, natural = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (out, lse))
        ctx.mark_non_differentiable(natural)
        return out, natural

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        q, k, v, gone, out, lse = ctx.saved_tensors
        piece, config, scale = ctx.options
        batch, grad = len(piece), _flat(grad)
        heads, length = len(gone), len(q) // batch
        delta = (out.float() * grad.float()).sum(-1)
        tokens, strides = (k, v, *k.stride()[:2], *v.stride()[:2]), (*q.stride()[:2], *grad.stride()[:2])
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        tile = tile_of(BACKWARD, q.dtype == torch.float32, config.size)
        rows, block_q = block_rows(config, tile)
        launch = {"P": config, "BLOCK_K": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
        for grid, listed in key_lists(piece, config, _no_slots(k, v, gone), gone, block_q):
            _backward_queries[grid](
                q, grad, tokens, piece.segments, *listed, lse, delta, dq, scale, *strides, ROWS=rows, BLOCK_Q=block_q, **launch
            )  # fmt: skip
        born = torch.arange(length, device=q.device)
        lives = gone.view(heads, batch, length).clamp_max(length) - born
        order = lives.float().log2().int().argsort(dim=-1, stable=True).int()
        _backward_keys[triton.cdiv(length, tile.keys), batch, heads](
            q, grad, tokens, order, gone, lse, delta, dk, dv, length, scale, *strides, BLOCK_Q=tile.rows, **launch
        )
        back = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (dq, dk, dv))
        return *back, None, None


def sparse_attention(q, k, v, rank, cutoff, *, sinks, window, scale):
    """Implement :func:`kvpop_vllm.kernels.ops.sparse_attention`."""
    if q.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"sparse_attention in Triton takes heads of up to {LARGEST_HEAD}, got {q.shape[-1]}")
    common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if common not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"sparse_attention in Triton takes float32, float16 and bfloat16, got {common}: use impl='reference'"
        )
    gone = eviction_times(rank.int(), cutoff.int(), sinks, window)
    out, lse = _SparseAttention.apply(q.to(common), k.to(common), v.to(common), gone, scale)
    return out.to(q.dtype), lse
