"""Ledger of the vLLM functions that are wrapped, the function that wraps them, and most of the wrappers.

Only functions without a registered extension point are wrapped. Without a policy each wrapper calls the
original with unchanged arguments and returns its result.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import vllm
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from kvpop_vllm import requests
from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError, PolicySettings, check_spelling
from kvpop_vllm.vllm_glue.start import contract, cuda, engine_policy, fallback, flags, refusals
from kvpop_vllm.vllm_glue.start.engine_policy import requested

logger = init_logger("vllm.kvpop_vllm")


@dataclass(frozen=True)
class Patch:
    """A wrapped function of vLLM.

    Attributes:
        target: ``module:function`` or ``module:Class.method``.
        takes: parameters that the wrapper relies on. Those before ``*`` come first and in this order, those behind it
            have these names; what else there is the wrapper passes on.
        always: True if it is wrapped wherever the plugin is loaded; otherwise it is wrapped by the first
            engine of the process whose policy needs it.
        why: the reason for the wrapper, and what it does.
        goes: the condition under which the wrapper can be removed.
        on_gpus: True if it is wrapped on GPUs only.
        in_front_ends: True if it is wrapped by any engine, where vLLM's HTTP server is loaded.
    """

    target: str
    takes: str
    always: bool
    why: str
    goes: str
    on_gpus: bool = False
    in_front_ends: bool = False


LEDGER = (
    Patch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "parser",
        True,
        "vLLM has no way for a plugin to add engine flags: adds the --kv-* group after vLLM's own.",
        "when plugins can register engine arguments",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "cls, args",
        True,
        "The parser of the flags merges them into additional_config; arguments that no such parser made are merged here.",
        "with the one above",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "self",
        True,
        "The only point between the arguments and the loading of weights: refuses keys of additional_config that are "
        "misspelt; with a policy, refuses what cannot work, switches prefix caching on where prompts are protected and off elsewhere and, for a policy with a gate, names "
        "the model class that has room for it.",
        "when platforms consult a backend's validate_configuration on CPU too (vLLM issue 42449 is about such hooks)",
    ),
    Patch(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "self, *, prompt, lora_request, resumable",
        False,
        "Requests that stream their input rewind the sequence: refuses them. Requests may ask for a budget of their own: checks "
        "what they ask, and resolves it into the numbers that travel with their sampling parameters.",
        "when a KV cache spec can refuse, and plugins can check sampling parameters",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "self, prompt, sampling_params, *, lora_request",
        False,
        "A generator does nothing before it is asked, and an answer that is streamed has begun by then: what a request asks of its "
        "cache is checked when the generator is made, so that a refusal is HTTP 400 there too.",
        "when plugins can check sampling parameters",
    ),
    Patch(
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "",
        True,
        "The choice of a backend class is cached per process under a key that knows nothing of policies: engines of one "
        "process would get each other's. With a policy its cache is emptied before and after; refuses configs that no "
        "EngineArgs have made, for which a GPU's platform chooses a backend of vLLM's.",
        "when the key holds additional_config, and platforms ask plugins about configs",
    ),
    Patch(
        "vllm.v1.executor.abstract:Executor.get_kv_cache_specs",
        "self",
        True,
        "A layer may bring an attention backend of its own, which is not asked for a policy, and vLLM would serve it with a dense "
        "cache: with a policy, refuses layers whose cache is not of the policy.",
        "when a backend sees the specs of all layers",
    ),
    Patch(
        "vllm.compilation.decorators:_try_load_aot_compiled_fn",
        "model",
        False,
        "(compile_cache.py) On CPU vLLM cannot load what it compiled and saved, and each start would compile for a "
        "minute: with a policy, torch's artefact gets the method that vLLM calls on its own.",
        "when vLLM loads such artefacts",
    ),
    Patch(
        "vllm.compilation.caching:aot_compile_hash_factors",
        "vllm_config",
        False,
        "(compile_cache.py) The key of that cache holds all of additional_config, though the compiled graph depends "
        "neither on the budget nor on the scorer: with a policy, only its name and the make of its gate count.",
        "when a plugin can name its own factors",
    ),
    Patch(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        "self, request",
        False,
        "(manager_requests.py) A cache manager is told of a request's name only: ours learns what each asked for and how long its "
        "prompt is, and a hit that reaches beyond what it protects is cut.",
        "when cache managers are handed the request",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler._free_request",
        "self, request",
        False,
        "(reports.py) Only here is a request's cache known at its end: its numbers are kept for the metrics, and returned with "
        "the response to requests that ask for a report.",
        "when cache managers can add to a response and to the scheduler's statistics",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        "self",
        False,
        "(reports.py) The scheduler's statistics have no room for others: ours travel in the field of KV connectors, which are "
        "refused.",
        "with the one above",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "self, scheduler_output",
        False,
        "(inspector.py) Only between a step and the end of its requests is their cache known: with --kv-inspect, what it holds is "
        "recorded.",
        "when plugins are called after a step",
    ),
    Patch(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        "self, vllm_config",
        False,
        "(metrics.py) A plugin in vllm.stat_logger_plugins cannot decline a config, and switches statistics on where "
        "--disable-log-stats is given, also without a policy: our logger is added to engines with one.",
        "when stat logger plugins can decline a config",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size",
        "self",
        False,
        "(cartridges.py, inspector.py) The first step of an engine's start that has workers and block managers: cartridges are loaded "
        "into blocks of the pool, and the recorder of the inspect page learns how to ask workers.",
        "when plugins can put blocks into the pool, and reach the workers",
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
        "self",
        False,
        "(cartridges.py) vLLM forgets its prefix cache only while nobody holds blocks: those of cartridges are let go meanwhile.",
        "when blocks can be held that a reset leaves alone",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore.preprocess_add_request",
        "self, request",
        False,
        "(front_ends.py, cartridges.py) A front end without the policy, as on another node, checks nothing: its requests fail. So "
        "does a request that names a cartridge that the engine does not have; later it would stop the engine.",
        "when vLLM compares configs of front ends and engines, and blocks can be held that a reset leaves alone",
    ),
    Patch(
        "vllm.renderers.base:BaseRenderer.render_chat",
        "self",
        False,
        "(cartridge_names.py) An input of the engine does not say whether a client or a chat template wrote its first ids: chats are "
        "marked, since behind a cartridge that holds a text's beginning they go without BOS.",
        "when inputs say so",
    ),
    Patch(
        "vllm.renderers.base:BaseRenderer.render_chat_async",
        "self",
        False,
        "(cartridge_names.py) The same of servers.",
        "with the one above",
    ),
    Patch(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.init_static_loras",
        "self",
        False,
        "(cartridge_routes.py) Only base models and LoRA adapters are listed as models: cartridges are listed as adapters are.",
        "when plugins can add models",
    ),
    Patch(
        "vllm.entrypoints.launchers.app:attach_endpoint_plugins",
        "app",
        False,
        "(cartridge_routes.py, inspect_routes.py) Endpoint plugins load only where VLLM_PLUGINS names them, and warn at every start "
        "elsewhere: the routes that load cartridges are added where vLLM adds those that load LoRA adapters, and those of the inspect page.",
        "when endpoint plugins can ask for another condition",
    ),
    Patch(
        "vllm.entrypoints.generate.api_router:init_generate_state",
        "engine_client, state, args",
        False,
        "(front_ends.py) A server has several processes, and vLLM does not compare their configs: a front end whose flags "
        "are missing in its config, or whose engines have other settings, ends here.",
        "when plugins can register engine arguments, and vLLM compares configs of front ends and engines",
        in_front_ends=True,
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "self, num_tokens, num_reqs",
        False,
        "(step_requests.py) Attention metadata do not say how long a request's prompt is, what it asked for, nor its seed: the "
        "runner's own numbers are handed to the metadata builder first.",
        "when common attention metadata hold prompt lengths, as they do for reference sliding windows",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        "self",
        False,
        "(cpu_seeds.py) A request with a seed whose prompt is read in chunks stops the engine on a CPU: the states of the generators "
        "whose draws are discarded are kept.",
        "when draws of unfinished prompts are not made, or are taken back on CPUs too",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        "self",
        False,
        "(cpu_seeds.py) And set again, in place of an offset that generators of a CPU do not have.",
        "with the one above",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        "self, input_batch",
        False,
        "(step_requests.py) The same of model runner V2.",
        "with the one above",
        on_gpus=True,
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
        "self, scheduler_output",
        False,
        "(step_requests.py) Model runner V2 does not keep what a request asked for: it is kept beside it.",
        "when it keeps extra_args",
        on_gpus=True,
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",
        "self, scheduler_output",
        False,
        "(step_requests.py) And forgotten when the request is done.",
        "with the one above",
        on_gpus=True,
    ),
)

ADDED = (
    "vllm.v1.engine.core:EngineCore.kvpop_settings",
    "vllm.v1.engine.core:EngineCore.kvpop_load_cartridge",
    "vllm.v1.engine.core:EngineCore.kvpop_unload_cartridge",
    "vllm.v1.engine.core:EngineCore.kvpop_inspect",
    "vllm.v1.engine.core:EngineCore.kvpop_inspect_request",
)
"""Methods that vLLM's classes get (front_ends.py, cartridges.py, inspector.py), since a front end calls methods of its engine by name."""
HTTP_SERVER = "vllm.entrypoints.launchers.app"
"""Module that every process with vLLM's HTTP server has loaded before it makes a config."""
_MARK = "_kvpop_wrapped"


