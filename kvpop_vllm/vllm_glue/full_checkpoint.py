"""Makes vLLM and transformers know the model types of full checkpoints; imports no model."""

from __future__ import annotations

from vllm import ModelRegistry

from kvpop_vllm import model_types
from kvpop_vllm.config import ARCHITECTURES


def register() -> None:
    """May be called again. The model classes are named only; vLLM imports them when a checkpoint asks for one."""
    model_types.register()
    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.models:{name}")
