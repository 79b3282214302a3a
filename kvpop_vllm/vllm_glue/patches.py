"""Ledger of everything of vLLM that is wrapped. Registered extension points come first; these are the rest.

=====================================  ==============================================================================
target                                 why, how, and when it can go
=====================================  ==============================================================================
EngineArgs.add_cli_args                vLLM has no way for a plugin to add engine flags. Wrapped: adds the --kv-* group
                                       after vLLM's own. Goes when plugins can register engine arguments.
EngineArgs.from_cli_args               Wrapped: merges the flags into additional_config, so that they travel with the
                                       VllmConfig to every process. Goes with the one above.
EngineArgs.create_engine_config        The only point between the arguments and the loading of weights. Wrapped: with a
                                       policy, refuses what cannot work and switches prefix caching off. Goes when platforms consult a backend's
                                       validate_configuration on CPU too (vLLM issue 42449 is about such hooks).
InputProcessor.process_inputs          Requests that stream their input rewind the sequence. Wrapped on the first engine
                                       with a policy: refuses them there. Goes when a KV cache spec can refuse.
selector._cached_get_attn_backend      The choice of a backend class is cached per process under a key that knows nothing of
                                       policies: engines of one process would get each other's. Replaced by the same
                                       function without its cache on the first engine with a policy. Goes when the key
                                       holds additional_config.
decorators._try_load_aot_compiled_fn   (compile_cache.py) On CPU vLLM cannot load what it compiled and saved: each start would
                                       compile for a minute. Wrapped: with a policy, torch's artefact gets the method
                                       that vLLM calls on its own. Goes when vLLM loads such artefacts.
caching.aot_compile_hash_factors       (compile_cache.py) The key of that cache holds all of additional_config, though the
                                       compiled graph depends neither on the budget nor on the scorer. Wrapped: with
                                       a policy, only its name counts. Goes when a plugin can name its own factors.
=====================================  ==============================================================================

Without a policy each wrapper calls the original with unchanged arguments and returns what it returns.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from pathlib import Path

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError, PolicySettings
from kvpop_vllm.vllm_glue import flags, refusals

_MARK = "_kvpop_wrapped"


def apply() -> None:
    """Wraps the argument handling; may be called again."""
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "add_cli_args", _add_cli_args, staticmethod)
    _wrap(EngineArgs, "from_cli_args", _from_cli_args, classmethod)
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)


def _wrap(owner: type, name: str, make, kind=None) -> None:
    current = owner.__dict__[name]
    original = current.__func__ if kind else current
    if getattr(original, _MARK, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def _add_cli_args(original):
    def add_cli_args(parser):
        parser = original(parser)
        flags.add_to(parser)
        return parser

    return add_cli_args


def _from_cli_args(original):
    def from_cli_args(cls, args):
        engine_args = original(cls, args)
        with _one_line_errors():
            merged = flags.merge(args, engine_args.additional_config)
        if merged is not engine_args.additional_config:
            engine_args.additional_config = merged
        return engine_args

    return from_cli_args


def _create_engine_config(original):
    def create_engine_config(self, *args, **kwargs):
        asked = (
            isinstance(self.additional_config, dict) and self.additional_config.get(ADDITIONAL_CONFIG_KEY) is not None
        )
        if not asked:
            return _log_unused_scorers(original(self, *args, **kwargs))
        with _one_line_errors():
            return _config_with_policy(self, original, args, kwargs)

    return create_engine_config


def _config_with_policy(engine_args, original, args, kwargs):
    from vllm.logger import init_logger

    from kvpop_vllm import policies
    from kvpop_vllm.vllm_glue.engine_policy import check_checkpoint, engine_policy

    settings = PolicySettings.parse(engine_args.additional_config[ADDITIONAL_CONFIG_KEY])
    policies.get(settings.policy)
    refusals.check_arguments(engine_args)
    logger = init_logger("vllm.kvpop_vllm")
    if engine_args.enable_prefix_caching is None:
        logger.info("--kv-policy %s: prefix caching is switched off, evicted tokens cannot be shared", settings.policy)
        engine_args.enable_prefix_caching = False
    vllm_config = original(engine_args, *args, **kwargs)
    refusals.check_config(vllm_config)
    kept = engine_policy(vllm_config).retention
    check_checkpoint(vllm_config)
    _refuse_streaming_input(settings)
    _forget_backend_choices()
    logger.info(
        "--kv-policy %s: %d tokens per KV head (%d sinks, window %d, %d long-range)",
        settings.policy,
        kept.budget,
        kept.sinks,
        kept.window,
        kept.topk,
    )
    return vllm_config


def _log_unused_scorers(vllm_config):
    from vllm.logger import init_logger

    from kvpop_vllm.vllm_glue.engine_policy import checkpoint_section

    if vllm_config.model_config is not None and checkpoint_section(vllm_config) is not None:
        init_logger("vllm.kvpop_vllm").info(
            "the checkpoint carries KVpop scorers, which are not used without --kv-policy: serving with a dense cache"
        )
    return vllm_config


def _forget_backend_choices() -> None:
    from vllm.v1.attention import selector

    cached = selector._cached_get_attn_backend
    if getattr(cached, _MARK, False):
        return

    @functools.wraps(cached.__wrapped__)
    def choose(*args, **kwargs):
        return cached.__wrapped__(*args, **kwargs)

    setattr(choose, _MARK, True)
    choose.cache_clear = cached.cache_clear
    selector._cached_get_attn_backend = choose


def _refuse_streaming_input(settings: PolicySettings) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    def make(original):
        def process_inputs(self, *args, **kwargs):
            config = self.vllm_config.additional_config
            if isinstance(config, dict) and config.get(ADDITIONAL_CONFIG_KEY) is not None:
                refusals.check_request(
                    PolicySettings.parse(config[ADDITIONAL_CONFIG_KEY]), bool(kwargs.get("resumable", False))
                )
            return original(self, *args, **kwargs)

        return process_inputs

    _wrap(InputProcessor, "process_inputs", make)


@contextmanager
def _one_line_errors():
    """Where vLLM's own command runs, a ConfigError becomes one line and exit code 1; elsewhere it stays an exception."""
    try:
        yield
    except ConfigError as error:
        if not _in_vllms_command():
            raise
        sys.exit(f"kvpop: error: {error}")


def _in_vllms_command() -> bool:
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(sys.argv[0]).name == "vllm" or (module is not None and module.name.startswith("vllm."))
