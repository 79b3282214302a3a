"""Engine configs: what is checked and set between vLLM's arguments and the loading of weights."""

from pathlib import Path

import vllm
from vllm import envs
from vllm.logger import init_logger

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError, check_spelling
from kvpop_vllm.vllm_glue.start import contract, cuda, fallback, published, refusals
from kvpop_vllm.vllm_glue.start.engine_policy import (
    check_checkpoint,
    checkpoint_section,
    choose_model_class,
    describe,
    engine_policy,
    requested,
    takes_snapshots,
    with_local_scorer,
)

logger = init_logger("vllm.kvpop_vllm")


def create_engine_config(install, original, self, *args, **kwargs):
    """Wrap the making of a config from engine arguments."""
    with fallback.one_line_errors():
        check_spelling(self.additional_config)
        settings, policy_class = _requested_policy(self)
        published.adopt(self, policy_class)
        if settings is not None:
            vllm_config = _config_with_policy(original, settings, policy_class, self, *args, **kwargs)
            install(engine_policy(vllm_config))
        else:
            vllm_config = original(self, *args, **kwargs)
            _log_unused_scorers(vllm_config, "without --kv-policy: serving with a dense cache")
            try:
                install(None)
            except ConfigError as error:  # a stock server starts with this vLLM too
                fallback.stand_aside(str(error), lambda: None)  # the wrapper of this function still refuses policies
    return vllm_config


def _requested_policy(engine_args):
    """Return the settings and the class of the policy that is asked for, a pair of None without one."""
    if not requested(engine_args):
        return None, None
    from kvpop_vllm import policies

    contract.check_imports(Path(vllm.__file__).parent)
    settings = policies.parse_settings(engine_args.additional_config[ADDITIONAL_CONFIG_KEY])
    return settings, policies.get(settings.policy)


def _config_with_policy(original, settings, cls, engine_args, *args, **kwargs):
    refusals.check_arguments(engine_args)
    engine_args.additional_config = with_local_scorer(engine_args.additional_config)
    protects = refusals.most_protected(cls, settings)
    if chooses_hits := engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = bool(protects)
    graphs_chosen = cuda.chooses_graphs(engine_args)
    if engine_args.speculative_config is not None and engine_args.async_scheduling is None:
        engine_args.async_scheduling = False  # vLLM's choice for draft models, which a policy does not work with
    vllm_config = original(engine_args, *args, **kwargs)
    refusals.check_config(vllm_config)
    if chooses_hits and refusals.has_no_hits(vllm_config):
        _cache_no_prefix(vllm_config)
    policy = engine_policy(vllm_config)
    refusals.check_kinds(vllm_config, policy)
    refusals.check_loading(vllm_config, policy)
    refusals.check_speculation(vllm_config, policy)
    on_gpu = vllm_config.device_config.device_type == "cuda"  # where copies of blocks were not run yet
    if chooses_hits and takes_snapshots(policy) and not on_gpu:
        vllm_config.cache_config.enable_prefix_caching = True
    elif chooses_hits and not vllm_config.cache_config.enable_prefix_caching:
        end = (
            "off on a GPU by default: --enable-prefix-caching shares prompts"
            if takes_snapshots(policy)
            else "off, nothing can be shared"
        )
        logger.info("--kv-policy %s: prefix caching is %s", policy.name, end)
    if settings.cartridge or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        _check_cartridges(vllm_config)
    if vllm_config.device_config.device_type == "cuda":
        cuda.prepare(vllm_config, policy, graphs_chosen)
    check_checkpoint(vllm_config)
    choose_model_class(vllm_config)
    policy.check_ranks(vllm_config.parallel_config.tensor_parallel_size)
    refusals.check_pipeline(vllm_config, policy)
    engines = vllm_config.parallel_config.data_parallel_size
    several = settings.inspect and engines > 1
    refusals.refuse({f"--data-parallel-size {engines}: set it to 1": several}, "--kv-inspect")
    if policy.scorer_kind is None:
        _log_unused_scorers(vllm_config, f"by --kv-policy {policy.name}")
    lines = describe(vllm_config)
    if policy.scorer_kind is not None and settings.scorer is None and published.serves_published(vllm_config):
        lines += published.describe(vllm_config, settings.map)
    for line in lines:
        logger.info("%s", line)
    return vllm_config


def _cache_no_prefix(vllm_config) -> None:
    """Switch the prefix cache of a model with recurrent layers off, as vLLM does where arguments say so."""
    from vllm.model_executor.models.config import HybridAttentionMambaModelConfig

    cache = vllm_config.cache_config
    cache.enable_prefix_caching, cache.mamba_block_size = False, None
    HybridAttentionMambaModelConfig.verify_and_update_config(vllm_config)
    logger.info("prefix caching is off: on a CPU vLLM has none for Mamba2 layers")


def _check_cartridges(vllm_config) -> None:
    """Read and check an engine's cartridges."""
    from kvpop_vllm.vllm_glue.extras.cartridge_names import names_of

    for name, cartridge in names_of(vllm_config).served.items():
        logger.info("cartridge %s: %d slots per KV head", name, cartridge.placed.slots)


def _log_unused_scorers(vllm_config, reason: str) -> None:
    """Log one line if the model is a full checkpoint."""
    if vllm_config.model_config is None:
        return
    if published.serves_published(vllm_config) or checkpoint_section(vllm_config) is not None:
        logger.info("the checkpoint carries KVpop scorers, which are not used %s", reason)
