"""Reuse of compiled models on a CPU.

vLLM saves compiled models in its cache folder. On a CPU, where it compiles with torch's own inductor backend,
loading them fails in 0.32 (``'function' object has no attribute 'finalize_loading'``), so every start
compiles again.
"""

import copy
from contextlib import contextmanager

from vllm.logger import init_logger

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested

logger = init_logger("vllm.kvpop_vllm")

_HOOK = "finalize_loading"


def try_load(original, model, *args, **kwargs):
    """Wrap the loading of a compiled model."""
    if not requested(model.vllm_config):
        return original(model, *args, **kwargs)
    with _nothing_to_finalize():
        return original(model, *args, **kwargs)


@contextmanager
def _nothing_to_finalize():
    """Give torch's compiled artefact an empty ``finalize_loading`` method while the context is open.

    vLLM calls this method for artefacts of its own backend. Torch's artefact is complete once it is
    unpickled. Its class is private to torch: where it is another, vLLM compiles the model again.
    """
    lent = None
    try:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as artefact

        if not hasattr(artefact, _HOOK):
            setattr(artefact, _HOOK, lambda self, vllm_config: None)
            lent = artefact
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning_once("this torch is not the expected one, so that models are compiled at every start: %s", error)
    try:
        yield
    finally:
        if lent is not None:
            delattr(lent, _HOOK)


def hash_factors(original, vllm_config, *args, **kwargs):
    """Wrap the computation of a compiled model's key."""
    if not requested(vllm_config):
        return original(vllm_config, *args, **kwargs)
    neutral = copy.copy(vllm_config)
    policy = engine_policy(vllm_config)
    setting = {"policy": policy.name} | ({"graph": policy.graph} if policy.gated else {})
    neutral.additional_config = {**vllm_config.additional_config, ADDITIONAL_CONFIG_KEY: setting}
    return original(neutral, *args, **kwargs)
