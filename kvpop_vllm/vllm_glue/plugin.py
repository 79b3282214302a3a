"""Entry point of the ``vllm.general_plugins`` group, called in every vLLM process, possibly twice."""

from __future__ import annotations

from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import VLLM
from kvpop_vllm.vllm_glue.start import contract, fallback


def register() -> None:
    """Register the late-resolving backends, the model types and classes of full checkpoints, and the flags.

    This has no effect on an engine without a policy, and it imports no kernel and no model: vLLM imports a
    class only when a checkpoint asks for it. Where it fails, the plugin stands aside, since vLLM does not catch what
    a plugin raises.
    """
    if fallback.reason is not None:
        return
    try:
        _register()
    except ConfigError as error:
        fallback.stand_aside(str(error))
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
        fallback.stand_aside(f"{found}: install kvpop_vllm and vllm{VLLM} anew")


def _register() -> None:
    import vllm

    contract.check_version(vllm.__version__)
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvpop_vllm import model_types
    from kvpop_vllm.supported import ARCHITECTURES
    from kvpop_vllm.vllm_glue import patches
    from kvpop_vllm.vllm_glue.start import backend_choice, cuda

    contract.check_functions(Path(vllm.__file__).parent, patches.LEDGER)
    patches.apply()
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpop_vllm.vllm_glue.start.backend_choice.Backend")
    custom = AttentionBackendEnum.CUSTOM
    before = custom.get_path() if custom.is_overridden() else None
    if before != cuda.BACKEND:
        backend_choice.custom_before = before
        register_backend(custom, cuda.BACKEND)
    model_types.register()
    for name in set(ARCHITECTURES.values()) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.run.models:{name}")
