"""Checks of what cannot be served with a policy, made before any weight is loaded.

Each reason names the option to change.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout
from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import (
    CACHE_SPECS,
    DTYPES,
    FULL,
    GDN,
    HEAD_SIZES,
    HYBRID,
    LOCAL_LAYERS,
    MAMBA2,
    NEEDS_FULL,
    POLICY_LAYERS,
    RECURRENCES,
    RECURRENT,
    REFUSED,
    Refused,
    layer_kinds,
    recurrence,
    refused,
    sliding_window,
)
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested

DRAFT_MODELS = "eagle3", "mtp"
"""Methods of speculative decoding whose drafts come from layers, which have dense caches in groups of their own."""
DRAFT_METHODS = "ngram", "suffix", "custom_class", *DRAFT_MODELS
"""Methods of speculative decoding that are served."""
METHODS_SERVED = (
    f"choose the method {', '.join(DRAFT_METHODS[:-1])} or {DRAFT_METHODS[-1]} in --speculative-config, or leave it out (of a"
    " checkpoint with a draft model serve the base model)"
)


def refuse(reasons: Mapping[str, Any], subject: str = "--kv-policy") -> None:
    """Refuse everything that is there.

    Args:
        reasons: text of each reason -> whether it holds.
        subject: what the reasons cannot be combined with.

    Raises:
        ConfigError: one line with every reason that holds.
    """
    if present := [text for text, holds in reasons.items() if holds]:
        raise ConfigError(f"{subject} cannot be combined with {'; nor with '.join(present)}")


def check_arguments(args: Any) -> None:
    """Check that no engine argument excludes a policy, before vLLM itself acts on the arguments.

    Args:
        args: a ``vllm.engine.arg_utils.EngineArgs``.

    Raises:
        ConfigError: one line with every reason.
    """
    slots = args.block_size
    refuse(
        {
            f"speculative decoding with {args.speculative_config and args.speculative_config.get('method')}: {METHODS_SERVED}": (
                args.speculative_config is not None
                and args.speculative_config.get("method") not in (None, *DRAFT_METHODS)
            ),
            "a KV connector: leave --kv-transfer-config out": args.kv_transfer_config is not None,
            "KV offloading: leave --kv-offloading-size out": args.kv_offloading_size,
            "decode context parallelism: set --decode-context-parallel-size 1": args.decode_context_parallel_size > 1,
            "prefill context parallelism: set --prefill-context-parallel-size 1": args.prefill_context_parallel_size
            > 1,
            "dual-batch overlap: leave --enable-dbo and --ubatch-size out": args.enable_dbo or args.ubatch_size > 1,
            "cross-layer KV sharing: leave --kv-sharing-fast-prefill out": args.kv_sharing_fast_prefill,
            "Ray on a CPU, for which vLLM has no Ray workers: leave --distributed-executor-backend and"
            " --data-parallel-backend out": (
                current_platform.is_cpu() and "ray" in (args.distributed_executor_backend, args.data_parallel_backend)
            ),
            "the Rust front end, which does not check what requests ask for: unset VLLM_USE_RUST_FRONTEND": (
                envs.VLLM_USE_RUST_FRONTEND
            ),
            f"--block-size {slots}: use a multiple of 16": slots is not None and slots % 16 != 0,
        }
    )


def check_config(vllm_config: Any) -> None:
    """Check that neither the model nor the resolved settings exclude a policy.

    Args:
        vllm_config: a ``vllm.config.VllmConfig``.

    Raises:
        ConfigError: one line with every reason.
    """
    model = vllm_config.model_config
    model_features = {
        "MLA": model.use_mla,
        "encoder-decoder": model.is_encoder_decoder,
        "ALiBi": model.uses_alibi or "Step1ForCausalLM" in model.architectures,
        "bidirectional images": model.is_mm_prefix_lm,
        "bidirectional attention": model.is_diffusion,
        "recurrent": _has_other_layers(model),
        "sliding-window": model.rswa_window,
    }
    features = refused(model.hf_text_config, model_features, model.max_model_len)
    cache, model_dtype = _cache_dtype(vllm_config), str(model.dtype).removeprefix("torch.")
    platform, sizes = _platform(vllm_config), _head_sizes(model)
    refuse(
        {f"{feature.models}: {_remedy(feature, model)}": True for feature in features}
        | {
            f"--runner {model.runner_type}: only text generation has a KV cache to bound": (
                model.runner_type != "generate"
            ),
            f"a quantised KV cache ({cache}): set --kv-cache-dtype to the model's own dtype": (
                cache not in ("auto", *DTYPES["cuda"])
            ),
            f"a {cache} KV cache next to a {model_dtype} model: leave --kv-cache-dtype out": (
                cache in DTYPES["cuda"] and cache != model_dtype
            ),
            f"the {platform} platform yet: serve on a CPU or an NVIDIA GPU, or leave --kv-policy out": (
                platform not in DTYPES
            ),
            f"{model_dtype} on a CPU: use --dtype {' or '.join(DTYPES['cpu'])}": (
                platform == "cpu" and model_dtype not in DTYPES["cpu"]
            ),
            "images of Llama 4 on a CPU, where vLLM stops at the first one: serve text alone with --language-model-only": (
                platform == "cpu" and model.hf_text_config.model_type == "llama4_text" and _takes_images(model)
            ),
            "a KV connector: leave --kv-transfer-config out": vllm_config.kv_transfer_config is not None,
            f"speculative decoding with {vllm_config.speculative_config and vllm_config.speculative_config.method}: {METHODS_SERVED}": (
                vllm_config.speculative_config is not None
                and vllm_config.speculative_config.method not in DRAFT_METHODS
            ),
            "pipeline stages that are not compiled on a CPU, where vLLM stops at the first request: leave --enforce-eager"
            " and --enable-lora out, or set --pipeline-parallel-size 1": (
                platform == "cpu"
                and vllm_config.parallel_config.pipeline_parallel_size > 1
                and vllm_config.compilation_config.mode == CompilationMode.NONE
            ),
        }
        | {f"head size {size}: sizes {HEAD_SIZES} are supported": size not in HEAD_SIZES for size in sizes}
    )


def check_kinds(vllm_config: Any, policy: Any) -> None:
    """Check that the policy works next to layers that it does not act on.

    Raises:
        ConfigError: one line with every reason.
    """
    if not policy.model.kinds:
        return
    stock_kinds = " and ".join(policy.model.stock_kinds)
    one_cache, cache = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager, vllm_config.cache_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    windows = cache.user_specified_block_size and on_cpu and LOCAL_LAYERS & {*policy.model.kinds}
    dtype, net = vllm_config.model_config.dtype, recurrence(vllm_config.model_config.hf_text_config)
    refuse(
        {
            f"{NEEDS_FULL['cartridge']}: leave --kv-cartridge out, and unset VLLM_ALLOW_RUNTIME_LORA_UPDATING": (
                policy.settings.cartridge or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
            ),
            f"one cache for all kinds of layers: leave --disable-hybrid-kv-cache-manager out{_or_unset()}": one_cache,
            f"--block-size {cache.block_size} on a CPU: use a multiple of 32": windows and cache.block_size % 32,
            "prefix caching on a CPU, where vLLM stops at the first request: leave --enable-prefix-caching out": (
                has_no_hits(vllm_config)
            ),
            f"{str(dtype).removeprefix('torch.')} on a CPU: use --dtype bfloat16": (
                net == GDN and on_cpu and dtype != torch.bfloat16
            ),
        },
        f"--kv-policy on a model with layers of {stock_kinds}",
    )


def check_loading(vllm_config: Any, policy: Any) -> None:
    """Check that weights are loaded in a way in which a gate can be added.

    Raises:
        ConfigError: they are not.
    """
    cached = policy.gated and vllm_config.load_config.load_format == "ipc_cache"  # it skips where gates are added
    refuse(
        {"weights of a weight cache: leave --load-format ipc_cache out": cached},
        f"--kv-policy {policy.name}, which has a gate,",
    )


def check_speculation(vllm_config: Any, policy: Any) -> None:
    """Check that the policy and the other options work with speculative decoding.

    Raises:
        ConfigError: one line with every reason; or no draft fits into a block.
    """
    if (speculation := vllm_config.speculative_config) is None:
        return
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    model, drafts = vllm_config.model_config, speculation.num_speculative_tokens
    drafting = speculation.method in DRAFT_MODELS
    chunk, cache = scheduler.long_prefill_token_threshold, vllm_config.cache_config
    small = cache.user_specified_block_size and cache.block_size % 32 and vllm_config.device_config.device_type == "cpu"
    refuse(
        {
            f"--kv-policy {policy.name}, since {policy.no_drafts}: choose another policy": policy.no_drafts is not None,
            "models with recurrent layers: leave --speculative-config out": bool(
                {RECURRENT, HYBRID} & {*policy.model.kinds}
            ),
            "prompts as embeddings: leave --enable-prompt-embeds out": model.enable_prompt_embeds,
            f"--tensor-parallel-size {parallel.tensor_parallel_size}: set it to 1": parallel.tensor_parallel_size > 1,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: set it to 1": (
                parallel.pipeline_parallel_size > 1
            ),
            "asynchronous scheduling: leave --async-scheduling out": bool(scheduler.async_scheduling),
            "drafts in parallel: leave parallel_drafting out": speculation.parallel_drafting,
            "cartridges, of which layers that draft have no slots: leave --kv-cartridge out, and unset"
            " VLLM_ALLOW_RUNTIME_LORA_UPDATING": drafting
            and bool(policy.settings.cartridge or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING),
            f"one cache for all kinds of layers: leave --disable-hybrid-kv-cache-manager out{_or_unset()}": (
                drafting and scheduler.disable_hybrid_kv_cache_manager
            ),
            f"--block-size {cache.block_size} on a CPU, where layers draft: use a multiple of 32": (small and drafting),
            f"--long-prefill-token-threshold {chunk}, where vLLM stops at a hit: raise it to more than {drafts}": (
                0 < chunk <= drafts
            ),
        },
        "--speculative-config with a policy",
    )
    slots = vllm_config.cache_config.block_size if vllm_config.cache_config.user_specified_block_size else BLOCK_SLOTS
    PageLayout(1, policy.model.head_dim, model.dtype, slots, 0, drafts, policy.draft_query_bytes(model.dtype))


def has_no_hits(vllm_config: Any) -> bool:
    """Return whether an engine has a prefix cache where vLLM stops at the first request: of Mamba2 layers on a CPU."""
    caches = vllm_config.cache_config.enable_prefix_caching and vllm_config.device_config.device_type == "cpu"
    return bool(caches and recurrence(vllm_config.model_config.hf_text_config) == MAMBA2)


def _head_sizes(model: Any) -> list[int]:
    """Return the head sizes of a model's layers with full attention, of all where layers have no kinds."""
    kinds, sizes = layer_kinds(model.hf_text_config, tokens=model.max_model_len), model.model_arch_config
    layers = [layer for layer, kind in enumerate(kinds) if kind in POLICY_LAYERS and len(kinds) > 1]
    return sorted({sizes[layer].head_size for layer in layers} or {model.get_head_size()})


