"""Attention under the running top-k mask, in plain torch, block by block of queries.

The backward pass recomputes the blocks. Memory is O(S) per head: one block of ``BLOCK`` queries against all
keys that it may see.
"""

import torch

from kvpop_vllm.kernels.reference.masked_attention import high, masked_attention, masked_attention_backward

BLOCK = 256


def visible_block(rank, cutoff, first, last, sinks, window):
    """Return the mask ``[B, H, last - first, last]`` of queries ``[first, last)`` over keys ``[0, last)``."""
    q = torch.arange(first, last, device=rank.device).unsqueeze(1)
    t = torch.arange(last, device=rank.device)
    near = (t < sinks) | (t > q - window)
    long_range = rank[:, :, None, :last] <= cutoff[:, :, first:last, None]
    return (near | long_range) & (t <= q)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rank, cutoff, sinks, window, scale):
        batch, heads, length = k.shape[:3]
        grouped = q.unflatten(1, (heads, -1))
        out = torch.empty_like(grouped)
        lse = torch.empty(grouped.shape[:-1], dtype=high(q[:0]).dtype, device=q.device)
        for a in range(0, length, BLOCK):
            b = min(a + BLOCK, length)
            mask = visible_block(rank, cutoff, a, b, sinks, window).flatten(0, 1)
            rows = grouped[..., a:b, :].flatten(0, 1)
            part = masked_attention(rows, k[:, :, :b].flatten(0, 1), v[:, :, :b].flatten(0, 1), mask, scale)
            out[..., a:b, :], lse[..., a:b] = (x.unflatten(0, (batch, heads)) for x in part)
        out, lse = out.flatten(1, 2), lse.flatten(1, 2)
        ctx.save_for_backward(q, k, v, rank, cutoff, out, lse)
        ctx.options = sinks, window, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        q, k, v, rank, cutoff, out, lse = ctx.saved_tensors
        sinks, window, scale = ctx.options
        batch, heads, length = k.shape[:3]
        # rows of a batch as heads
        q, out, grad, lse = (x.unflatten(1, (heads, -1)).flatten(0, 1) for x in (q, out, grad, lse))
        keys, values = high(k.flatten(0, 1)), high(v.flatten(0, 1))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for a in range(0, length, BLOCK):
            b = min(a + BLOCK, length)
            mask = visible_block(rank, cutoff, a, b, sinks, window).flatten(0, 1)
            rows = (x[:, :, a:b] for x in (grad, q))
            past = (x[:, :b] for x in (keys, values))
            results = (x[:, :, a:b] for x in (out, lse))
            dq[:, :, a:b], of_keys, of_values = masked_attention_backward(*rows, *past, *results, mask, scale)
            dk[:, :b] += of_keys
            dv[:, :b] += of_values
        dq = dq.unflatten(0, (batch, heads)).flatten(1, 2)
        return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None, None, None, None


def sparse_attention(q, k, v, rank, cutoff, *, sinks, window, scale):
    """Implement :func:`kvpop_vllm.kernels.ops.sparse_attention`."""
    return _SparseAttention.apply(q, k, v, rank, cutoff, sinks, window, scale)
