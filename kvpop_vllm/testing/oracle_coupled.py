"""Policies that rank tokens by the attention they received; part of the naive oracle.

The retained set of a query depends on the attention of earlier queries, so queries are processed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .oracle_scores import MEAN_MASS, MOMENT_RESIDUAL


def moments(key: torch.Tensor, value: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return number n, mean key, mean value and value-key covariance of tokens.

    The covariance ``[D, D]`` is computed from deviations, so that it is exactly zero for one token or several
    equal ones.

    Args:
        key: ``[n, D]``, n at least 1.
        value: ``[n, D]``.
    """
    key_mean, value_mean = key.mean(0), value.mean(0)
    return len(key), key_mean, value_mean, (value - value_mean).T @ (key - key_mean) / len(key)


def corrected_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Return softmax attention under a mask, corrected by the moments of the evicted tokens.

    Those are the earlier tokens that a query does not see. Source: MomentKV, eq. 12.

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        visible: ``[H, S, S]``.

    Returns:
        ``[S, H * G * D]``.
    """
    (heads, length, size), group = key.shape, len(query) // len(key)
    scale = 1 / math.sqrt(size)
    out = torch.empty(length, len(query), size, dtype=query.dtype)
    for h in range(heads):
        for q in range(length):
            own, seen = query[h * group : (h + 1) * group, q], visible[h, q]
            logits = own @ key[h, seen].T * scale
            retained, mass = logits.softmax(-1) @ value[h, seen], logits.logsumexp(-1)
            gone = ~seen
            gone[q + 1 :] = False
            if gone.any():
                count, key_mean, value_mean, covariance = moments(key[h, gone], value[h, gone])
                evicted = value_mean + scale * own @ covariance.T
                evicted_mass = math.log(count) + scale * own @ key_mean
                both = torch.stack([mass, evicted_mass]).softmax(0).unsqueeze(-1)
                retained = both[0] * retained + both[1] * evicted
            out[q, h * group : (h + 1) * group] = retained
    return out.flatten(1)


def retained_by_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    how: str,
    sinks: int,
    window: int,
    topk: int,
    forced: torch.Tensor | None = None,
    bias: Sequence[tuple[int, int, float]] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the retained sets of the online rule with scores from attention mass.

    The mass of a token from a query is its softmax weight over the tokens that the query sees, averaged over
    the query heads of the KV head. At query ``q`` tokens are ranked by the mass from ``q - 1`` (TOVA), by the
    mean over ``t .. q - 1`` (H2O), or by the former times ``|v - vb - scale Sig k|`` with the moments of the
    tokens evicted before ``q`` (MomentKV, eq. 10).

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        how: NEWEST_MASS, MEAN_MASS or MOMENT_RESIDUAL.
        sinks: ``s``.
        window: ``w``.
        topk: ``k``.
        forced: as in :meth:`OraclePolicy.decide`.
        bias: as in :meth:`OraclePolicy.decide`.

    Returns:
        ``visible``, ``margins``, ``scores``, ``lost`` of :class:`LayerDecisions`.

    Raises:
        ValueError: the forced sets cannot result from this budget.
    """
    heads, length, size = key.shape
    group = len(query) // heads
    visible = torch.zeros(heads, length, length, dtype=torch.bool)
    margins = torch.full((heads, length), math.inf, dtype=torch.float64)
    scores = torch.full((heads, length, 2), math.nan, dtype=key.dtype)
    lost_best = torch.full((heads, length), -1)
    for h in range(heads):
        more = {token: by for head, token, by in bias if head == h}
        total, newest = torch.zeros(length, dtype=key.dtype), torch.zeros(length, dtype=key.dtype)
        kept: set[int] = set()
        for q in range(length):
            candidates = kept | ({q - window} if q - window >= sinks else set())
            surplus = max(0, len(candidates) - topk)
            rank = {t: float(total[t] / (q - t) if how == MEAN_MASS else newest[t]) for t in candidates}
            if surplus and how == MOMENT_RESIDUAL:
                rank = _with_novelty(rank, key[h, :q], value[h, :q], visible[h, q - 1, :q])
            if forced is None:
                worst_first = sorted(candidates, key=lambda t: (rank[t] + more.get(t, 0.0), t))
                lost = set(worst_first[:surplus])
            else:
                lost = candidates - set(torch.nonzero(forced[h, q]).flatten().tolist())
                if len(lost) != surplus:
                    raise ValueError(f"head {h}, query {q}: {len(lost)} tokens are lost, {surplus} must be")
            kept = candidates - lost
            if lost:
                best = max(lost, key=lambda t: rank[t])
                lost_best[h, q] = best
            if lost and kept:
                worst = min(rank[t] for t in kept)
                margins[h, q] = worst - rank[best]
                scores[h, q] = torch.tensor([rank[best], worst], dtype=key.dtype)
            seen = sorted(kept | {t for t in range(q + 1) if t < sinks or t > q - window})
            if forced is not None and seen != torch.nonzero(forced[h, q]).flatten().tolist():
                raise ValueError(
                    f"head {h}, query {q}: these sets see other tokens than sinks, window and what was kept"
                )
            visible[h, q, seen] = True
            logits = query[h * group : (h + 1) * group, q] @ key[h, seen].T / math.sqrt(size)
            newest = torch.zeros_like(newest)
            newest[seen] = logits.softmax(-1).mean(0)
            total = total + newest
    return visible, margins, scores, lost_best


def _with_novelty(
    rank: dict[int, float], key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> dict[int, float]:
    """Return each token's mass times its residual."""
    novelty = _residuals(key, value, seen)
    return {t: mass * float(novelty[t]) for t, mass in rank.items()}


def _residuals(key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the distance of each value from its prediction by the moments of the tokens that are not seen.

    Args:
        key: ``[n, D]``.
        value: ``[n, D]``.
        seen: ``[n]``.

    Returns:
        ``[n]``.
    """
    if seen.all():
        return value.norm(dim=-1)
    _, _, value_mean, covariance = moments(key[~seen], value[~seen])
    return (value - value_mean - key @ covariance.T / math.sqrt(key.shape[-1])).norm(dim=-1)
