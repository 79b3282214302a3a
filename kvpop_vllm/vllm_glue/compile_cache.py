"""Reuse of compiled models on CPU: two wrappers, listed with their reasons in :mod:`kvpop_vllm.vllm_glue.patches`.

vLLM saves what it compiled under its cache folder. On CPU, where it compiles with torch's own inductor backend, loading
fails in 0.32 (``'function' object has no attribute 'finalize_loading'``) and every start compiles anew.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY
from kvpop_vllm.vllm_glue.engine_policy import engine_policy, requested
from kvpop_vllm.vllm_glue.patches import wrap

_HOOK = "finalize_loading"


def apply() -> None:
    """Wraps loading and key of the cache; called where an engine with a policy picks its backend, may be called again."""
    wrap("vllm.compilation.decorators:_try_load_aot_compiled_fn", _try_load)
    wrap("vllm.compilation.caching:aot_compile_hash_factors", _hash_factors)


def _try_load(original):
    def try_load_aot_compiled_fn(model, *args, **kwargs):
        if not requested(model.vllm_config):
            return original(model, *args, **kwargs)
        with _nothing_to_finalize():
            return original(model, *args, **kwargs)

    return try_load_aot_compiled_fn


@contextmanager
def _nothing_to_finalize():
    """Torch's artefact is complete once it is unpickled: the step vLLM's own backend needs does nothing for it."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as artefact

    lend = not hasattr(artefact, _HOOK)
    if lend:
        setattr(artefact, _HOOK, lambda self, vllm_config: None)
    try:
        yield
    finally:
        if lend:
            delattr(artefact, _HOOK)


def _hash_factors(original):
    def aot_compile_hash_factors(vllm_config):
        if not requested(vllm_config):
            return original(vllm_config)
        neutral = copy.copy(vllm_config)
        policy = engine_policy(vllm_config)
        setting = {"policy": policy.name} | ({"graph": policy.graph} if policy.gated else {})
        neutral.additional_config = {**vllm_config.additional_config, ADDITIONAL_CONFIG_KEY: setting}
        return original(neutral)

    return aot_compile_hash_factors
