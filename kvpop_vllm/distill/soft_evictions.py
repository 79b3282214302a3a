"""Dense attention in which tokens fade instead of being evicted (TRIM-KV eq. 3; DMS section 3.2).

Gates are trained under it. ``weigh(age) * term_t`` is added to a token's logit: its log-weight, times a
factor of its age alone. No ``[S, S]`` array is stored: queries are processed in blocks, which are recomputed
for their gradients. All products are in float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

ROWS = 256
"""Queries of a block; its logits ``[B, Hq, ROWS, S]`` are in memory at once."""

Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Age function: ``weigh(ages) -> factors`` of the same shape.

Ages are int64; those of keys that a query sees are at least 0.
"""


def by_age(ages: torch.Tensor) -> torch.Tensor:
    """Return the ages: a :data:`Weigh` in which a token's weight is ``exp(term * age)`` (TRIM-KV)."""
    return ages


def after(window: int) -> Weigh:
    """Return a :data:`Weigh` in which a token has weight ``exp(term)`` past the window, 1 within it (DMS).

    Args:
        window: tokens of the window.
    """
    return lambda ages: ages >= window


def soft_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    term: torch.Tensor,
    weigh: Weigh,
    scale: float,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention with normalised weights ``exp(scale q . k + weigh(q - t) term_t)``.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        v: ``[B, H, S, D]``.
        term: ``[B, H, S]``, finite.
        weigh: factor by age.
        scale: factor on q . k.
        sink_logits: ``[Hq]``, logits of the model's attention sinks, or None. They are taken as they are.

    Returns:
        ``[B, Hq, S, D]`` in q's dtype. Gradients flow to q, k, v and term.
    """
    blocks = []
    for first in range(0, q.shape[2], ROWS):
        end = min(first + ROWS, q.shape[2])
        parts = q[:, :, first:end], k[:, :, :end], v[:, :, :end], term[..., :end]
        blocks.append(_recomputed(_attend_rows, *parts, first, weigh, scale, sink_logits))
    return torch.cat(blocks, 2)


def soft_sizes(term: torch.Tensor, weigh: Weigh) -> torch.Tensor:
    """Return the soft number of tokens that each query retains, ``sum_{t <= q} exp(weigh(q - t) term_t)``.

    Args:
        term: ``[B, H, S]``.
        weigh: factor by age.

    Returns:
        ``[B, H, S]``.
    """
    blocks = []
    for first in range(0, term.shape[-1], ROWS):
        end = min(first + ROWS, term.shape[-1])
        blocks.append(_recomputed(_sum_rows, term[..., :end], first, weigh))
    return torch.cat(blocks, -1)


def _recomputed(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(q, k, v, term, first, weigh, scale, sink_logits):
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, rows, D]
        logits = grouped @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale
        logits = logits + _bias(term.to(dtype), first, q.shape[2], weigh).unsqueeze(2)
        if sink_logits is None:
            weights = logits.softmax(-1)
        else:
            sinks = sink_logits.detach().to(dtype).view(1, *grouped.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
            weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return (weights @ v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _sum_rows(term, first, weigh):
    return _bias(term, first, term.shape[-1] - first, weigh).exp().sum(-1)


def _bias(term, first, rows, weigh):
    """Return the bias on the logits of queries from ``first`` on, -inf for keys after the query.

    Args:
        term: ``[B, H, n]``.
        first: position of the first query.
        rows: number of queries.
        weigh: factor by age.

    Returns:
        ``[B, H, rows, n]``.
    """
    q = torch.arange(first, first + rows, device=term.device).unsqueeze(1)
    ages = q - torch.arange(term.shape[-1], device=term.device)
    bias = weigh(ages.clamp_min(0)).to(term.dtype) * term.unsqueeze(-2)
    return bias.masked_fill(ages < 0, -torch.inf)
