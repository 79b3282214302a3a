"""Dense attention in which tokens fade instead of leaving: what gates are trained under (TRIM-KV eq. 3; DMS section 3.2).

A token's logit gains ``weigh(age) * term_t``: its log-weight, times a factor of its age alone. No ``[S, S]`` array is kept:
rows of queries are worked off in blocks, and done again for their gradients. All products are in float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

ROWS = 256
"""Queries of a block; its logits ``[B, Hq, ROWS, S]`` are in memory at once."""

Weigh = Callable[[torch.Tensor], torch.Tensor]
"""``weigh(ages) -> factors`` of the same shape; ages are int64, of keys that a query sees 0 and up."""


def by_age(ages: torch.Tensor) -> torch.Tensor:
    """A :data:`Weigh`: every token's weight is its ``exp(term)`` to the power of its age (TRIM-KV)."""
    return ages


def after(window: int) -> Weigh:
    """A :data:`Weigh`: every token's weight is ``exp(term)`` once it has left a window of that many tokens, 1 before (DMS)."""
    return lambda ages: ages >= window


def soft_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, term: torch.Tensor, weigh: Weigh, scale: float
) -> torch.Tensor:
    """Causal attention with weights ``exp(scale q . k + weigh(q - t) term_t)``, normalised.

    Args:
        q: ``[B, Hq, S, D]``, k, v: ``[B, H, S, D]``. term: ``[B, H, S]``, finite.

    Returns:
        ``[B, Hq, S, D]`` in q's dtype. Gradients flow to all four.
    """
    blocks = []
    for first in range(0, q.shape[2], ROWS):
        seen = min(first + ROWS, q.shape[2])
        parts = q[:, :, first:seen], k[:, :, :seen], v[:, :, :seen], term[..., :seen]
        blocks.append(_recomputed(_attend_rows, *parts, first, weigh, scale))
    return torch.cat(blocks, 2)


def soft_sizes(term: torch.Tensor, weigh: Weigh) -> torch.Tensor:
    """How many tokens each query holds, softly: ``sum_{t <= q} exp(weigh(q - t) term_t)``, ``[B, H, S]`` for term of the same
    shape."""
    blocks = []
    for first in range(0, term.shape[-1], ROWS):
        seen = min(first + ROWS, term.shape[-1])
        blocks.append(_recomputed(_sum_rows, term[..., :seen], first, weigh))
    return torch.cat(blocks, -1)


def _recomputed(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(q, k, v, term, first, weigh, scale):
    with torch.autocast(q.device.type, enabled=False):
        return _rows_of(q, k, v, term, first, weigh, scale)


def _rows_of(q, k, v, term, first, weigh, scale):
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, rows, D]
    logits = grouped @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale
    weights = (logits + _bias(term.to(dtype), first, q.shape[2], weigh).unsqueeze(2)).softmax(-1)
    return (weights @ v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _sum_rows(term, first, weigh):
    return _bias(term, first, term.shape[-1] - first, weigh).exp().sum(-1)


def _bias(term, first, rows, weigh):
    """``[B, H, rows, n]`` for ``term [B, H, n]``: what the logits of queries from ``first`` on gain; -inf ahead of them."""
    q = torch.arange(first, first + rows, device=term.device).unsqueeze(1)
    ages = q - torch.arange(term.shape[-1], device=term.device)
    bias = weigh(ages.clamp_min(0)).to(term.dtype) * term.unsqueeze(-2)
    return bias.masked_fill(ages < 0, -torch.inf)
