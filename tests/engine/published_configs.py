"""Contents of the ``config.json`` of published models, cut to the keys that say a shape.

Names of architectures that vLLM 0.32 has dropped, or whose classes need torchvision, are replaced by Llama's: vLLM
reads a shape from the model type and the other keys.
"""

CONFIGS = {
    "falcon-7b": dict(
        architectures=["FalconForCausalLM"],
        model_type="falcon",
        alibi=False,
        hidden_size=4544,
        multi_query=True,
        new_decoder_architecture=False,
        num_attention_heads=71,
        num_hidden_layers=32,
        vocab_size=65024,
    ),  # fmt: skip
    "falcon-40b": dict(
        architectures=["FalconForCausalLM"],
        model_type="falcon",
        alibi=False,
        hidden_size=8192,
        new_decoder_architecture=True,
        num_attention_heads=128,
        num_hidden_layers=60,
        num_kv_heads=8,
        vocab_size=65024,
    ),  # fmt: skip
    "falcon-old": dict(
        architectures=["FalconForCausalLM"],
        model_type="falcon",
        alibi=False,
        hidden_size=2048,
        multi_query=False,
        new_decoder_architecture=False,
        num_attention_heads=32,
        num_hidden_layers=24,
        vocab_size=50304,
    ),  # fmt: skip
    "refined-web-7b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="RefinedWebModel",
        alibi=False,
        hidden_size=4544,
        multi_query=True,
        n_head=71,
        n_layer=32,
        vocab_size=65024,
    ),  # fmt: skip
    "refined-web-40b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="RefinedWeb",
        alibi=False,
        hidden_size=8192,
        n_head=128,
        n_head_kv=8,
        n_layer=60,
        vocab_size=65024,
    ),  # fmt: skip
    "starcoder": dict(
        architectures=["GPTBigCodeForCausalLM"],
        model_type="gpt_bigcode",
        multi_query=True,
        n_embd=6144,
        n_head=48,
        n_layer=40,
        n_positions=8192,
        vocab_size=49152,
    ),  # fmt: skip
    "bigcode-mha": dict(
        architectures=["GPTBigCodeForCausalLM"],
        model_type="gpt_bigcode",
        multi_query=False,
        n_embd=768,
        n_head=12,
        n_layer=12,
        n_positions=1024,
        vocab_size=49152,
    ),  # fmt: skip
    "mpt-7b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="mpt",
        attn_config=dict(alibi=True, attn_impl="torch"),
        d_model=4096,
        n_heads=32,
        n_layers=32,
        max_seq_len=2048,
        vocab_size=50432,
    ),  # fmt: skip
    "mpt-rope": dict(
        architectures=["LlamaForCausalLM"],
        model_type="mpt",
        attn_config=dict(alibi=False, kv_n_heads=8),
        d_model=4096,
        n_heads=32,
        n_layers=32,
        max_seq_len=2048,
        vocab_size=50432,
    ),  # fmt: skip
    "dbrx": dict(
        architectures=["DbrxForCausalLM"],
        model_type="dbrx",
        attn_config=dict(clip_qkv=8, kv_n_heads=8, model_type="", rope_theta=500000),
        d_model=6144,
        n_heads=48,
        n_layers=40,
        max_seq_len=32768,
        vocab_size=100352,
        ffn_config=dict(ffn_hidden_size=10752, model_type="", moe_num_experts=16, moe_top_k=4),
    ),  # fmt: skip
    "chatglm3": dict(
        architectures=["ChatGLMModel"],
        model_type="chatglm",
        hidden_size=4096,
        kv_channels=128,
        multi_query_attention=True,
        multi_query_group_num=2,
        num_attention_heads=32,
        num_layers=28,
        padded_vocab_size=65024,
        seq_length=8192,
    ),  # fmt: skip
    "step3p5": dict(
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        hidden_size=2048,
        head_dim=128,
        num_attention_heads=32,
        num_attention_groups=4,
        num_hidden_layers=4,
        vocab_size=128,
    ),  # fmt: skip
    "gpt2": dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        n_embd=768,
        n_head=12,
        n_layer=12,
        n_positions=1024,
        n_ctx=1024,
        vocab_size=50257,
    ),  # fmt: skip
    "gptj": dict(
        architectures=["GPTJForCausalLM"],
        model_type="gptj",
        n_embd=4096,
        n_head=16,
        n_layer=28,
        n_positions=2048,
        rotary_dim=64,
        vocab_size=50400,
    ),  # fmt: skip
    "gpt-neox": dict(
        architectures=["GPTNeoXForCausalLM"],
        model_type="gpt_neox",
        hidden_size=2048,
        num_attention_heads=16,
        num_hidden_layers=24,
        max_position_embeddings=2048,
        vocab_size=50304,
    ),  # fmt: skip
    "opt": dict(
        architectures=["OPTForCausalLM"],
        model_type="opt",
        hidden_size=768,
        num_attention_heads=12,
        num_hidden_layers=12,
        max_position_embeddings=2048,
        vocab_size=50272,
        word_embed_proj_dim=768,
    ),  # fmt: skip
    "bloom": dict(
        architectures=["BloomForCausalLM"],
        model_type="bloom",
        n_embed=1024,
        num_attention_heads=16,
        n_layer=24,
        vocab_size=250880,
    ),  # fmt: skip
    "phi": dict(
        architectures=["PhiForCausalLM"],
        model_type="phi",
        hidden_size=2560,
        num_attention_heads=32,
        num_hidden_layers=32,
        max_position_embeddings=2048,
        vocab_size=51200,
    ),  # fmt: skip
    "llama-1": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=4096,
        num_attention_heads=32,
        num_hidden_layers=32,
        vocab_size=32000,
    ),  # fmt: skip
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=1024,
        head_dim=128,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_hidden_layers=28,
        vocab_size=151936,
    ),  # fmt: skip
    "gemma": dict(
        architectures=["GemmaForCausalLM"],
        model_type="gemma",
        hidden_size=2048,
        head_dim=256,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_hidden_layers=18,
        vocab_size=256000,
    ),  # fmt: skip
    "gemma3-12b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="gemma3",
        text_config=dict(
            hidden_size=3840,
            intermediate_size=15360,
            model_type="gemma3_text",
            num_attention_heads=16,
            num_hidden_layers=48,
            num_key_value_heads=8,
            sliding_window=1024,
        ),
        vision_config=dict(model_type="siglip_vision_model"),
    ),  # fmt: skip
    "gemma3-4b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="gemma3",
        text_config=dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34),
        vision_config=dict(model_type="siglip_vision_model"),
    ),  # fmt: skip
    "llava": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llava",
        text_config=dict(model_type="llama", vocab_size=32064, max_position_embeddings=4096),
        vision_config=dict(model_type="clip_vision_model", hidden_size=1024, num_attention_heads=16),
    ),  # fmt: skip
    "mistral3": dict(
        architectures=["LlamaForCausalLM"],
        model_type="mistral3",
        text_config=dict(
            model_type="mistral",
            hidden_size=5120,
            head_dim=128,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=40,
            vocab_size=131072,
        ),
        vision_config=dict(model_type="pixtral"),
    ),  # fmt: skip
    "qwen3-vl": dict(
        architectures=["LlamaForCausalLM"],
        model_type="qwen3_vl",
        text_config=dict(
            model_type="qwen3_vl_text",
            hidden_size=2560,
            head_dim=128,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=36,
            vocab_size=151936,
        ),
        vision_config=dict(model_type="qwen3_vl"),
    ),  # fmt: skip
    "starcoder2": dict(
        architectures=["Starcoder2ForCausalLM"],
        model_type="starcoder2",
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=2,
        num_hidden_layers=30,
        vocab_size=49152,
    ),  # fmt: skip
    "mixtral": dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
        vocab_size=32000,
    ),  # fmt: skip
    "nemotron": dict(
        architectures=["NemotronForCausalLM"],
        model_type="nemotron",
        hidden_size=3072,
        head_dim=128,
        num_attention_heads=24,
        num_key_value_heads=8,
        num_hidden_layers=32,
        vocab_size=256000,
    ),  # fmt: skip
    "cohere": dict(
        architectures=["CohereForCausalLM"],
        model_type="cohere",
        hidden_size=8192,
        num_attention_heads=64,
        num_hidden_layers=40,
        vocab_size=256000,
    ),  # fmt: skip
    "glm": dict(
        architectures=["GlmForCausalLM"],
        model_type="glm",
        hidden_size=4096,
        head_dim=128,
        num_attention_heads=32,
        num_key_value_heads=2,
        num_hidden_layers=40,
        vocab_size=151552,
    ),  # fmt: skip
    "nemotron-h-8b": dict(
        architectures=["NemotronHForCausalLM"],
        model_type="nemotron_h",
        hidden_size=4096,
        head_dim=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=52,
        vocab_size=131072,
    ),  # fmt: skip
    "granite-4-h-small": dict(
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        hidden_size=4096,
        layer_types=[*(["mamba"] * 5), *(["attention", *(["mamba"] * 9)] * 3), "attention", *(["mamba"] * 4)],
        mamba_n_heads=128,
        mamba_d_state=128,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=40,
        position_embedding_type="nope",
        vocab_size=100352,
    ),  # fmt: skip
    "falcon-h1-34b": dict(
        architectures=["FalconH1ForCausalLM"],
        model_type="falcon_h1",
        hidden_size=5120,
        head_dim=128,
        mamba_d_ssm=4096,
        mamba_d_head=128,
        mamba_n_heads=32,
        mamba_n_groups=2,
        num_attention_heads=20,
        num_key_value_heads=4,
        num_hidden_layers=72,
        vocab_size=261120,
    ),  # fmt: skip
    "gemma-4-31b": dict(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        hidden_size=5376,
        attention_k_eq_v=True,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=0,
        layer_types=[*(["sliding_attention"] * 5), "full_attention"] * 10,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        num_hidden_layers=60,
        sliding_window=1024,
        vocab_size=262144,
    ),  # fmt: skip
    "qwen3-next-80b": dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        hidden_size=2048,
        head_dim=256,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_hidden_layers=48,
        partial_rotary_factor=0.25,
        vocab_size=151936,
    ),  # fmt: skip
    "qwen3.5-35b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="qwen3_5_moe_text",
        hidden_size=2048,
        head_dim=256,
        mamba_ssm_dtype="float32",
        num_attention_heads=16,
        num_key_value_heads=2,
        num_hidden_layers=40,
        vocab_size=248320,
    ),  # fmt: skip
}
"""Name -> config. Of the first twelve, each says the number of KV heads in a way of its own."""
