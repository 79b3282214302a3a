"""Learned scorers and gates as torch modules, for training and serving, and their files."""

from __future__ import annotations

import dataclasses

import torch

from kvpop_vllm.scorers.base import Scorer, log_gamma
from kvpop_vllm.scorers.checkpoint import Decay, ScorerConfig
from kvpop_vllm.scorers.gates import GATES, Gate, Signals
from kvpop_vllm.scorers.linear import LinearScorer
from kvpop_vllm.scorers.mlp import MLPScorer
from kvpop_vllm.scorers.mlstm import MLSTMScorer

SCORERS: dict[str, type[Scorer]] = {"mlstm": MLSTMScorer, "mlp": MLPScorer, "linear": LinearScorer}
"""Scorer classes by the ``scorer`` key of their config."""

__all__ = [
    "GATES",
    "SCORERS",
    "Decay",
    "Gate",
    "LinearScorer",
    "MLPScorer",
    "MLSTMScorer",
    "Scorer",
    "ScorerConfig",
    "Signals",
    "build",
    "from_tensors",
    "gate_from_tensors",
    "log_gamma",
]


def build(config: ScorerConfig, **sizes) -> Scorer | Gate:
    """Return a freshly initialised scorer or gate of one layer.

    Args:
        config: config of the scorer or gate.
        sizes: size arguments of its class.
    """
    return (SCORERS | GATES)[config.scorer](config, **sizes)


def from_tensors(config: ScorerConfig, tensors: dict[str, torch.Tensor]) -> Scorer:
    """Return one layer's scorer with the checked tensors of a file, float32, without gradients."""
    sizes = {}
    if config.scorer == "mlstm":
        sizes = {
            "features": tensors["q_proj"].shape[-1],
            "value_size": tensors["out.weight"].shape[-1],
            "project_values": "v_proj" in tensors,
        }
    elif config.scorer == "mlp":
        sizes = {"hidden": tensors["fc1.weight"].shape[-1]}
    heads = tensors["decay_logit"].shape[0]
    # vLLM loads models with the model's dtype as the default dtype
    module = build(_with_heads(config, heads), **sizes).float()
    module.load_state_dict(tensors)
    return module.requires_grad_(False)


def gate_from_tensors(config: ScorerConfig, tensors: dict[str, torch.Tensor]) -> Gate:
    """Return one layer's gate with the checked tensors of a file, float32, without gradients.

    The tensors are those of all KV heads, or of some of them if the gate does not read keys and values.
    """
    sizes = {}
    if config.scorer == "trimkv":
        sizes["width"] = tensors["gate_proj.weight" if config.gated else "linear1.weight"].shape[0]
    module = build(_with_heads(config, tensors["bias"].shape[0]), **sizes).float()
    module.load_state_dict(tensors)
    return module.requires_grad_(False)


def _with_heads(config: ScorerConfig, heads: int) -> ScorerConfig:
    return config if config.num_kv_heads == heads else dataclasses.replace(config, num_kv_heads=heads)
