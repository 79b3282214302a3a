"""Model types of full checkpoints for transformers. This module does not import models."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig, Qwen3Config

from kvpop_vllm.supported import FULL_CHECKPOINT_SUFFIX


class Qwen3KVpopConfig(Qwen3Config):
    """Config of Qwen3 with a ``kvpop`` section, the contents of a ``kvpop_config.json``."""

    model_type = "qwen3" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


class LlamaKVpopConfig(LlamaConfig):
    """Config of Llama with a ``kvpop`` section, the contents of a ``kvpop_config.json``."""

    model_type = "llama" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


def register() -> None:
    """Register the configs with transformers; may be called again."""
    for config in (Qwen3KVpopConfig, LlamaKVpopConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
