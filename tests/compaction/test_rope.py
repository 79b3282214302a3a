"""Turned keys are those that transformers' own rotary embeddings give at other positions."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpop_vllm.config import ConfigError
from kvpop_vllm.rope import check_rope, rope_at, rope_of, turned

DIM = 64
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn, own factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(("start", "shift"), [(0, 1), (17, 1000), (3000, -2936), (5, 0)])
def test_turned_as_transformers(kind, start, shift):
    config = LlamaConfig(
        hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=dict(ROPES[kind])
    )
    rotary = LlamaRotaryEmbedding(config)
    k = torch.randn(1, 2, 50, DIM, generator=torch.Generator().manual_seed(0))

    def keys_at(first):
        cos, sin = rotary(k, (torch.arange(50) + first).unsqueeze(0))
        return apply_rotary_pos_emb(k, k, cos, sin)[1]

    shifted = turned(keys_at(start), shift, rope_of(config.to_dict()))
    assert shifted.dtype == torch.float32
    torch.testing.assert_close(shifted, keys_at(start + shift), rtol=0, atol=2e-3)
    if kind == "yarn":  # the factor on the rotation is not applied again
        torch.testing.assert_close(shifted.norm(dim=-1), keys_at(start).norm(dim=-1))


def test_turned_and_back():
    k = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0))
    forward = turned(k, 4096, ROPES["default"])
    torch.testing.assert_close(turned(forward, -4096, ROPES["default"]), k)
    assert turned(k.bfloat16(), 5, ROPES["default"]).dtype == torch.bfloat16


def test_channels_without_rotation_stay():
    k = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0))
    shifted = turned(k, 7, ROPES["default"] | {"partial_rotary_factor": 0.5})
    assert torch.equal(shifted[..., 32:], k[..., 32:]) and not torch.equal(shifted[..., :32], k[..., :32])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "unheard-of"])
def test_rotations_that_change_are_refused(kind):
    with pytest.raises(ConfigError, match=f"type '{kind}' change"):
        turned(torch.zeros(1, DIM), 1, {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


def test_layers_that_differ_are_refused():
    with pytest.raises(ConfigError, match="of their own each"):
        rope_of({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}})


@pytest.mark.parametrize(
    "kind, options, unrotated",
    [
        ("smollm3", {"num_hidden_layers": 8}, [3, 7]),  # the config's own default
        ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]}, [0, 2]),
        ("llama4_text", {"num_hidden_layers": 4, "attn_temperature_tuning": False}, [3]),
        ("llama", {"num_hidden_layers": 4}, []),
    ],
)
def test_layers_without_rotation_stay(kind, options, unrotated):
    """Which layers rotate is what transformers resolves. The others' keys are as they were."""
    rope = rope_of(AutoConfig.for_model(kind, **options).to_dict())
    assert rope.get("unrotated_layers", []) == unrotated
    check_rope(rope, "this model")
    k = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0))
    stays = [i for i in range(options["num_hidden_layers"]) if torch.equal(turned(k, 7, rope_at(rope, i)), k)]
    assert stays == unrotated
    assert rope_of({"rope_parameters": rope}) == rope


@pytest.mark.parametrize("layers", [3, [True], [-1], ["1"], {}])
def test_lists_of_layers_are_checked(layers):
    with pytest.raises(ConfigError, match="not a list of layers: write the file again"):
        check_rope(ROPES["default"] | {"unrotated_layers": layers}, "this file")


@pytest.mark.parametrize(
    "kind, options",
    [
        ("llama4_text", {"attn_temperature_tuning": True}),
        ("llama", {"rope_parameters": ROPES["yarn"] | {"llama_4_scaling_beta": 0.1}}),
    ],
)
def test_queries_scaled_by_their_position_are_refused(kind, options):
    """Logits depend on more than the distance of query and key there."""
    with pytest.raises(ConfigError, match="queries are scaled by their position"):
        check_rope(rope_of(AutoConfig.for_model(kind, **options).to_dict()), "this model")
