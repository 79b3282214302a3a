"""Checks of what cannot be served with a policy, made before any weight is loaded.

Each reason names the option to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpop_vllm.config import SUPPORTED_HEAD_SIZES, ConfigError


def check_arguments(args: Any) -> None:
    """Check that no engine argument excludes a policy, before vLLM itself acts on the arguments.

    Args:
        args: a ``vllm.engine.arg_utils.EngineArgs``.

    Raises:
        ConfigError: one line with every reason.
    """
    _raise([text for there, text in _argument_reasons(args) if there])


def check_config(vllm_config: Any) -> None:
    """Check that neither the model nor the resolved settings exclude a policy.

    Args:
        vllm_config: a ``vllm.config.VllmConfig``.

    Raises:
        ConfigError: one line with every reason.
    """
    _raise([text for there, text in _config_reasons(vllm_config) if there])


def _raise(reasons: list[str]) -> None:
    if reasons:
        raise ConfigError("--kv-policy cannot be combined with " + "; nor with ".join(reasons))


def check_prefix_caching(args: Any, policy: Any, settings: Any) -> bool | int:
    """Return how much of a prompt may be protected, which is all that a prefix cache can share.

    Args:
        args: a ``vllm.engine.arg_utils.EngineArgs``.
        policy: the policy class.
        settings: a ``PolicySettings``.

    Returns:
        A number of tokens, or True for the whole prompt.

    Raises:
        ConfigError: prefix caching is asked for and nothing is protected.
    """
    protects = policy.default_protect if settings.protect_prompt is None else settings.protect_prompt
    protects = protects if settings.max_protect is None else settings.max_protect
    protects = True if policy.compresses else protects  # until the prompt's end
    if args.enable_prefix_caching and not protects:
        raise ConfigError(
            "--enable-prefix-caching has nothing to share while prompts are evicted from: add --kv-protect-prompt all, or leave it out"
        )
    return protects


def _argument_reasons(args: Any) -> Iterator[tuple[bool, str]]:
    from vllm import envs

    yield args.speculative_config is not None, "speculative decoding: leave --speculative-config out"
    yield args.kv_transfer_config is not None, "a KV connector: leave --kv-transfer-config out"
    yield bool(args.kv_offloading_size), "KV offloading: leave --kv-offloading-size out"
    yield args.decode_context_parallel_size > 1, "decode context parallelism: set --decode-context-parallel-size 1"
    yield args.prefill_context_parallel_size > 1, "prefill context parallelism: set --prefill-context-parallel-size 1"
    yield args.enable_dbo or args.ubatch_size > 1, "dual-batch overlap: leave --enable-dbo and --ubatch-size out"
    yield bool(args.kv_sharing_fast_prefill), "cross-layer KV sharing: leave --kv-sharing-fast-prefill out"
    rust = envs.VLLM_USE_RUST_FRONTEND
    yield rust, "the Rust front end, which does not check what requests ask for: unset VLLM_USE_RUST_FRONTEND"
    slots = args.block_size
    yield slots is not None and slots % 16 != 0, f"--block-size {slots}: use a multiple of 16"


def _config_reasons(vllm_config: Any) -> Iterator[tuple[bool, str]]:
    model = vllm_config.model_config
    text = model.hf_text_config
    yield model.use_mla, "models with multi-head latent attention (MLA): leave --kv-policy out"
    yield model.is_encoder_decoder, "encoder-decoder models: leave --kv-policy out"
    yield model.runner_type != "generate", f"--runner {model.runner_type}: only text generation has a KV cache to bound"
    yield _has_alibi(model), "models with ALiBi: leave --kv-policy out"
    yield (
        bool(getattr(text, "attn_logit_softcapping", None)),
        "models with attention logit soft-capping: leave --kv-policy out",
    )
    yield _has_sinks(text), "models with attention sinks of their own: leave --kv-policy out"
    yield bool(getattr(text, "num_kv_shared_layers", 0)), "models with cross-layer KV sharing: leave --kv-policy out"
    yield model.is_mm_prefix_lm, "models with bidirectional image attention: leave --kv-policy out"
    yield _looks_ahead(model), "models with bidirectional text attention: leave --kv-policy out"
    yield (
        model.is_hybrid or model.has_inner_state or model.is_attention_free,
        "models with Mamba or other recurrent layers: leave --kv-policy out",
    )
    yield _has_windows(model), "models with sliding-window or chunked layers of their own: leave --kv-policy out"
    dtype = _cache_dtype(vllm_config)
    yield (
        dtype not in ("auto", "float16", "bfloat16", "float32"),
        f"a quantised KV cache ({dtype}): set --kv-cache-dtype to the model's own dtype",
    )
    own = str(model.dtype).removeprefix("torch.")
    yield (
        dtype in ("float16", "bfloat16", "float32") and dtype != own,
        f"a {dtype} KV cache beside a {own} model: leave --kv-cache-dtype out",
    )
    platform = _platform(vllm_config)
    yield (
        platform not in ("cpu", "cuda"),
        f"the {platform} platform yet: serve on a CPU or an NVIDIA GPU, or leave --kv-policy out",
    )
    yield own == "float16" and platform == "cpu", "float16 on a CPU: use --dtype bfloat16 or float32"
    yield vllm_config.kv_transfer_config is not None, "a KV connector: leave --kv-transfer-config out"
    yield (
        vllm_config.speculative_config is not None,
        "speculative decoding, which this checkpoint asks for: serve its base model with --model",
    )
    yield (
        model.get_head_size() not in SUPPORTED_HEAD_SIZES,
        f"head size {model.get_head_size()}: sizes {SUPPORTED_HEAD_SIZES} are supported",
    )


def _platform(vllm_config: Any) -> str:
    """Return the platform's name; device type "cuda" is also used by platforms other than NVIDIA's."""
    from vllm.platforms import current_platform

    kind = vllm_config.device_config.device_type
    if kind != "cuda" or current_platform.is_cuda():
        return kind
    return "rocm" if current_platform.is_rocm() else type(current_platform).__name__


def _has_alibi(model: Any) -> bool:
    return bool(model.uses_alibi) or "Step1ForCausalLM" in model.architectures


def _looks_ahead(model: Any) -> bool:
    return bool(model.is_diffusion) or not getattr(model.hf_text_config, "is_causal", True)


def _has_sinks(text: Any) -> bool:
    if text.model_type in ("granite", "granite_swa", "granitemoe", "granitemoe_swa"):
        # as in vLLM
        return bool(getattr(text, "attention_sinks", getattr(text, "layer_types", None) is not None))
    return text.model_type == "gpt_oss" or any(value and "attention_sink" in name for name, value in vars(text).items())


def _has_windows(model: Any) -> bool:
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    own = model.get_sliding_window() is not None and getattr(text, "use_sliding_window", True)
    chunks = getattr(text, "attention_chunk_size", None) or model.rswa_window
    return bool(own or chunks or any("sliding" in k or "chunked" in k for k in kinds))


def _cache_dtype(vllm_config: Any) -> str:
    """Return the KV-cache dtype in force.

    A checkpoint's own KV-cache scheme counts only if the user left the choice to it.
    """
    chosen = vllm_config.cache_config.cache_dtype
    quantization = vllm_config.quant_config
    if chosen == "auto" and getattr(quantization, "kv_cache_scheme", None) is not None:
        return "fp8, chosen by the checkpoint"
    return str(chosen)


def refuse_streaming_input(policy: str) -> None:
    """Refuse a streaming-input request, which would rewind a sequence to tokens that have been evicted.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"streaming-input requests rewind the sequence, which --kv-policy {policy} cannot: send the whole prompt at once"
    )


def refuse_backend(policy: str, backend: str) -> None:
    """Refuse a layer that got one of vLLM's attention backends, which would keep every token.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"--kv-policy {policy} is in a config that chose the attention backend {backend}: have EngineArgs make the config,"
        " by create_engine_config()"
    )
