"""Full checkpoints in transformers: the base model, and the scorers' tensors beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from kvpop_vllm import model_types
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_types import LlamaKVpopConfig, Qwen3KVpopConfig
from kvpop_vllm.scorers import ScorerConfig, checkpoint

SCORERS = [r"\.self_attn\.(kvpop|retention_gate)\."]
"""Patterns of tensor names that are not parameters of the model."""


class LlamaKVpopForCausalLM(LlamaForCausalLM):
    """Llama without the scorer tensors of its checkpoint, which :func:`scorer_tensors` reads."""

    config_class = LlamaKVpopConfig
    _keys_to_ignore_on_load_unexpected = SCORERS


class Qwen3KVpopForCausalLM(Qwen3ForCausalLM):
    """Qwen3 without the scorer tensors of its checkpoint, which :func:`scorer_tensors` reads."""

    config_class = Qwen3KVpopConfig
    _keys_to_ignore_on_load_unexpected = SCORERS


model_types.register()
for _model in (LlamaKVpopForCausalLM, Qwen3KVpopForCausalLM):
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)


def scorer_tensors(folder: str | Path, config: ScorerConfig) -> list[dict[str, torch.Tensor]]:
    """Return the checked scorer tensors of each layer from a checkpoint's safetensors files.

    Raises:
        ConfigError: the folder does not exist, or its scorer tensors are missing or do not fit ``config``.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"the model was not loaded from a folder ({str(folder)!r}): give --kv-scorer DIR")
    found = checkpoint.read_tensors(folder, checkpoint.looks_like_scorer)
    return checkpoint.layers_of(config, found, str(folder))
