"""The registered backend path. ``Backend`` resolves late, per engine: stock unless that engine has a policy."""

from __future__ import annotations


def __getattr__(name: str):
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    from kvpop_vllm.vllm_glue.engine_policy import requested

    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or not requested(vllm_config):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from kvpop_vllm.vllm_glue import backend, compile_cache

    compile_cache.apply()
    return backend.for_config(vllm_config)
