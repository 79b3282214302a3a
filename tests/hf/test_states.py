"""Earlier uses of models and caches do not affect later ones."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf.prompts import generate, padded
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import NAME, borrow_channel
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.checks import _warn_of_reference
from kvpop_vllm.hf.layer import check_kernels
from kvpop_vllm.kernels.ops import PromptVotes, Redundancy, RetentionRule
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (70, 63)]


def test_a_pass_of_pads_alone(case):
    """The first chunk of prompts with much padding may be all pads."""
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
    """A borrowed channel is taken out once, also from a model that lacks it already.

    After passes with the cache the model has it back. After an interrupted pass, the model's next pass
    restores it.
    """
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
    interrupt(model, 1, KVpopCache(model, **found.settings))
    assert torch.equal(model(torch.tensor(PROMPTS[:1])).logits, dense)


@pytest.mark.parametrize("layer, held", [(0, False), (1, True)])
def test_an_interrupted_pass(case, layer, held):
    """The model's next pass restores its attention, and a cache without tokens of the pass continues."""
    model, found = case("qwen3", "kvpop")
    dense, cache = generate(model, None, PROMPTS), KVpopCache(model, **found.settings)
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS)
    interrupt(model, layer, cache)
    assert generate(model, None, PROMPTS) == dense and model.config._attn_implementation == "sdpa"
    interrupt(model, layer, KVpopCache(model, **found.settings))
    with pytest.raises(RuntimeError, match="call reset") if held else nullcontext():
        assert generate(model, cache, PROMPTS) == expected
    cache.reset()
    assert generate(model, cache, PROMPTS) == expected and model.config._attn_implementation == "sdpa"


def interrupt(model, layer, cache, error=KeyboardInterrupt):
    """Run a pass that raises before a layer attends; torch then leaves out the hooks behind modules."""

    def stop(*_):
        raise error

    handle = model.get_decoder().layers[layer].self_attn.q_proj.register_forward_hook(stop)
    with pytest.raises(error):
        generate(model, cache, PROMPTS)
    handle.remove()
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_accelerate_put_around(case, when):
    """The cache works in models whose forward accelerate wraps, as it does to spread them over devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, found = case("qwen3", "kvpop")
    expected = [generate(model, cache, PROMPTS, new=3) for cache in (KVpopCache(model, **found.settings), None)]
    spread = copy.deepcopy(model)
    if when == "after":
        KVpopCache(spread, **found.settings)
    told = []

    class Counts(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            told.append(type(module))
            return args, kwargs

    for module in (spread, spread.get_decoder(), *spread.get_decoder().layers):
        hooks.add_hook_to_module(module, Counts())
    for each in (spread, copy.deepcopy(spread)):
        caches = KVpopCache(each, **found.settings), None
        assert [generate(each, cache, PROMPTS, new=3) for cache in caches] == expected
    assert len(told) == 4 * 3 * 4


def test_another_model_inside_of_a_pass(case):
    """Another model may run inside a pass, with and without its own cache, after a layer got its tokens."""
    model, found = case("llama", "h2o")
    guard, own = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS, new=3)
    alone = [generate(guard, cache, PROMPTS, new=2) for cache in (KVpopCache(guard, **own.settings), None)]
    inside = []

    def ask(*_):
        for cache in (KVpopCache(guard, **own.settings), None):
            inside.append(generate(guard, cache, PROMPTS, new=2))

    handle = model.get_decoder().layers[1].register_forward_pre_hook(ask)
    assert generate(model, KVpopCache(model, **found.settings), PROMPTS, new=3) == expected
    handle.remove()
    assert inside == alone * 3


def test_models_are_copied_pickled_and_forgotten(case):
    model, found = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS)
    for copied in (lambda: pickle.loads(pickle.dumps(model)), lambda: copy.deepcopy(model)):
        other = copied()
        assert generate(other, KVpopCache(other, **found.settings), PROMPTS) == expected
        decoder, forward = weakref.ref(other.get_decoder()), other.get_decoder().forward
        gc.disable()
        del other
        assert forward(torch.tensor(PROMPTS[:1])).last_hidden_state.shape[:2] == (1, 70)
        del forward
        gone = decoder() is None
        gc.enable()
        assert gone, "it would stay in memory until Python looks for cycles"


def test_caches_are_copied_and_not_pickled(case):
    model, found = case("llama", "h2o")
    cache = KVpopCache(model, **found.settings)
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(
            ConfigError, match="^a KVpopCache belongs to the model .*: do not pickle it, and copy it by copy.deepcopy"
        ):
            copied(cache)
    tokens = generate(model, cache, PROMPTS)
    again = copy.deepcopy(cache)
    cache.reset()
    assert generate(model, cache, PROMPTS) == tokens and again.lengths == cache.lengths
    assert all(torch.equal(again.held(row), cache.held(row)) for row in range(2))


def test_threads_take_turns(case):
    """A pass during another thread's pass is refused, with or without a cache, and the other continues."""
    model, found = case("llama", "h2o")
    expected = generate(model, KVpopCache(model, **found.settings), PROMPTS)
    inside, go, tokens = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert go.wait(20)

    handle = model.get_decoder().layers[1].register_forward_pre_hook(wait)
    other = threading.Thread(
        target=lambda: tokens.extend(generate(model, KVpopCache(model, **found.settings), PROMPTS))
    )
    other.start()
    try:
        assert inside.wait(20)
        for cache in (KVpopCache(model, **found.settings), None):
            with pytest.raises(RuntimeError, match="another thread has the model in a pass .*: one thread at a time"):
                generate(model, cache, PROMPTS)
            assert cache is None or cache.lengths == []
    finally:
        go.set()
        other.join()
        handle.remove()
    assert tokens == expected == generate(model, KVpopCache(model, **found.settings), PROMPTS)
    interrupt(model, 1, KVpopCache(model, **found.settings))
    after = []
    other = threading.Thread(target=lambda: after.extend(generate(model, KVpopCache(model, **found.settings), PROMPTS)))
    other.start()
    other.join()
    assert after == expected, "the pass that was interrupted here is not running"
    ended = threading.Thread(target=interrupt, args=(model, 1, KVpopCache(model, **found.settings), SystemExit))
    ended.start()
    ended.join()
    assert generate(model, KVpopCache(model, **found.settings), PROMPTS) == expected


def test_slow_kernels_are_said_once(case):
    model = copy.deepcopy(case("llama", "h2o")[0]).to(torch.float16)
    _warn_of_reference.cache_clear()
    with pytest.warns(
        UserWarning, match="slow reference kernels: .* keys of torch.float16 and size 32; .* change the model's dtype"
    ):
        generate(model, KVpopCache(model, "h2o", budget=9), [PROMPTS[0][:12]], new=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, KVpopCache(model, "h2o", budget=9), [PROMPTS[0][:12]], new=2)
        _warn_of_reference.cache_clear()
        bf16 = model.to(torch.bfloat16)
        generate(bf16, KVpopCache(bf16, "h2o", budget=9), [PROMPTS[0][:12]], new=2)


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
    with pytest.raises(ConfigError, match="scores anew in rounds, which only a CPU does: move the model to the CPU"):
        check_kernels(keys, replace(rule, rounds=Redundancy(2)))
    with pytest.raises(ConfigError, match="compresses prompts at their end, which only a CPU does: move the model"):
        check_kernels(keys, replace(rule, votes=PromptVotes(2)))
