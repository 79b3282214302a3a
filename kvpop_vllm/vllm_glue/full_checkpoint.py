"""Registration of the model types of full checkpoints with vLLM and transformers; imports no model."""

from __future__ import annotations

from vllm import ModelRegistry

from kvpop_vllm import model_types
from kvpop_vllm.config import ARCHITECTURES


def register() -> None:
    """Register the model types and the names of their classes.

    vLLM imports a class only when a checkpoint asks for it. May be called more than once.
    """
    model_types.register()
    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.models:{name}")
