"""Choice of attention backends: registered paths that resolve to vLLM's own unless the engine has a policy.

With a policy they resolve to ours for layers with full attention. Layers of windows and chunks, and those of draft
models, get what vLLM would choose.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import SLIDING
from kvpop_vllm.vllm_glue.start import cuda
from kvpop_vllm.vllm_glue.start.engine_policy import current_config, engine_policy

custom_before: str | None = None
"""Path of the class that another plugin had registered as the backend CUSTOM, if any."""
_stock_layer: ContextVar[bool] = ContextVar("stock layer", default=False)
"""True while a backend is chosen for a layer that a policy does not act on."""
_draft_model: ContextVar[bool] = ContextVar("draft model", default=False)
"""True while a model is loaded that drafts for the one that a policy acts on."""


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
    if vllm_config is None or _stock_layer.get():
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
    if _draft_model.get():
        # its config may name the backend of the layers that the policy acts on, or no layers of these
        kwargs["backend"] = vllm_config.speculative_config.attention_backend
        with stock_layer():
            return _uncached(original, *args, **kwargs)
    policy = engine_policy(vllm_config)
    install(policy)
    if _stock_layer.get() or (SLIDING in policy.model.kinds and kwargs["attn_selector_config"].has_sliding_window):
        kwargs["backend"] = vllm_config.attention_config.backend  # not that of the layers with full attention
        with stock_layer():
            return _uncached(original, *args, **kwargs)
    backend = _uncached(original, *args, **kwargs)
    if getattr(backend, "policy", None) is None:
        raise ConfigError(
            f"--kv-policy {policy.name} is in a config that chose the attention backend {backend.__name__}:"
            " have EngineArgs make the config, by create_engine_config()"
        )
    return backend


def chunked_backend(original, *args, **kwargs):
    """Wrap the choice of the backend of a layer with chunked attention, which does not say that it is one."""
    with stock_layer():
        return original(*args, **kwargs)


def load_draft_model(original, *args, **kwargs):
    """Wrap the loading of a draft model, whose layers get the backend and the cache that they have without a policy."""
    token = _draft_model.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _draft_model.reset(token)


@contextmanager
def stock_layer() -> Iterator[None]:
    """Have the backend chosen that a layer has without a policy."""
    token = _stock_layer.set(True)
    try:
        yield
    finally:
        _stock_layer.reset(token)


def _uncached(function, *args, **kwargs):
    """Return what a function returns if neither it nor any that it wraps remembers other calls, nor this one."""
    _clear_caches(function)
    try:
        return function(*args, **kwargs)
    finally:
        _clear_caches(function)


def _clear_caches(function) -> None:
    """Empty the caches of a function and of every function that it wraps."""
    while function is not None:
        getattr(function, "cache_clear", lambda: None)()
        function = getattr(function, "__wrapped__", None)
