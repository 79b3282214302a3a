"""mLSTM scorer with delayed readout (KVpop sections E.3 to E.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import MLSTMWeights
from kvpop_vllm.kernels.reference.scoring import mlstm_inputs, mlstm_query, mlstm_score
from kvpop_vllm.scorers.base import Scorer
from kvpop_vllm.scorers.checkpoint import ScorerConfig
from kvpop_vllm.scorers.mlp import _Dense

FORGET_BIAS = 4.0
"""Initial forget-gate bias: sigmoid(4) = 0.982 per token."""


class _Weight(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)


class MLSTMScorer(Scorer):
    """Delayed mLSTM scorer, initialised near identity.

    The q and k projections select key channels, the value projection selects value channels, and the forget
    gate is open. The readout is 0, so that before training all scores are equal and the policy is the sliding
    window.

    Args:
        features: columns of q_proj and k_proj; default D / 2 for hedgehog, D for softmax.
        value_size: Dv; default D.
        project_values: False uses the value itself (Dv = D).
    """

    def __init__(
        self,
        config: ScorerConfig,
        features: int | None = None,
        value_size: int | None = None,
        project_values: bool = True,
    ):
        super().__init__(config)
        h, d = config.num_kv_heads, config.head_dim
        columns = features or (d // 2 if config.feature_map == "hedgehog" else d)
        width = (value_size or d) if project_values else d
        self.q_proj = nn.Parameter(_near_identity(h, d, columns, of_values=False))
        self.k_proj = nn.Parameter(_near_identity(h, d, columns, of_values=False))
        self.v_proj = nn.Parameter(_near_identity(h, d, width, of_values=True)) if project_values else None
        self.igate = _Dense(torch.zeros(h, 2 * d), torch.zeros(h))
        self.fgate = _Dense(torch.zeros(h, 2 * d), torch.full((h,), FORGET_BIAS))
        self.out = _Dense(torch.zeros(h, width), torch.zeros(h))
        self.norm = _Weight(torch.ones(h, width)) if config.norm else None
        self.skip = _Weight(torch.zeros(h, 2 * d)) if config.skip else None

    def weights(self) -> MLSTMWeights:
        """Return the parameters as the kernels take them, without copies."""
        return MLSTMWeights(
            q_proj=self.q_proj,
            k_proj=self.k_proj,
            v_proj=self.v_proj,
            igate_weight=self.igate.weight,
            igate_bias=self.igate.bias,
            fgate_weight=self.fgate.weight,
            fgate_bias=self.fgate.bias,
            out_weight=self.out.weight,
            out_bias=self.out.bias,
            norm_weight=self.norm.weight if self.norm else None,
            skip_weight=self.skip.weight if self.skip else None,
            feature_map=self.config.feature_map,
            gate_softcap=self.config.gate_softcap,
            delayed=self.config.delayed,
        )

    def forward(self, k, v, *, window):
        """Return raw scores ``[B, H, S]`` float32 of keys and values ``[B, H, S, D]``.

        Delayed scores are those of :meth:`Scorer.forward`.
        """
        weights, x = self.weights(), torch.cat([k, v], -1).float()
        key, value, igate, fgate = mlstm_inputs(weights, x)
        delay = window if self.config.delayed else 0
        h, _ = ops.delayed_mlstm(mlstm_query(weights, x), key, value, igate, fgate, delay=delay)
        return mlstm_score(weights, h, x)


def _near_identity(heads: int, size: int, columns: int, *, of_values: bool) -> torch.Tensor:
    """Return ``[H, 2D, columns]``: column j selects channel j modulo D of its half, plus noise."""
    pick = F.one_hot(torch.arange(columns) % size, size).T.float()
    halves = [torch.zeros_like(pick), pick] if of_values else [pick, torch.zeros_like(pick)]
    base = torch.cat(halves)
    return base + torch.randn(heads, *base.shape) * 0.01
