"""Base class of scorers: the decay parameter, and the conversion of a module to the kernels' weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from kvpop_vllm.kernels.ops import ScorerWeights
from kvpop_vllm.scorers.checkpoint import Decay, ScorerConfig


def log_gamma(decay_logit: torch.Tensor, decay: Decay) -> torch.Tensor:
    """Return ``log gamma_h = log g_min + sigmoid(alpha_h) (log g_max - log g_min)``.

    Args:
        decay_logit: ``[H]``, alpha.
        decay: range of gamma.

    Returns:
        ``[H]`` float64.
    """
    low, high = math.log(decay.min), math.log(decay.max)
    return low + torch.sigmoid(decay_logit.double()) * (high - low)


class Scorer(nn.Module):
    """Importance scorer of one layer.

    Parameters have the names and shapes of the file format, with the head axis first. Subclasses implement
    :meth:`weights` and :meth:`forward`.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.config = config
        self.decay_logit = nn.Parameter(torch.zeros(config.num_kv_heads))

    def log_gamma(self) -> torch.Tensor:
        """Return the logarithm of the decay of each head, ``[H]`` float64."""
        return log_gamma(self.decay_logit, self.config.decay)

    def weights(self) -> ScorerWeights:
        """Return the parameters as the kernels take them, without copies; gradients flow through."""
        raise NotImplementedError(f"{type(self).__name__} has no weights()")

    def forward(self, k: torch.Tensor, v: torch.Tensor, *, window: int) -> torch.Tensor:
        """Return the raw scores of all tokens of whole sequences.

        Args:
            k: keys ``[B, H, S, D]``, as cached.
            v: values ``[B, H, S, D]``.
            window: w, the delay of a delayed scorer.

        Returns:
            ``[B, H, S]`` float32. A delayed score of a token that has not left the window by ``S - 1`` is
            undefined, and is
            never ranked.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward()")