def wrap(target: str, ours: Callable) -> None:
    """Have ``target`` return ``ours(original, *args, **kwargs)``, once, however often this is called with ``ours``.

    Args:
        target: ``module:function`` or ``module:Class.method``.
        ours: takes the original function and its arguments.

    Raises:
        LookupError: the target is not in the ledger, or not with the parameters that ``ours`` names.
        ConfigError: vLLM does not have the target, or not with the parameters of the ledger.
    """
    patch = next((patch for patch in LEDGER if patch.target == target), None)
    if patch is None:
        raise LookupError(f"{target} is wrapped without being in the ledger: add it to LEDGER in {__name__}")
    _check_wrapper(patch, ours)
    owner, name = _found(patch)
    current = vars(owner)[name]
    kind = type(current) if isinstance(current, staticmethod | classmethod) else None
    original = wrapped = current.__func__ if kind else current
    while wrapped is not None:
        if getattr(wrapped, _MARK, None) is ours:
            return
        wrapped = getattr(wrapped, "__wrapped__", None)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ours(original, *args, **kwargs)

    setattr(wrapper, _MARK, ours)
    for method in ("cache_clear", "cache_info"):
        if hasattr(original, method):
            setattr(wrapper, method, getattr(original, method))
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def _check_wrapper(patch: Patch, ours: Callable) -> None:
    """Check that a wrapper names the parameters of its entry in the ledger."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *named = [each.name for each in inspect.signature(ours).parameters.values() if each.kind not in kinds]
    if named != contract.split(patch.takes)[0]:
        raise LookupError(f"the wrapper of {patch.target} takes {named}: say so in LEDGER in {__name__}")


def _found(patch: Patch) -> tuple[object, str]:
    """Return the module or class of a function of the ledger, and the function's name in it.

    Raises:
        ConfigError: vLLM does not have it, or not with the parameters of the ledger.
    """
    module, path = patch.target.split(":")
    *classes, name = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        parameters = inspect.signature(getattr(vars(owner)[name], "__func__", vars(owner)[name])).parameters
    except (ImportError, AttributeError, KeyError):
        raise contract.missing([contract.described(patch)]) from None
    anything = [each.kind for each in parameters.values()] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]  # a wrapper of another plugin
    if not anything and not contract.fits(patch.takes, list(parameters)):
        raise contract.missing([contract.described(patch)])
    return owner, name


def apply() -> None:
    """Wrap vLLM's argument handling and its choice of a backend, or nothing; may be called more than once.

    Raises:
        ConfigError: vLLM does not have one of the functions.
    """
    for patch in LEDGER:
        if patch.always:
            _found(patch)
    wrap("vllm.engine.arg_utils:EngineArgs.add_cli_args", _add_cli_args)
    wrap("vllm.engine.arg_utils:EngineArgs.from_cli_args", _from_cli_args)
    wrap("vllm.engine.arg_utils:EngineArgs.create_engine_config", _create_engine_config)
    wrap("vllm.v1.attention.selector:_cached_get_attn_backend", _cached_get_attn_backend)
    wrap("vllm.v1.executor.abstract:Executor.get_kv_cache_specs", _get_kv_cache_specs)


def _add_cli_args(original, parser, *args, **kwargs):
    parser = original(parser, *args, **kwargs)
    flags.add_to(parser)
    return parser


def _from_cli_args(original, cls, args, *more, **kwargs):
    flags.merge_into(args)
    return original(cls, args, *more, **kwargs)


def _create_engine_config(original, self, *args, **kwargs):
    with fallback.one_line_errors():
        check_spelling(self.additional_config)
        vllm_config = _config_with_policy(original, self, *args, **kwargs) if requested(self) else None
    if vllm_config is None:
        vllm_config = original(self, *args, **kwargs)
        _log_unused_scorers(vllm_config, "without --kv-policy: serving with a dense cache")
    if HTTP_SERVER in sys.modules:
        from kvpop_vllm.vllm_glue.start import front_ends

        front_ends.apply()
    return vllm_config


def _config_with_policy(original, engine_args, *args, **kwargs):
    from kvpop_vllm import policies

    contract.check_imports(Path(vllm.__file__).parent)
    settings = policies.parse_settings(engine_args.additional_config[ADDITIONAL_CONFIG_KEY])
    cls = policies.get(settings.policy)
    refusals.check_arguments(engine_args)
    protects = refusals.check_prefix_caching(engine_args, cls, settings)
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = bool(protects)
        if not protects:
            logger.info(
                "--kv-policy %s: prefix caching is off, prompts are not protected (--kv-protect-prompt)", cls.name
            )
    graphs_chosen = cuda.chooses_graphs(engine_args)
    vllm_config = original(engine_args, *args, **kwargs)
    refusals.check_config(vllm_config)
    policy = engine_policy.engine_policy(vllm_config)
    if settings.cartridge or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        _serve_cartridges(vllm_config)
    if vllm_config.device_config.device_type == "cuda":
        cuda.prepare(vllm_config, policy, graphs_chosen)
    engine_policy.check_checkpoint(vllm_config)
    engine_policy.choose_model_class(vllm_config)
    refusals.check_pipeline(vllm_config, policy)
    if settings.inspect:
        _serve_inspect_page(vllm_config)
    _publish()
    wrap("vllm.v1.engine.input_processor:InputProcessor.process_inputs", _process_inputs)
    wrap("vllm.v1.engine.async_llm:AsyncLLM.generate", _generate)
    if policy.scorer_kind is None:
        _log_unused_scorers(vllm_config, f"by --kv-policy {policy.name}")
    for line in engine_policy.describe(policy):
        logger.info("%s", line)
    return vllm_config


def _get_kv_cache_specs(original, self, *args, **kwargs):
    specs_of_workers = original(self, *args, **kwargs)
    if requested(self.vllm_config):
        for specs in specs_of_workers:
            refusals.check_layers(specs)
    return specs_of_workers


def _publish() -> None:
    """Publish metrics; their modules are imported once nothing is refused."""
    from kvpop_vllm.vllm_glue.extras import metrics

    metrics.apply()


def _serve_inspect_page(vllm_config) -> None:
    """Add the routes of the inspect page; their module imports vLLM's server."""
    from kvpop_vllm.vllm_glue.extras import inspect_routes

    engines = vllm_config.parallel_config.data_parallel_size
    refusals.refuse({f"--data-parallel-size {engines}: set it to 1": engines > 1}, "--kv-inspect")
    inspect_routes.apply()


