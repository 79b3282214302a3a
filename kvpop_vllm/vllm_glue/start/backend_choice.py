"""Registered backend paths, resolved per engine: vLLM's own backend unless the engine has a policy."""

from __future__ import annotations

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvpop_vllm.vllm_glue.start.engine_policy import current_config

custom_before: str | None = None
"""Path of the class that another plugin had registered as the backend CUSTOM, if any."""


def __getattr__(name: str):
    if name not in ("Backend", "CudaBackend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    vllm_config = current_config()
    if vllm_config is None:
        return _stock_backend(name)
    from kvpop_vllm.vllm_glue.run import backend, compile_cache

    if name == "CudaBackend":
        from kvpop_vllm.vllm_glue.run.cuda_backend import CudaBackend

        return backend.for_config(vllm_config, CudaBackend)
    compile_cache.apply()
    return backend.for_config(vllm_config)


def _stock_backend(name: str):
    path = AttentionBackendEnum.CPU_ATTN.value if name == "Backend" else custom_before
    if path is None:
        raise AttributeError(
            "the attention backend CUSTOM is kvpop_vllm's, for engines with --kv-policy: leave --attention-backend out"
        )
    return resolve_obj_by_qualname(path)
