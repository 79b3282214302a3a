"""Makes vLLM and transformers know the model types of full checkpoints; imports no model."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig, Qwen3Config
from vllm import ModelRegistry


class Qwen3KVpopConfig(Qwen3Config):
    """Qwen3 whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "qwen3_kvpop"
    kvpop: dict | None = None


class LlamaKVpopConfig(LlamaConfig):
    """Llama whose ``config.json`` has a ``kvpop`` section: the contents of a ``kvpop_config.json``."""

    model_type = "llama_kvpop"
    kvpop: dict | None = None


def register() -> None:
    """May be called again. The model classes are named only; vLLM imports them when a checkpoint asks for one."""
    for config in (Qwen3KVpopConfig, LlamaKVpopConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in ("Qwen3KVpopForCausalLM", "LlamaKVpopForCausalLM"):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.models:{name}")
