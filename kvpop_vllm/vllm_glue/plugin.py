"""Entry point of the ``vllm.general_plugins`` group, called in every vLLM process, possibly twice."""

from __future__ import annotations


def register() -> None:
    """Register the late-resolving backends, the model classes of full checkpoints and the flags.

    This has no effect on an engine without a policy, and it imports no kernel.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvpop_vllm.vllm_glue import cuda, full_checkpoint, patches, select

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpop_vllm.vllm_glue.select.Backend")
    custom = AttentionBackendEnum.CUSTOM
    before = custom.get_path() if custom.is_overridden() else None
    if before != cuda.BACKEND:
        select.custom_before = before
        register_backend(custom, cuda.BACKEND)
    full_checkpoint.register()
    patches.apply()
