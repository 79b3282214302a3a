"""Retention targets: attention that a token gets after it has left the window (KVpop eqs. 2, 3, 8, 13-17)."""

from __future__ import annotations

import math

import torch

from kvpop_vllm.kernels import ops

EPS = 1e-8
"""Constant added to the mass inside the logarithm; no paper gives it."""


def retention_target(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    scale: float,
    lookahead: int | None = None,
    normalise: bool = True,
    groups: str = "max",
) -> torch.Tensor:
    """Return raw target scores ``[B, H, S]`` float32, without gradient.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, S]``, log-normalisers of the sparse pass (KVpop eq. 9) or of dense attention (exact).
        window: w in tokens.
        scale: factor on q . k.
        lookahead: L, see :func:`ops.future_attention_mass`.
        normalise: divide by the number of queries that can attend to the token, ``N_t = max(1, S - t - w)``,
            at most ``L + 1`` (eq. 16).
        groups: ``max`` over the query heads that share a KV head (eq. 14), or ``mean`` of their masses (eq.
            15).

    Raises:
        ValueError: ``groups`` is neither.
    """
    log_mass = ops.future_attention_mass(q, k, lse, window=window, scale=scale, lookahead=lookahead)
    length = k.shape[2]
    if normalise:
        count = (length - window - torch.arange(length, device=k.device)).clamp_min(1)
        if lookahead is not None:
            count = count.clamp_max(lookahead + 1)
        log_mass = log_mass - count.log()
    return of_kv_heads(log_mass.unflatten(1, (k.shape[1], -1)), groups)


def of_kv_heads(log_mass: torch.Tensor, groups: str) -> torch.Tensor:
    """Return the log-masses ``[B, H, ...]`` of KV heads from those of their query heads ``[B, H, G, ...]``.

    Args:
        log_mass: logarithms of attention.
        groups: ``max`` or ``mean`` of the masses of the query heads that share a KV head (KVpop eqs. 14, 15).

    Raises:
        ValueError: ``groups`` is neither.
    """
    if groups == "max":
        log_mass = log_mass.amax(2)
    elif groups == "mean":
        log_mass = log_mass.logsumexp(2) - math.log(log_mass.shape[2])
    else:
        raise ValueError(f"groups must be 'max' or 'mean', got {groups!r}")
    return torch.logaddexp(log_mass, torch.full_like(log_mass, math.log(EPS)))
