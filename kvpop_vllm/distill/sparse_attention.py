"""Attention of a whole sequence under a fixed budget, for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.cutoffs import running_cutoffs
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.reference.masked_attention import with_sinks
from kvpop_vllm.roles import Retention

Score = Callable[[int, torch.Tensor, torch.Tensor, Retention], tuple[torch.Tensor, torch.Tensor]]
"""Scoring function of a layer.

``score(layer, k [B, H, S, D], v [B, H, S, D], roles) -> (raw scores [B, H, S] float32, log_gamma [H])``. The
roles' window is a delayed scorer's delay.
"""


def recency(layer, k, v, roles):
    """Score every token by its position: a :data:`Score` that keeps sinks and the newest B - s tokens.

    Nothing decays, so that a teacher that shares the decay depends on attention alone.
    """
    position = torch.arange(k.shape[2], dtype=torch.float32, device=k.device)
    return position.expand(k.shape[:3]), torch.zeros(k.shape[1], device=k.device)


@dataclass(frozen=True)
class Pass:
    """Attention pass of one layer, as an observer receives it.

    Attributes:
        layer: index of the layer.
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        v: ``[B, H, S, D]``.
        scale: factor on q . k.
        lse: ``[B, Hq, S]``, log-normalisers.
        score: ``[B, H, S]``, raw scores.
        log_gamma: ``[H]``.
        rank: ``[B, H, S]``, see :func:`~kvpop_vllm.distill.cutoffs.running_cutoffs`.
        cutoff: ``[B, H, S]``, likewise.
        topk: ``[H]``, k of each head.
        sink_logits: ``[Hq]``, logits of the model's attention sinks, or None.
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
    topk: Sequence[int]
    sink_logits: torch.Tensor | None = None


class Sparse:
    """Attention under the mask that the scores imply; passes each layer's :class:`Pass` to an observer.

    Scores are computed from detached keys and values: a scorer's loss never reaches the base model (DESIGN
    "Training").

    Args:
        score: see :data:`Score`.
        roles: slot roles of the budget.
        observe: called once per layer, or None.
        topk: ``[layers][H]``, k of each head of each layer; None for that of the roles.
    """

    takes_sinks = True

    def __init__(
        self,
        score: Score,
        roles: Retention,
        observe: Callable[[Pass], None] | None = None,
        topk: Sequence[Sequence[int]] | None = None,
    ):
        self.score, self.roles, self.observe, self.topk = score, roles, observe, topk

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        score, log_gamma = self.score(layer, k.detach(), v.detach(), self.roles)
        topk = [self.roles.topk] * k.shape[1] if self.topk is None else self.topk[layer]
        rank, cutoff = running_cutoffs(score, log_gamma, self.roles, topk)
        out, lse = ops.sparse_attention(
            q, k, v, rank, cutoff, sinks=self.roles.sinks, window=self.roles.window, scale=scale
        )
        out, lse = _with_sinks(out, lse, sink_logits)
        if self.observe is not None:
            self.observe(Pass(layer, q, k, v, scale, lse, score, log_gamma, rank, cutoff, topk, sink_logits))
        return out


def dense_attention(q, k, v, scale, sink_logits=None):
    """Return causal attention ``out [B, Hq, S, D]`` and its log-normalisers ``lse [B, Hq, S]``.

    Attention sinks, with logits ``sink_logits [Hq]``, take part in both.
    """
    everything = torch.zeros(k.shape[:3], dtype=torch.int32, device=k.device)
    out, lse = ops.sparse_attention(q, k, v, everything, everything, sinks=0, window=1, scale=scale)
    return _with_sinks(out, lse, sink_logits)


def _with_sinks(out, lse, sink_logits):
    """Return attention and log-normalisers with the model's attention sinks, if it has any.

    Raises:
        ConfigError: a gradient is required, and log-normalisers have none.
    """
    if sink_logits is not None and torch.is_grad_enabled() and out.requires_grad:
        raise ConfigError("gradients do not pass through attention sinks: train scorers alone, with --no-train-base")
    return with_sinks(out, lse, None if sink_logits is None else sink_logits.detach())
