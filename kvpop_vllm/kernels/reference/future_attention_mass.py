"""Transposed attention pass in plain torch, block by block of keys; memory O(S) per head."""

import torch

from kvpop_vllm.kernels.reference.masked_attention import high

BLOCK = 128


def future_attention_mass(q, k, lse, *, window, scale, lookahead=None, first=0):
    """Implement :func:`kvpop_vllm.kernels.ops.future_attention_mass`."""
    heads, end = k.shape[1], first + q.shape[2]
    met = min(k.shape[2], end - window) if q.shape[2] else 0  # keys that a query follows
    q, lse = high(q.unflatten(1, (heads, -1))) * scale, high(lse.unflatten(1, (heads, -1)))
    out = lse.new_full((*lse.shape[:-1], k.shape[2]), -torch.inf)
    for a in range(0, met, BLOCK):
        b = min(a + BLOCK, met)
        begin = max(first, a + window)
        last = end if lookahead is None else max(begin + 1, min(end, b + window + lookahead))
        queries = slice(begin - first, last - first)
        logits = q[..., queries, :].flatten(2, 3) @ high(k[:, :, a:b]).transpose(-1, -2)
        logits = logits.unflatten(2, (q.shape[2], -1)).sub_(lse[..., queries, None])  # [B, H, G, queries, keys]
        # queries that come after the window of all keys need no mask, which takes a third of the time
        if begin < b + window - 1 or lookahead is not None:
            d = torch.arange(begin, last, device=q.device).unsqueeze(1)
            earliest = torch.arange(a + window, b + window, device=q.device)
            outside = d < earliest
            if lookahead is not None:
                outside = outside | (d > earliest + lookahead)
            logits.masked_fill_(outside, -torch.inf)
        # as torch.logsumexp, whose copies take as long as the products; keys without a query stay at -inf
        top = logits.amax(-2).clamp_min(torch.finfo(logits.dtype).min)
        out[..., a:b] = logits.sub_(top.unsqueeze(-2)).exp_().sum(-2).log_().add_(top)
    return out.flatten(1, 2)
