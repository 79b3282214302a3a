"""What all scorers share: the decay parameter and the way from a module to the kernels' weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from kvpop_vllm.kernels.ops import ScorerWeights
from kvpop_vllm.scorers.checkpoint import Decay, ScorerConfig


def log_gamma(decay_logit: torch.Tensor, decay: Decay) -> torch.Tensor:
    """``log gamma_h = log g_min + sigmoid(alpha_h) (log g_max - log g_min)`` in float64: ``[H]`` -> ``[H]``."""
    low, high = math.log(decay.min), math.log(decay.max)
    return low + torch.sigmoid(decay_logit.double()) * (high - low)


class Scorer(nn.Module):
    """One layer's importance scorer; parameters carry the names and shapes of the file format, heads first.

    Subclasses implement :meth:`weights` and :meth:`forward`.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.config = config
        self.decay_logit = nn.Parameter(torch.zeros(config.num_kv_heads))

    def log_gamma(self) -> torch.Tensor:
        """``[H]`` float64."""
        return log_gamma(self.decay_logit, self.config.decay)

    def weights(self) -> ScorerWeights:
        """The parameters as the kernels take them; no copies, gradients flow."""
        raise NotImplementedError(f"{type(self).__name__} has no weights()")

    def forward(self, k: torch.Tensor, v: torch.Tensor, *, window: int) -> torch.Tensor:
        """Raw scores of all tokens of whole sequences.

        Args:
            k, v: ``[B, H, S, D]``, as cached. window: w, which is a delayed scorer's delay.

        Returns:
            ``[B, H, S]`` float32. A delayed score of a token that has not left the window by ``S - 1`` means nothing and
            is never ranked.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward()")
