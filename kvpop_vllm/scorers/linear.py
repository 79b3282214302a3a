"""Linear scorer per head (KVpop section E.2)."""

from __future__ import annotations

import torch
from torch import nn

from kvpop_vllm.kernels.ops import LinearWeights
from kvpop_vllm.kernels.reference.scoring import linear_score
from kvpop_vllm.scorers.base import Scorer
from kvpop_vllm.scorers.checkpoint import ScorerConfig


class LinearScorer(Scorer):
    """``r = weight . [k; v] + bias``, initialised to 0.

    Before training all scores are equal, so that the policy is the sliding window.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.num_kv_heads, 2 * config.head_dim))
        self.bias = nn.Parameter(torch.zeros(config.num_kv_heads))

    def weights(self) -> LinearWeights:
        """Return the parameters as the kernels take them, without copies."""
        return LinearWeights(self.weight, self.bias)

    def forward(self, k, v, *, window):
        """Return raw scores ``[B, H, S]`` float32 of keys and values ``[B, H, S, D]``."""
        return linear_score(self.weights(), torch.cat([k, v], -1).float())
