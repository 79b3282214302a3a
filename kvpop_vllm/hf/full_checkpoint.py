"""Full checkpoints in transformers: the base model, and the scorers' tensors beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
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
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if checkpoint.looks_like_scorer(name)}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    checkpoint.check_layout(found, str(folder))
    named = ((checkpoint.full_checkpoint_name(name), tensor) for name, tensor in found.items())
    layers = checkpoint.split_layers(config, named, str(folder))
    checkpoint.check_tensors(config, layers, str(folder))
    return layers
