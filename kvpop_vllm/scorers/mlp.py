"""Two-layer MLP scorer per head, with SiLU (KVpop section E.2)."""

from __future__ import annotations

import torch
from torch import nn

from kvpop_vllm.kernels.ops import MLPWeights
from kvpop_vllm.kernels.reference.scoring import mlp_score
from kvpop_vllm.scorers.base import Scorer
from kvpop_vllm.scorers.checkpoint import ScorerConfig


class _Dense(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)


class MLPScorer(Scorer):
    """``r = fc2 . SiLU(fc1 [k; v])``, with fc2 initialised to 0.

    Before training all scores are equal, so that the policy is the sliding window.

    Args:
        hidden: M, the hidden width; default D.
    """

    def __init__(self, config: ScorerConfig, hidden: int | None = None):
        super().__init__(config)
        h, x, m = config.num_kv_heads, 2 * config.head_dim, hidden or config.head_dim
        self.fc1 = _Dense(torch.randn(h, x, m) * x**-0.5, torch.zeros(h, m))
        self.fc2 = _Dense(torch.zeros(h, m), torch.zeros(h))

    def weights(self) -> MLPWeights:
        """Return the parameters as the kernels take them, without copies."""
        return MLPWeights(self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)

    def forward(self, k, v, *, window):
        """Return raw scores ``[B, H, S]`` float32 of keys and values ``[B, H, S, D]``."""
        return mlp_score(self.weights(), torch.cat([k, v], -1).float())
