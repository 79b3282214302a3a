"""Scorer formulas in torch, shared by the reference kernels and the trainable modules (KVpop sections E.2-E.4).

All inputs are float32 or better; the leading axes ``...`` precede ``[H, S, *]``, heads are axis -3 of ``x``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvpop_vllm.kernels.ops import LinearWeights, MLPWeights, MLSTMWeights

READOUT_EPS = 1e-6
NORM_EPS = 1e-6


def headwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [..., H, S, I]`` times a vector ``[H, I]`` -> ``[..., H, S]`` or a matrix ``[H, I, O]`` -> ``[..., H, S, O]``."""
    if weight.dim() == 2:
        return (x @ weight.unsqueeze(-1)).squeeze(-1)
    return x @ weight


def key_norm_score(key: torch.Tensor) -> torch.Tensor:
    """``r = -|k|_2``: ``[..., D]`` -> ``[...]`` float32."""
    return -key.double().square().sum(-1).sqrt().float()


def linear_score(weights: LinearWeights, x: torch.Tensor) -> torch.Tensor:
    """``r = weight . x + bias``: x ``[..., H, S, 2D]`` -> ``[..., H, S]``."""
    return headwise(x, weights.weight) + weights.bias.unsqueeze(-1)


def mlp_score(weights: MLPWeights, x: torch.Tensor) -> torch.Tensor:
    """``r = fc2 . SiLU(fc1 x)``: x ``[..., H, S, 2D]`` -> ``[..., H, S]``."""
    hidden = F.silu(headwise(x, weights.fc1_weight) + weights.fc1_bias.unsqueeze(-2))
    return headwise(hidden, weights.fc2_weight) + weights.fc2_bias.unsqueeze(-1)


def feature_map(a: torch.Tensor, kind: str) -> torch.Tensor:
    """phi: ``hedgehog`` = [softmax(a); softmax(-a)], ``softmax`` = softmax(a), over the last axis (KVpop appendix A)."""
    if kind == "hedgehog":
        return torch.cat([a.softmax(-1), (-a).softmax(-1)], dim=-1)
    return a.softmax(-1)


def softcap(a: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``c * tanh(a / c)``, or a where c is None."""
    return a if cap is None else cap * torch.tanh(a / cap)


def mlstm_inputs(weights: MLSTMWeights, x: torch.Tensor):
    """Write features ``k [..., H, S, F]``, values ``v [..., H, S, Dv]`` and gate pre-activations ``[..., H, S]`` (eqs. 37, 40)."""
    k = feature_map(headwise(x, weights.k_proj), weights.feature_map)
    v = x[..., x.shape[-1] // 2 :] if weights.v_proj is None else headwise(x, weights.v_proj)
    igate = softcap(headwise(x, weights.igate_weight) + weights.igate_bias.unsqueeze(-1), weights.gate_softcap)
    fgate = softcap(headwise(x, weights.fgate_weight) + weights.fgate_bias.unsqueeze(-1), weights.gate_softcap)
    return k, v, igate, fgate


def mlstm_query(weights: MLSTMWeights, x: torch.Tensor) -> torch.Tensor:
    """Read features ``[..., H, S, F]`` of the tokens to score (eq. 37)."""
    return feature_map(headwise(x, weights.q_proj), weights.feature_map)


def mlstm_score(weights: MLSTMWeights, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``r = out . SiLU(norm?(h)) + bias (+ skip . x_u)``: readouts ``[..., H, S, Dv]`` -> ``[..., H, S]`` (eq. 42)."""
    if weights.norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * weights.norm_weight.unsqueeze(-2)
    r = headwise(F.silu(h), weights.out_weight) + weights.out_bias.unsqueeze(-1)
    return r if weights.skip_weight is None else r + headwise(x, weights.skip_weight)


def readout_denominator(qz: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """``q.z + eps`` with eps = 1e-6 on the unstabilised denominator, for a state stored as ``exp(-m)`` times itself."""
    return qz + READOUT_EPS * torch.exp(-m.clamp(-60.0, 60.0))