def _takes_images(model: Any) -> bool:
    """Return whether requests may have images."""
    return model.multimodal_config is not None and model.multimodal_config.get_limit_per_prompt("image") > 0


def _has_other_layers(model: Any) -> bool:
    """Return whether a model has layers with states, or of unknown kinds, that are not served.

    vLLM does not say so of a model that it runs by transformers' code.
    """
    text = model.hf_text_config
    kinds = {*layer_kinds(text)}
    if kinds <= CACHE_SPECS.keys() and (
        recurrence(text) is not None or (text.model_type in RECURRENCES and kinds == {FULL})
    ):
        return False
    return model.is_hybrid or model.has_inner_state or not kinds <= {FULL, *LOCAL_LAYERS}


def _or_unset() -> str:
    """Return the other reason for which vLLM has one cache for all kinds of layers, if it holds."""
    name = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
    return "" if getattr(envs, name) else f", and {name}=0"


def _remedy(feature: Refused, model: Any) -> str:
    """Return what to change about a model with a refused feature."""
    text, kind = model.hf_text_config, REFUSED["sliding-window"]
    if feature is REFUSED["bidirectional images"]:
        return "serve text alone with --language-model-only, or leave --kv-policy out"
    window = sliding_window(text)
    if feature is not kind or not window or kind in refused(text, {}, window):
        return "leave --kv-policy out"
    return f"leave --kv-policy out, or lower --max-model-len to the window of {window} tokens"


