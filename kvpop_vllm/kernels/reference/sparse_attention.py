"""Attention under the running top-k mask, in plain torch, block by block of queries.

The backward pass recomputes the blocks. Memory is O(S) per head: one block of ``BLOCK`` queries against all
keys that it may see.
"""

import torch

from kvpop_vllm.kernels.reference.masked_attention import high, masked_attention

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
        heads, length = k.shape[1], k.shape[2]
        q, out, grad, lse = (x.unflatten(1, (heads, -1)) for x in (q, out, grad, lse))
        keys, values = high(k), high(v)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        delta = (high(out) * high(grad)).sum(-1, keepdim=True)
        for a in range(0, length, BLOCK):
            b = min(a + BLOCK, length)
            rows = high(grad[..., a:b, :]).flatten(2, 3)
            logits = _logits(q, keys, rank, cutoff, a, b, sinks, window, scale)
            weights = torch.exp(logits - lse[..., a:b, None])
            dv[:, :, :b] += weights.flatten(2, 3).transpose(-1, -2) @ rows
            dlogits = (rows @ values[:, :, :b].transpose(-1, -2)).view_as(weights)
            dlogits = (dlogits - delta[..., a:b, :]).mul_(weights).flatten(2, 3).mul_(scale)
            dq[..., a:b, :] = (dlogits @ keys[:, :, :b]).view(*q.shape[:3], b - a, -1)
            dk[:, :, :b] += dlogits.transpose(-1, -2) @ high(q[..., a:b, :]).flatten(2, 3)
        return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _logits(grouped, keys, rank, cutoff, a, b, sinks, window, scale):
    """Return scaled and masked logits ``[B, H, G, b - a, b]``."""
    rows = high(grouped[..., a:b, :])
    logits = (rows.flatten(2, 3) @ keys[:, :, :b].transpose(-1, -2)).mul_(scale)
    logits = logits.view(*rows.shape[:4], b)
    return logits.masked_fill_(~visible_block(rank, cutoff, a, b, sinks, window).unsqueeze(2), -torch.inf)


def sparse_attention(q, k, v, rank, cutoff, *, sinks, window, scale):
    """Implement :func:`kvpop_vllm.kernels.ops.sparse_attention`."""
    return _SparseAttention.apply(q, k, v, rank, cutoff, sinks, window, scale)
