"""Listwise loss of scores: at some positions, all tokens that have left the window against the attention to come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.autograd.function import once_differentiable

from kvpop_vllm.distill.targets import of_kv_heads
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.transfers import to_device
from kvpop_vllm.roles import Retention


def listwise_loss(
    score: torch.Tensor,
    log_gamma: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    positions: list[int],
    roles: Retention,
    *,
    scale: float,
    groups: str = "max",
    begins: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the KL of the tokens' shares of coming attention to the softmax of their effective scores.

    At each position all tokens that have left the window are ranked (ListNet's top one probability, Cao et al. 2007).
    A token weighs as much as the attention that it gets from the position on, which is lost with it. Positions are
    taken from the last to the first, so that this attention is a sum that grows, and no array of positions and tokens
    is formed. Memory is O(S) and does not depend on the number of positions. The attention between two positions is
    :func:`kvpop_vllm.kernels.ops.future_attention_mass`, whose kernel on a GPU writes no logits.

    Args:
        score: ``[B, H, S]`` raw scores.
        log_gamma: ``[H]``.
        q: ``[B, Hq, S, D]``; no gradient reaches q, k and lse.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, S]``, log-normalisers, float32 or float64.
        positions: positions of queries, ascending, each with tokens that have left the window.
        roles: slot roles and decay step.
        scale: factor on q . k.
        groups: ``max`` or ``mean`` over the query heads that share a KV head.
        begins: ``[H]``, the position at which each head begins to evict, for some head at most the last of the
            positions; None if all heads evict at all positions.

    Returns:
        Mean over positions and the heads that evict there, in nats.

    Raises:
        ValueError: ``groups`` is neither, or there are no positions.
    """
    if not positions:
        raise ValueError("listwise_loss needs positions, got none")
    attention = q.detach(), k.detach(), lse.detach()
    evicts = torch.tensor([[first >= begin for begin in begins or [0] * score.shape[1]] for first in positions])
    weight = evicts / (evicts.sum() * score.shape[0])
    return _Listwise.apply(
        score, log_gamma, attention, positions, to_device(weight, score.device), roles, scale, groups
    )


class _Listwise(torch.autograd.Function):
    """The loss; its gradient is formed with it, because both need the attention to come, which is not stored."""

    @staticmethod
    def forward(ctx, score, log_gamma, attention, positions, weight, roles, scale, groups):
        """Return the loss, and store its gradient by score ``[B, H, S]`` and by log_gamma ``[H]``."""
        q, k, lse = attention
        sinks, spans = roles.sinks, list(pairwise([*positions, q.shape[2]]))
        loss, by_score, by_decay = score.new_zeros(()), torch.zeros_like(score), torch.zeros_like(log_gamma)
        log_mass = lse.new_full(lse.shape, -torch.inf)
        for (first, end), share in zip(reversed(spans), weight.to(score.dtype).unsqueeze(-1).flip(0), strict=True):
            ranked = slice(sinks, first - roles.window + 1)
            queries, options = slice(first, end), {"window": roles.window, "scale": scale, "first": first - sinks}
            added = ops.future_attention_mass(q[:, :, queries], k[:, :, ranked], lse[:, :, queries], **options)
            log_mass[..., ranked] = log_mass[..., ranked].logaddexp(added)
            log_masses = log_mass[..., ranked].unflatten(1, (k.shape[1], -1))
            log_p = of_kv_heads(log_masses, groups).to(score.dtype).log_softmax(-1)
            steps = (first - torch.arange(ranked.start, ranked.stop, device=score.device)) // roles.step
            aged = score[..., ranked] + steps * log_gamma.to(score.dtype).unsqueeze(-1)
            log_q = aged.log_softmax(-1)
            p = log_p.exp()
            loss += (share * p * (log_p - log_q)).sum()
            slope = share * (log_q.exp() - p)
            by_score[..., ranked] += slope
            by_decay += (slope * steps).sum((0, 2))
        ctx.save_for_backward(by_score, by_decay)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, weight):
        by_score, by_decay = ctx.saved_tensors
        return weight * by_score, weight.to(by_decay.dtype) * by_decay, None, None, None, None, None, None