def get_kv_cache_specs(install, original, self, *args, **kwargs):
    """Wrap the look-up of all layers' cache specs, which precedes the making of the scheduler."""
    specs_of_workers = original(self, *args, **kwargs)
    if requested(self.vllm_config):
        from kvpop_vllm.vllm_glue.run.cache_groups import with_block_sizes

        policy = engine_policy(self.vllm_config)
        for specs in specs_of_workers:
            check_layers(specs, policy.model, draft_layers(self.vllm_config))
        install(policy)
        if policy.model.kinds or draft_layers(self.vllm_config):
            specs_of_workers = with_block_sizes(specs_of_workers, self.vllm_config)
    return specs_of_workers


def draft_layers(vllm_config: Any) -> bool:
    """Return whether an engine has layers that draft, whose numbers follow those of the model."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method in DRAFT_MODELS


def check_layers(specs: Mapping[str, Any], shape: Any, drafted: bool = False) -> None:
    """Check that every layer with a cache has the one of its kind: the policy's, or vLLM's of windows, chunks and states.

    Args:
        specs: vLLM's cache spec of each layer that has a cache, by the layer's name.
        shape: ``ModelShape`` of the engine.
        drafted: True if layers after those of the model draft, with a dense cache.

    Raises:
        ConfigError: names the layers that bring an attention backend of their own, or that the model does not have.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    kinds = shape.kinds or (FULL,)

    def expected(name: str) -> tuple[str, ...]:
        if drafted and extract_layer_index(name) >= shape.model_layers:
            return ("FullAttentionSpec",)
        return CACHE_SPECS[kinds[extract_layer_index(name) % len(kinds)]]  # Falcon-H1 counts states after all layers

    if foreign := [name for name, spec in specs.items() if type(spec).__name__ not in expected(name)]:
        suffix = f" and {len(foreign) - 1} others" if len(foreign) > 1 else ""
        refuse(
            {f"layers that bring an attention backend of their own ({foreign[0]}{suffix}): leave --kv-policy out": True}
        )
    ours = [name for name, spec in specs.items() if type(spec).__name__ in CACHE_SPECS[FULL]]
    if len(ours) > shape.num_layers:
        refuse(
            {f"attention layers beyond those of the model ({ours[-1]}), such as drafts have: choose other drafts": True}
        )


