"""Scorer formulas in torch, shared by the reference kernels and the trainable modules (KVpop E.2-E.4).

All inputs are float32 or float64. The leading axes ``...`` precede ``[H, S, *]``; heads are axis -3 of ``x``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvpop_vllm.kernels.ops import LinearWeights, MLPWeights, MLSTMWeights

READOUT_EPS = 1e-6
NORM_EPS = 1e-6


def headwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply ``x [..., H, S, I]`` by one weight per head.

    Args:
        x: inputs.
        weight: vectors ``[H, I]`` or matrices ``[H, I, O]``.

    Returns:
        ``[..., H, S]`` for vectors, ``[..., H, S, O]`` for matrices.
    """
    if weight.dim() == 2:
        return (x @ weight.unsqueeze(-1)).squeeze(-1)
    return x @ weight


def key_norm_score(key: torch.Tensor) -> torch.Tensor:
    """Return ``r = -|k|_2`` for keys ``[..., D]``: ``[...]`` float32."""
    return -key.double().square().sum(-1).sqrt().float()


def linear_score(weights: LinearWeights, x: torch.Tensor) -> torch.Tensor:
    """Return ``r = weight . x + bias`` for x ``[..., H, S, 2D]``: ``[..., H, S]``."""
    return headwise(x, weights.weight) + weights.bias.unsqueeze(-1)


def mlp_score(weights: MLPWeights, x: torch.Tensor) -> torch.Tensor:
    """Return ``r = fc2 . SiLU(fc1 x)`` for x ``[..., H, S, 2D]``: ``[..., H, S]``."""
    hidden = F.silu(headwise(x, weights.fc1_weight) + weights.fc1_bias.unsqueeze(-2))
    return headwise(hidden, weights.fc2_weight) + weights.fc2_bias.unsqueeze(-1)


def feature_map(a: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the features phi(a) over the last axis (KVpop appendix A).

    ``hedgehog`` is [softmax(a); softmax(-a)], ``softmax`` is softmax(a).
    """
    if kind == "hedgehog":
        return torch.cat([a.softmax(-1), (-a).softmax(-1)], dim=-1)
    return a.softmax(-1)


def softcap(a: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return ``c * tanh(a / c)``, or a if c is None."""
    return a if cap is None else cap * torch.tanh(a / cap)


def mlstm_inputs(weights: MLSTMWeights, x: torch.Tensor):
    """Return the inputs of the state update for x ``[..., H, S, 2D]`` (eqs. 37, 40).

    Returns:
        Write features ``k [..., H, S, F]``, values ``v [..., H, S, Dv]``, and the input and forget gate
            pre-activations ``[..., H, S]``.
    """
    k = feature_map(headwise(x, weights.k_proj), weights.feature_map)
    v = x[..., x.shape[-1] // 2 :] if weights.v_proj is None else headwise(x, weights.v_proj)
    igate = softcap(headwise(x, weights.igate_weight) + weights.igate_bias.unsqueeze(-1), weights.gate_softcap)
    fgate = softcap(headwise(x, weights.fgate_weight) + weights.fgate_bias.unsqueeze(-1), weights.gate_softcap)
    return k, v, igate, fgate


def mlstm_query(weights: MLSTMWeights, x: torch.Tensor) -> torch.Tensor:
    """Return the read features ``[..., H, S, F]`` of the tokens to score (eq. 37)."""
    return feature_map(headwise(x, weights.q_proj), weights.feature_map)


def mlstm_score(weights: MLSTMWeights, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return scores ``[..., H, S]`` for readouts ``h [..., H, S, Dv]`` of the tokens x (eq. 42).

    ``r = out . SiLU(norm(h)) + bias + skip . x``; norm and skip are optional.
    """
    if weights.norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * weights.norm_weight.unsqueeze(-2)
    r = headwise(F.silu(h), weights.out_weight) + weights.out_bias.unsqueeze(-1)
    return r if weights.skip_weight is None else r + headwise(x, weights.skip_weight)


def readout_denominator(qz: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Return the denominator ``q.z + eps`` of a readout, with eps = 1e-6 before stabilisation.

    Args:
        qz: ``q.z`` of the stored state, which is the true state times ``exp(-m)``.
        m: stabiliser.
    """
    return qz + READOUT_EPS * torch.exp(-m.clamp(-60.0, 60.0))
