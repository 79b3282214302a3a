"""Attention of a whole sequence under a fixed budget, as training and evaluation run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpop_vllm.distill.retention import Roles, running_cutoffs
from kvpop_vllm.kernels import ops

Score = Callable[[int, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""``score(layer, k [B, H, S, D], v [B, H, S, D], window) -> (raw scores [B, H, S] float32, log_gamma [H])``; the window is a
delayed scorer's delay."""


def recency(layer, k, v, window):
    """A :data:`Score` under which sinks and the newest B - s tokens are kept.

    The score is the position and nothing decays, so that a teacher that shares the decay looks at attention alone.
    """
    position = torch.arange(k.shape[2], dtype=torch.float32, device=k.device)
    return position.expand(k.shape[:3]), torch.zeros(k.shape[1], device=k.device)


@dataclass(frozen=True)
class Pass:
    """One layer's attention, as an observer sees it.

    q ``[B, Hq, S, D]``; k, v ``[B, H, S, D]``; lse ``[B, Hq, S]``; score ``[B, H, S]``; log_gamma ``[H]``; rank, cutoff
    ``[B, H, S]``; scale: factor on q . k.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    lse: torch.Tensor
    score: torch.Tensor
    log_gamma: torch.Tensor
    rank: torch.Tensor
    cutoff: torch.Tensor


class Sparse:
    """Attends under the mask that the scores imply, and shows every layer's pass to an observer.

    Scores see detached keys and values: what trains a scorer never reaches the base model (DESIGN "Training").

    Args:
        score: see :data:`Score`. roles: what the budget is made of. observe: called once per layer.
    """

    def __init__(self, score: Score, roles: Roles, observe: Callable[[Pass], None] | None = None):
        self.score, self.roles, self.observe = score, roles, observe

    def __call__(self, layer, q, k, v, scale):
        """See :class:`kvpop_vllm.distill.hook.Attend`."""
        score, log_gamma = self.score(layer, k.detach(), v.detach(), self.roles.window)
        rank, cutoff = running_cutoffs(score, log_gamma, self.roles)
        out, lse = ops.sparse_attention(
            q, k, v, rank, cutoff, sinks=self.roles.sinks, window=self.roles.window, scale=scale
        )
        if self.observe is not None:
            self.observe(Pass(layer, q, k, v, scale, lse, score, log_gamma, rank, cutoff))
        return out


def dense_attention(q, k, v, scale):
    """Causal attention with its log-normalisers: ``out [B, Hq, S, D], lse [B, Hq, S]``."""
    everything = torch.zeros(k.shape[:3], dtype=torch.int32, device=k.device)
    return ops.sparse_attention(q, k, v, everything, everything, sinks=0, window=1, scale=scale)