def check_pipeline(vllm_config: Any, policy: Any) -> None:
    """Check that the policy works with as many pipeline stages.

    Raises:
        ConfigError: it does not.
    """
    from vllm.distributed.utils import get_pp_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    bounds = (get_pp_indices(policy.model.model_layers, stage, stages) for stage in range(stages))
    if policy.unequal and any(first == end for first, end in policy.model.stages(bounds)):
        raise ConfigError(
            f"a stage of --pipeline-parallel-size {stages} has no layer with full attention, and heads of unequal shares: lower it"
        )
    if stages > 1 and policy.draws:  # in model runner V2 only the last rank knows the seeds
        raise ConfigError(f"--kv-policy {policy.name} draws by seeds of requests: set --pipeline-parallel-size 1")


def most_protected(policy: Any, settings: Any) -> bool | int:
    """Return how much of a request may be protected, which vLLM's prefix cache shares block by block.

    Args:
        policy: the policy class.
        settings: a ``PolicySettings``.

    Returns:
        A number of tokens, or True for the whole prompt.

    """
    protects = policy.default_protect if settings.protect_prompt is None else settings.protect_prompt
    protects = protects if settings.max_protect is None else settings.max_protect
    if policy.compresses or settings.cartridge or envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        protects = True  # a prompt until its end, or the slots of cartridges
    return protects


def _platform(vllm_config: Any) -> str:
    """Return the platform's name; device type "cuda" is also used by platforms other than NVIDIA's."""
    kind = vllm_config.device_config.device_type
    if kind != "cuda" or current_platform.is_cuda():
        return kind
    return "rocm" if current_platform.is_rocm() else type(current_platform).__name__


def _cache_dtype(vllm_config: Any) -> str:
    """Return the KV-cache dtype in force.

    A checkpoint's own KV-cache scheme counts only if the user left the choice to it.
    """
    chosen = vllm_config.cache_config.cache_dtype
    quantization = vllm_config.quant_config
    if chosen == "auto" and getattr(quantization, "kv_cache_scheme", None) is not None:
        return "fp8, chosen by the checkpoint"
    return str(chosen)