def _serve_cartridges(vllm_config) -> None:
    """Check an engine's cartridges, and wrap what serves them."""
    from kvpop_vllm.vllm_glue.extras import cartridge_names, cartridge_routes

    cartridge_names.apply()
    cartridge_routes.apply()
    for name, known in cartridge_names.names_of(vllm_config).known.items():
        logger.info("cartridge %s: %d slots per KV head", name, known.placed.slots)


def _log_unused_scorers(vllm_config, why: str) -> None:
    """Log one line if the model is a full checkpoint."""
    if vllm_config.model_config is not None and engine_policy.checkpoint_section(vllm_config) is not None:
        logger.info("the checkpoint carries KVpop scorers, which are not used %s", why)


def _process_inputs(original, self, *args, **kwargs):
    from kvpop_vllm.vllm_glue.extras import cartridge_names

    ours = requested(self.vllm_config)
    if ours and kwargs.get("resumable"):
        policy = engine_policy.engine_policy(self.vllm_config).name
        raise ConfigError(
            f"streaming-input requests rewind the sequence, which --kv-policy {policy} cannot: send the whole prompt at once"
        )
    if not ours:
        return original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs)
    adapter = given.arguments.get("lora_request")
    if isinstance(adapter, cartridge_names.NamedCartridge):
        given.arguments["lora_request"] = None
    request = original(*given.args, **given.kwargs)
    params = request.sampling_params
    if params is None:
        return request
    if (request.cache_salt or "").startswith(cartridge_names.SALT):
        raise VLLMValidationError(f"cache_salt must not begin with {cartridge_names.SALT!r}: choose another")
    prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
    known = range(len(prompt)) if request.prompt_token_ids is None else prompt
    begin = functools.partial(cartridge_names.begin_of_prompt, given.arguments["prompt"], known, self.tokenizer)
    numbers, head = cartridge_names.resolved(self.vllm_config, params, known, adapter, begin)
    resolved = None if numbers is None else list(numbers)
    params.extra_args = {**(params.extra_args or {}), requests.RESOLVED: resolved}  # the old one belongs to the caller
    if numbers is not None and numbers.cartridges:
        cartridge_names.prepend(request, numbers, len(head), self.vllm_config.model_config.max_model_len)
    return request


