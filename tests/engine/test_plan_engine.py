"""`kvpop plan` next to stock engines of models with recurrent layers: bytes of a state, sizes of blocks, number of blocks."""

import json

import pytest
from engine.tiny_engine import one_thread, quick, start, stop
from vllm.v1.kv_cache_interface import MambaSpec

from kvpop_vllm import plan
from kvpop_vllm.cli import make_parser

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
MODELS = {
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-M*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
    },
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        **MAMBA,
    },
    "falcon_h1": {"architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 2, "mamba_d_ssm": 256, **MAMBA},
}
"""Keys of the config of each model type."""


@pytest.mark.parametrize("kind", MODELS)
def test_stock_engines_with_recurrent_layers(tmp_path, kind):
    """The plan's stock row has the engine's blocks, whose size follows from the bytes of a state."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | SIZES | MODELS[kind]))
    words = ["plan", "--model", str(tmp_path), "--kv-memory", "8MiB", "--max-model-len", "1024"]
    model = plan.Planned.of(make_parser().parse_args(words))
    request = model.stock_request()
    with one_thread(), quick():
        llm = start(tmp_path, None, load_format="dummy", kv_cache_memory_bytes=8 << 20, enable_prefix_caching=False)
        try:
            config = llm.llm_engine.vllm_config
            core = llm.llm_engine.engine_core.engine_core
            groups = core.scheduler.kv_cache_config.kv_cache_groups
            assert core.scheduler.kv_cache_config.num_blocks == (8 << 20) // (request.allocated // request.blocks)
            specs = [group.kv_cache_spec for group in groups]
            assert request.blocks == sum(
                -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs
            )
            (states,) = {spec.state_content_size_bytes for spec in specs if isinstance(spec, MambaSpec)}
            assert [kind.state_bytes for kind in model.stock] == [states]
        finally:
            stop(llm)


WINDOWS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "sliding_window": 256,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "architectures": ["Gemma4ForCausalLM"],
}


@pytest.mark.parametrize(
    "sizes, tokens", [((2, 64, 2, 128), (128, 256)), ((2, 96, 2, 128), (128, 128)), ((4, 128, 1, 256), (256, 128))]
)
def test_stock_engines_whose_windows_have_another_shape(tmp_path, sizes, tokens):
    """Blocks of layers with the smaller page have more tokens, or padding if it does not divide the other."""
    names = "num_key_value_heads", "head_dim", "num_global_key_value_heads", "global_head_dim"
    config = {"model_type": "gemma4_text"} | SIZES | WINDOWS | dict(zip(names, sizes, strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--kv-memory", "16MiB", "--max-model-len", "1024"]
    request = plan.Planned.of(make_parser().parse_args(words)).stock_request()
    with one_thread(), quick():
        llm = start(tmp_path, None, load_format="dummy", kv_cache_memory_bytes=16 << 20)
        try:
            cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
            assert {group.kv_cache_spec.block_size for group in cache.kv_cache_groups} == {*tokens}
            assert cache.num_blocks == (16 << 20) // (request.allocated // request.blocks)
        finally:
            stop(llm)
    full, windows = (1024 // size for size in tokens)
    assert request.blocks == full + 2 * min(windows, -(-255 // tokens[1]) + 1)
