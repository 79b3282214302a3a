"""Entry point of the ``vllm.general_plugins`` group: called in every process of vLLM, possibly twice."""

from __future__ import annotations


def register() -> None:
    """Registers the late-resolving backend, the model classes of full checkpoints, and the flags.

    Nothing of this has an effect on an engine without a policy, and no kernel is imported here.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvpop_vllm.vllm_glue import full_checkpoint, patches

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpop_vllm.vllm_glue.select.Backend")
    full_checkpoint.register()
    patches.apply()
