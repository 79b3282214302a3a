"""``config.json`` contents of tiny models, refused with a policy for the listed reason or served.

Requests have at most 256 tokens.
"""

LAYERS = 2
FULL = ["full_attention"] * LAYERS


def text(architecture: str, model_type: str, **keys) -> dict:
    """Return a decoder's config with the usual key names."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "bfloat16",
        **keys,
    }


_MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 2,
}
_WHISPER = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")}
_WHISPER |= {name: 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
_PALIGEMMA = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "model_type": "paligemma",
    "dtype": "bfloat16",
    "text_config": text("GemmaForCausalLM", "gemma"),
    "vision_config": _VISION,
}
_MOE = {"num_experts": 2, "num_experts_per_tok": 1}
_JAMBA = _MOE | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_GEMMA3N = {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8}
_GRANITE = {"num_local_experts": 0, "mamba_n_heads": 4, "shared_intermediate_size": 128}
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _EIGHT_BITS, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": _EIGHT_BITS,
}
FP8_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}

LLAMA = text("LlamaForCausalLM", "llama")
_SPARSE = {"use_sparse_attention": True, "sparse_attention_freq": [0, 1]}
_MINIMAX_M3 = {
    "architectures": ["LlamaForCausalLM"],  # the class of its own needs torchvision
    "model_type": "minimax_m3_vl",
    "text_config": text("MiniMaxM3SparseForCausalLM", "minimax_m3_text", sparse_attention_config=_SPARSE),
    "vision_config": {},
}

REFUSED = {
    "deepseek-v3": ("(MLA)", text("DeepseekV3ForCausalLM", "deepseek_v3", **_MLA)),
    "whisper": ("encoder-decoder", text("WhisperForConditionalGeneration", "whisper", d_model=64, **_WHISPER)),
    "bert": ("--runner pooling", text("BertModel", "bert", pad_token_id=0)),
    "bloom": ("ALiBi", text("BloomForCausalLM", "bloom")),
    "gemma2": ("soft-capping", text("Gemma2ForCausalLM", "gemma2", layer_types=FULL, attn_logit_softcapping=50.0)),
    "gemma3n": ("KV sharing", text("Gemma3nForCausalLM", "gemma3n_text", layer_types=FULL, **_GEMMA3N)),
    "paligemma": ("bidirectional image", _PALIGEMMA),
    "qwen3-encoder": ("bidirectional text", text("Qwen3ForCausalLM", "qwen3", is_causal=False)),
    "mamba2": ("Mamba", text("Mamba2ForCausalLM", "mamba2", num_heads=4, state_size=16)),
    "jamba": ("Mamba", text("JambaForCausalLM", "jamba", **_JAMBA)),
    "bamba": ("recurrent", text("BambaForCausalLM", "bamba", attn_layer_indices=[1], mamba_n_heads=4)),
    "lfm2": ("recurrent", text("Lfm2ForCausalLM", "lfm2", layer_types=["conv", FULL[0]])),
    "granite-states": (
        "recurrent",
        text("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["linear_attention"] * 2, **_GRANITE),
    ),
    "mistral": (
        "or lower --max-model-len to the window of 64 tokens",
        text("MistralForCausalLM", "mistral", sliding_window=64),
    ),
    "gemma3": ("sliding-window", text("Gemma3ForCausalLM", "gemma3_text", sliding_window=64)),
    "rswa": ("sliding-window", LLAMA | {"rswa_window": 64}),
    "minimax-m3": ("block-sparse", _MINIMAX_M3),
    "float16": ("--dtype bfloat16 or float32", LLAMA | {"dtype": "float16"}),
    "llama4": ("chunked", text("Llama4ForCausalLM", "llama4_text", attention_chunk_size=64, num_local_experts=2)),
    "fp8-cache": ("--kv-cache-dtype", LLAMA | {"quantization_config": FP8_CACHE}),
    "fp8-modelopt": ("--kv-cache-dtype", LLAMA | {"quantization_config": FP8_MODELOPT}),
    "head-size-48": ("head size 48", LLAMA | {"head_dim": 48}),
}
"""Name -> (text in the refusal, config)."""

SERVED = {
    "llama": LLAMA,
    "qwen3": text("Qwen3ForCausalLM", "qwen3"),
    "qwen2-window-off": text("Qwen2ForCausalLM", "qwen2", use_sliding_window=False, sliding_window=64),
    "mistral-wide-window": text("MistralForCausalLM", "mistral", sliding_window=256),
    "phi3-wide-window": text("Phi3ForCausalLM", "phi3", sliding_window=512),
    "mistral-mixed-windows": text(
        "MistralForCausalLM", "mistral", sliding_window=512, layer_types=[FULL[0], "sliding_attention"]
    ),
    "mistral-mixed": text(
        "MistralForCausalLM", "mistral", sliding_window=255, layer_types=[FULL[0], "sliding_attention"]
    ),
    "mistral-no-window": text("MistralForCausalLM", "mistral", sliding_window=None),
    "granite": text("GraniteForCausalLM", "granite"),
    "granite-sinks": text("GraniteForCausalLM", "granite", layer_types=FULL, sliding_window=None),
    "gpt-oss": text("GptOssForCausalLM", "gpt_oss", layer_types=["sliding_attention", FULL[0]], sliding_window=64),
    "granite-no-states": text("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=FULL, **_GRANITE),
}
