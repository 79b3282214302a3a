"""Models and caches that were used in another way before: nothing of it shows in what comes after."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf.prompts import generate, padded
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import borrow_channel
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.layer import check_kernels
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (70, 63)]


def test_a_pass_of_pads_alone(case):
    """The first piece of prompts that are padded to more than they need."""
    model, found = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS)
    inputs = {name: torch.nn.functional.pad(x, (58, 0)) for name, x in padded(PROMPTS).items()}  # 128 columns
    cache = KVpopCache(model, **found.settings)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, prefill_chunk_size=50)
    assert out[:, 128:].tolist() == expected and cache.lengths == [77, 70]


def test_a_first_pass_in_inference_mode(case):
    model, found = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS)
    cache = KVpopCache(model, **found.settings)
    inputs = {name: x[:, :40] for name, x in padded(PROMPTS).items()}
    with torch.inference_mode():
        model(**inputs, past_key_values=cache)
    assert generate(model, cache, PROMPTS) == expected


def test_another_dtype_after_a_reset(case):
    model, found = case("llama", "h2o")
    model = copy.deepcopy(model)
    cache = KVpopCache(model, **found.settings)
    expected = generate(model, cache, PROMPTS)
    cache.reset()
    model.to(torch.bfloat16)
    assert generate(model, cache, PROMPTS) == generate(model, KVpopCache(model, **found.settings), PROMPTS)
    cache.reset()
    model.to(torch.float32)
    assert generate(model, cache, PROMPTS) == expected


def test_gradients_are_refused_before_anything_is_held(case):
    model, found = case("llama", "h2o")
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    cache = KVpopCache(model, **found.settings)
    with pytest.raises(RuntimeError, match="no gradients go through a KVpopCache: call the model under torch.no_grad"):
        model(**padded(PROMPTS), past_key_values=cache)
    assert cache.lengths == []


def test_a_borrowed_channel_is_borrowed_once(case):
    """By a model that has given it up before, and given back to it after passes with the cache, interrupted ones too."""
    model, found = case("qwen3", "dms-query")
    expected = KVpopCache(model, **found.settings)
    tokens = generate(model, expected, PROMPTS)
    dense = model(torch.tensor(PROMPTS[:1])).logits
    lent = copy.deepcopy(model)
    borrow_channel(lent)
    cache = KVpopCache(lent, **found.settings)
    assert generate(lent, cache, PROMPTS) == tokens
    assert all(torch.equal(cache.held(row), expected.held(row)) for row in range(2))
    assert [layer.self_attn.borrowed for layer in lent.get_decoder().layers] == [1.0, 1.0]
    assert torch.equal(model(torch.tensor(PROMPTS[:1])).logits, dense)

    def interrupted(*_):
        raise KeyboardInterrupt

    handle = model.get_decoder().layers[1].self_attn.q_proj.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, KVpopCache(model, **found.settings), PROMPTS)
    handle.remove()
    assert torch.equal(model(torch.tensor(PROMPTS[:1])).logits, dense)


def test_a_model_that_gives_a_channel_up_is_without_it_under_any_policy(case, tmp_path):
    model, _ = case("llama", "h2o")
    model.save_pretrained(tmp_path)
    config = Path(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"kvpop_borrowed_channel": True}))
    marked, settings = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), {"policy": "h2o", "budget": 256}
    lent = copy.deepcopy(model)
    borrow_channel(lent)
    with torch.no_grad():
        logits = [
            each(torch.tensor(PROMPTS[:1]), past_key_values=KVpopCache(each, **settings)).logits
            for each in (marked, lent, model)
        ]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-6)
    assert (logits[0] - logits[2]).abs().max() > 1e-3


def test_an_accelerator_without_kernels_is_refused(case):
    model, found = case("llama", "h2o")
    cache = KVpopCache(model, **found.settings)
    elsewhere = type("Inputs", (), {"shape": (1, 4), "device": torch.device("xpu"), "requires_grad": False})()
    with (
        torch.no_grad(),
        pytest.raises(
            ConfigError, match="no kernels of a fixed-size cache for xpu: move the model to a GPU or the CPU"
        ),
    ):
        cache.begin(model.get_decoder(), elsewhere, None, None)


@pytest.mark.parametrize(
    "dtype, size, capability, message",
    [
        (
            torch.float64,
            64,
            (9, 0),
            "no GPU kernels for keys of torch.float64 and size 64: .* change the model's dtype",
        ),
        (torch.bfloat16, 512, (9, 0), "no GPU kernels for keys of torch.bfloat16 and size 512"),
        (torch.bfloat16, 64, (7, 5), "GPU kernels are for NVIDIA's from compute capability 8.0 on"),
        (torch.float16, 80, (8, 0), None),
    ],
)
def test_what_a_gpu_has_no_kernels_for_is_refused(monkeypatch, dtype, size, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rule = RetentionRule(4, 8, torch.zeros(2, dtype=torch.float64))
    keys = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 5, size))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_kernels(keys, rule)
