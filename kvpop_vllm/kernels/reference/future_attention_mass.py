"""Transposed attention pass in plain torch, block by block of keys; memory O(S) per head."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.reference.masked_attention import high

BLOCK = 128


def future_attention_mass(q, k, lse, *, window, scale, lookahead=None):
    """Implement :func:`kvpop_vllm.kernels.ops.future_attention_mass`."""
    heads, length = k.shape[1], k.shape[2]
    q, lse = high(q.unflatten(1, (heads, -1))), high(lse.unflatten(1, (heads, -1)))
    out = torch.full_like(lse, -torch.inf)
    for a in range(0, max(0, length - window), BLOCK):
        b = min(a + BLOCK, length - window)
        first = a + window
        last = length if lookahead is None else min(length, b + window + lookahead)
        logits = high(k[:, :, None, a:b]) @ q[..., first:last, :].transpose(-1, -2)
        logits = logits.mul_(scale).sub_(lse[..., None, first:last])
        d = torch.arange(first, last, device=q.device)
        earliest = torch.arange(a + window, b + window, device=q.device).unsqueeze(1)
        outside = d < earliest
        if lookahead is not None:
            outside = outside | (d > earliest + lookahead)
        out[..., a:b] = logits.masked_fill_(outside, -torch.inf).logsumexp(-1)
    return out.flatten(1, 2)
