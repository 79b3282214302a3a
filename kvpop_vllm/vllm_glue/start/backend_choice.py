"""Choice of an engine's attention backend: registered paths that resolve to vLLM's own unless the engine has a policy."""

from __future__ import annotations

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.start import cuda
from kvpop_vllm.vllm_glue.start.engine_policy import current_config, engine_policy

custom_before: str | None = None
"""Path of the class that another plugin had registered as the backend CUSTOM, if any."""


def register() -> None:
    """Register the paths of this module's two backends."""
    global custom_before
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")
    custom = AttentionBackendEnum.CUSTOM
    before = custom.get_path() if custom.is_overridden() else None
    if before != cuda.BACKEND:
        custom_before = before
        register_backend(custom, cuda.BACKEND)


def __getattr__(name: str):
    if name not in ("Backend", "CudaBackend"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    vllm_config = current_config()
    if vllm_config is None:
        return _stock_backend(name)
    from kvpop_vllm.vllm_glue.run import backend

    if name == "Backend":
        return backend.for_config(vllm_config)
    from kvpop_vllm.vllm_glue.run.cuda_backend import CudaBackend

    return backend.for_config(vllm_config, CudaBackend)


def _stock_backend(name: str):
    path = AttentionBackendEnum.CPU_ATTN.value if name == "Backend" else custom_before
    if path is None:
        raise AttributeError(
            "the attention backend CUSTOM is kvpop_vllm's, for engines with --kv-policy: leave --attention-backend out"
        )
    return resolve_obj_by_qualname(path)


def cached_get_attn_backend(install, original, *args, **kwargs):
    """Wrap the choice of a layer's backend, which vLLM caches for all engines of a process.

    Raises:
        ConfigError: the config of an engine with a policy chose another backend.
    """
    vllm_config = current_config()
    if vllm_config is None:
        return original(*args, **kwargs)
    policy = engine_policy(vllm_config)
    install(policy)
    _clear_caches(original)
    try:
        backend = original(*args, **kwargs)
    finally:
        _clear_caches(original)
    if getattr(backend, "policy", None) is None:
        raise ConfigError(
            f"--kv-policy {policy.name} is in a config that chose the attention backend {backend.__name__}:"
            " have EngineArgs make the config, by create_engine_config()"
        )
    return backend


def _clear_caches(function) -> None:
    """Empty the caches of a function and of every function that it wraps."""
    while function is not None:
        getattr(function, "cache_clear", lambda: None)()
        function = getattr(function, "__wrapped__", None)