def _generate(original, self, prompt, sampling_params, *args, **kwargs):
    from kvpop_vllm.vllm_glue.extras import cartridge_names

    adapter = kwargs.get("lora_request")
    if requested(self.vllm_config) and (adapter or getattr(sampling_params, "extra_args", None)):
        tokens = (prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None) or ()
        begin = functools.partial(cartridge_names.begin_of_prompt, prompt, tokens, self.renderer.tokenizer)
        cartridge_names.resolved(self.vllm_config, sampling_params, tokens, adapter, begin)
    return original(self, prompt, sampling_params, *args, **kwargs)


def _clear_caches(function) -> None:
    """Empty the caches of a function and of every function that it wraps."""
    while function is not None:
        getattr(function, "cache_clear", lambda: None)()
        function = getattr(function, "__wrapped__", None)


def _cached_get_attn_backend(original, *args, **kwargs):
    vllm_config = engine_policy.current_config()
    if vllm_config is None:
        return original(*args, **kwargs)
    _clear_caches(original)
    try:
        backend = original(*args, **kwargs)
    finally:
        _clear_caches(original)
    if getattr(backend, "policy", None) is None:
        settings = PolicySettings.parse(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])
        raise ConfigError(
            f"--kv-policy {settings.policy} is in a config that chose the attention backend {backend.__name__}:"
            " have EngineArgs make the config, by create_engine_config()"
        )
    return backend
