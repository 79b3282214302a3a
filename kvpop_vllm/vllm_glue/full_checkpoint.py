"""Makes vLLM and transformers know the model types of full checkpoints; imports no model."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig, Qwen3Config
from vllm import ModelRegistry

from kvpop_vllm.config import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX


class Qwen3KVpopConfig(Qwen3Config):
    """Qwen3 whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "qwen3" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


class LlamaKVpopConfig(LlamaConfig):
    """Llama whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "llama" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


def register() -> None:
    """May be called again. The model classes are named only; vLLM imports them when a checkpoint asks for one."""
    for config in (Qwen3KVpopConfig, LlamaKVpopConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.models:{name}")
