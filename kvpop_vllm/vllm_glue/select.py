"""Registered backend paths, resolved per engine: vLLM's own backend unless the engine has a policy."""

from __future__ import annotations

custom_before: str | None = None
"""Path of the class that another plugin had registered as the backend CUSTOM, if any."""


def __getattr__(name: str):
    if name not in ("Backend", "CudaBackend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    from kvpop_vllm.vllm_glue.engine_policy import requested

    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or not requested(vllm_config):
        return _stock_custom() if name == "CudaBackend" else _stock_cpu()
    from kvpop_vllm.vllm_glue import backend

    if name == "CudaBackend":
        from kvpop_vllm.vllm_glue.cuda_backend import CudaBackend

        return backend.for_config(vllm_config, CudaBackend)
    from kvpop_vllm.vllm_glue import compile_cache

    compile_cache.apply()
    return backend.for_config(vllm_config)


def _stock_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend


def _stock_custom():
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if custom_before is None:
        raise AttributeError(
            "the attention backend CUSTOM is kvpop_vllm's, for engines with --kv-policy: leave --attention-backend out"
        )
    return resolve_obj_by_qualname(custom_before)
