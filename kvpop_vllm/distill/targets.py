"""Retention targets: attention that a token gets after it has left the window (KVpop eqs. 2, 3, 8, 13-17)."""

from __future__ import annotations

import math

import torch

from kvpop_vllm.kernels import ops

ROWS = 256
"""Queries whose logits are in memory at once."""
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
    return _of_kv_heads(log_mass.unflatten(1, (k.shape[1], -1)), groups)


@torch.no_grad()
def attention_from(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, positions: list[int], *, scale: float, groups: str = "max"
) -> torch.Tensor:  # fmt: skip
    """Return the logarithm of the attention that each token gets from each of some positions on.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, S]``, log-normalisers.
        positions: positions of queries, ascending, P of them.
        scale: factor on q . k.
        groups: ``max`` or ``mean`` over the query heads that share a KV head.

    Returns:
        ``[B, H, P, S]`` float32; only tokens up to a position are meant to be read in its row.
    """
    q, k, lse = (
        q.float().unflatten(1, (k.shape[1], -1)),
        k.float().unsqueeze(2),
        lse.float().unflatten(1, (k.shape[1], -1)),
    )
    mass = q.new_zeros(*q.shape[:3], len(positions), q.shape[3])
    for i, (first, end) in enumerate(zip(positions, (*positions[1:], q.shape[3]), strict=True)):
        for a in range(first, end, ROWS):
            rows = slice(a, min(a + ROWS, end))
            logits = q[..., rows, :] @ k[..., : rows.stop, :].transpose(-1, -2) * scale - lse[..., rows, None]
            mass[..., i, : rows.stop] += logits.exp().sum(-2)
    mass = mass.flip(3).cumsum(3).flip(3)
    return _of_kv_heads(mass.log(), groups)


def _of_kv_heads(log_mass: torch.Tensor, groups: str) -> torch.Tensor:
    """Return the log-masses ``[B, H, ...]`` of KV heads from those of their query heads ``[B, H, G, ...]``."""
    if groups == "max":
        log_mass = log_mass.amax(2)
    elif groups == "mean":
        log_mass = log_mass.logsumexp(2) - math.log(log_mass.shape[2])
    else:
        raise ValueError(f"groups must be 'max' or 'mean', got {groups!r}")
    return torch.logaddexp(log_mass, torch.full_like(log_mass, math.log(EPS)))
