"""Retention in training and evaluation: scores as ranks and cutoffs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpop_vllm.kernels import ops
from kvpop_vllm.roles import Retention


def running_cutoffs(
    score: torch.Tensor, log_gamma: torch.Tensor, roles: Retention, topk: int | Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return which keys each query sees, as :func:`kvpop_vllm.kernels.ops.sparse_attention` takes it.

    Args:
        score: ``[B, H, S]`` raw scores, used as float32.
        log_gamma: ``[H]``.
        roles: slot roles and decay step.
        topk: k, or k of each of the H heads; None for that of the roles.

    Returns:
        ``rank, cutoff [B, H, S]`` int32; key t of E(q) is kept iff ``rank[t] <= cutoff[q]``. With a decay
        step n > 1 they come from a simulation of every eviction (DESIGN "The rule").
    """
    score, log_gamma = score.detach().float(), log_gamma.detach().double()
    batch, heads, length = score.shape
    topk = roles.topk if topk is None else topk
    t = torch.arange(length, device=score.device)
    if roles.step == 1:
        priority = score.double() - t * log_gamma.unsqueeze(-1)
        return ops.running_topk(priority, sinks=roles.sinks, window=roles.window, topk=topk)
    evicted_at = torch.full((batch * heads, length), length, dtype=torch.int64, device=score.device)
    if length > roles.sinks:
        evicted_at[:, roles.sinks :] = ops.online_topk(
            score[..., roles.sinks :].flatten(0, 1),
            t[roles.sinks :].expand(batch * heads, -1),
            0,
            topk=topk if isinstance(topk, int) else list(topk) * batch,
            window=roles.window,
            log_gamma=log_gamma.repeat(batch),
            decay_step=roles.step,
        ).clamp_max(length)
    rank = (length - evicted_at).int().view_as(score)
    return rank, (length - 1 - t).int().expand_as(rank)


def kept_at(rank: torch.Tensor, cutoff: torch.Tensor, q: int, roles: Retention) -> torch.Tensor:
    """Return which tokens of ``E(q)`` are kept at q, oldest first: ``[B, H, q - w + 1 - s]`` booleans."""
    last = q - roles.window + 1
    return rank[..., roles.sinks : last] <= cutoff[..., q, None]
