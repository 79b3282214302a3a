"""The attention hook leaves models unchanged if nothing is evicted, and applies the sparse mask otherwise."""

from __future__ import annotations

import json

import pytest
import torch
from kernels.naive import kept_sets, masked_attention
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sparse_attention import Sparse, dense_attention
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.model_shape import positions_of
from kvpop_vllm.roles import Retention
from kvpop_vllm.supported import RESCALED_LOGITS
from kvpop_vllm.testing import write_tiny_model

ROLES = Retention(17, 2, 6)


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param, hidden=128)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 256, (2, 80), generator=torch.Generator().manual_seed(1))


def scores(layer, k, v, window):
    return (k[..., 0] + layer).float(), torch.tensor([-0.01, -0.002])


def test_nothing_evicted_equals_transformers(folder, tokens):
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(tokens)
    model = load_model(folder, torch.float32)
    for attend in (Dense(), Sparse(scores, Retention(108, 2, 6)), lambda layer, *qkvs: dense_attention(*qkvs)[0]):
        torch.testing.assert_close(model(tokens, attend=attend).logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_the_sparse_pass_equals_a_masked_model(folder, tokens):
    """Layers attend to the sets found by a sort for every query, inside the whole model."""

    def naive(layer, q, k, v, scale):
        score, log_gamma = scores(layer, k, v, 6)
        priority = score.double() - torch.arange(80) * log_gamma.double()[:, None]
        return masked_attention(q, k, v, kept_sets(priority, 2, 6, 9), scale)[0]

    model, passes = load_model(folder, torch.float32), []
    actual = model(tokens, attend=Sparse(scores, ROLES, passes.append)).logits
    torch.testing.assert_close(actual, model(tokens, attend=naive).logits, rtol=1e-4, atol=1e-5)
    assert [p.layer for p in passes] == [0, 1] and passes[0].k.shape == (2, 2, 80, passes[0].k.shape[-1])
    assert (actual - model(tokens, attend=Dense()).logits).abs().max() > 1e-3


def test_scores_see_detached_keys_and_values(folder, tokens):
    grads = []

    def watched(layer, k, v, roles):
        grads.append((k.requires_grad, v.requires_grad, roles))
        return scores(layer, k, v, roles)

    load_model(folder, torch.float32)(tokens, attend=Sparse(watched, ROLES)).logits.sum().backward()
    assert grads == [(False, False, ROLES)] * 2


def test_what_would_be_ignored_is_refused(folder, tokens, tmp_path):
    model = load_model(folder, torch.float32)
    with pytest.raises(TypeError, match="attend="):
        model(tokens)
    mask = torch.ones_like(tokens)
    model(tokens, attention_mask=mask, attend=Dense())
    mask[0, :3] = 0
    with pytest.raises(ConfigError, match="padding cannot be masked out"):
        model(tokens, attention_mask=mask, attend=Dense())
    with pytest.raises(ConfigError, match="has no config.json"):
        load_model(tmp_path)


def test_positions_of_stretched_rotations():
    def of(**rope):
        return positions_of(LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_theta": 1e4, **rope}))

    assert of(rope_type="default") == 4096
    assert of(rope_type="linear", factor=4.0) == of(rope_type="dynamic", factor=4.0) == 16384
    assert of(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048) == 8192
    assert of(rope_type="yarn", factor=1.5, original_max_position_embeddings=2048) == 4096


@pytest.mark.parametrize("name", RESCALED_LOGITS)
def test_models_that_rescale_their_logits_are_refused(tmp_path, name):
    path = write_tiny_model(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {name: 1.0}))
    load_model(tmp_path)
    path.write_text(json.dumps(config | {name: 30.0}))
    with pytest.raises(ConfigError, match=f"rescales its logits .{name}., .*: choose another model"):
        load_model(tmp_path)


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("config", [GraniteConfig(**SHAPE, logits_scaling=8.0), CohereConfig(**SHAPE)])
def test_models_whose_library_rescales_their_logits_are_refused(tmp_path, config):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rescales its logits"):
        load_model(tmp_path)


def test_a_models_own_windows_are_refused(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, **windows)).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match="layer 0 of the model has a sliding window of 16 tokens, and would be treated as full_attention",
    ):
        load_model(tmp_path, torch.float32)(torch.zeros(1, 40, dtype=torch.long), attend=Dense())
