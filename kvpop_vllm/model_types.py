"""The model types of full checkpoints, for transformers; imports no model."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig, Qwen3Config

from kvpop_vllm.config import FULL_CHECKPOINT_SUFFIX


class Qwen3KVpopConfig(Qwen3Config):
    """Qwen3 whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "qwen3" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


class LlamaKVpopConfig(LlamaConfig):
    """Llama whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "llama" + FULL_CHECKPOINT_SUFFIX
    kvpop: dict | None = None


def register() -> None:
    """Makes transformers know them; may be called again."""
    for config in (Qwen3KVpopConfig, LlamaKVpopConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
