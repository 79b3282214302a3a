"""Earlier uses of models and caches do not affect later ones."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from hf.prompts import generate, padded

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.checks import _warn_of_reference
from kvpop_vllm.model_hook import NAME, borrow_channel
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (70, 63)]


def test_a_first_pass_in_inference_mode(case):
    model, served = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **served.settings), PROMPTS)
    cache = KVpopCache(model, **served.settings)
    inputs = {name: x[:, :40] for name, x in padded(PROMPTS).items()}
    with torch.inference_mode():
        model(**inputs, past_key_values=cache)
    assert generate(model, cache, PROMPTS) == expected


def test_another_dtype_after_a_reset(case):
    model, served = case("llama", "h2o")
    model = copy.deepcopy(model)
    cache = KVpopCache(model, **served.settings)
    expected = generate(model, cache, PROMPTS)
    cache.reset()
    model.to(torch.bfloat16)
    assert generate(model, cache, PROMPTS) == generate(model, KVpopCache(model, **served.settings), PROMPTS)
    cache.reset()
    model.to(torch.float32)
    assert generate(model, cache, PROMPTS) == expected


def test_a_borrowed_channel_is_borrowed_once(case):
    """A borrowed channel is taken out once, also from a model that lacks it already.

    After passes with the cache the model has it back. After an interrupted pass, the model's next pass
    restores it.
    """
    model, served = case("qwen3", "dms-query")
    expected = KVpopCache(model, **served.settings)
    tokens = generate(model, expected, PROMPTS)
    dense = model(torch.tensor(PROMPTS[:1])).logits
    lent = copy.deepcopy(model)
    borrow_channel(lent)
    cache = KVpopCache(lent, **served.settings)
    assert generate(lent, cache, PROMPTS) == tokens
    assert all(torch.equal(cache.held(row), expected.held(row)) for row in range(2))
    assert [layer.self_attn.borrowed for layer in lent.get_decoder().layers] == [1.0, 1.0]
    assert torch.equal(model(torch.tensor(PROMPTS[:1])).logits, dense)
    interrupt(model, 1, KVpopCache(model, **served.settings))
    assert torch.equal(model(torch.tensor(PROMPTS[:1])).logits, dense)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("layer, broken", [(0, False), (1, True)])
def test_an_interrupted_pass(case, layer, broken, error):
    """The model's next pass restores its attention, and a cache without tokens of the pass continues."""
    model, served = case("qwen3", "kvpop")
    dense, cache = generate(model, None, PROMPTS), KVpopCache(model, **served.settings)
    expected = generate(model, KVpopCache(model, **served.settings), PROMPTS)
    interrupt(model, layer, cache, error)
    assert generate(model, None, PROMPTS) == dense and model.config._attn_implementation == "sdpa"
    interrupt(model, layer, KVpopCache(model, **served.settings), error)
    with pytest.raises(RuntimeError, match="call reset") if broken else nullcontext():
        assert generate(model, cache, PROMPTS) == expected
    cache.reset()
    assert generate(model, cache, PROMPTS) == expected and model.config._attn_implementation == "sdpa"


def interrupt(model, layer, cache, error=KeyboardInterrupt):
    """Run a pass that raises before a layer attends. Torch then leaves out the hooks after modules."""

    def stop(*_):
        raise error

    handle = model.get_decoder().layers[layer].self_attn.q_proj.register_forward_hook(stop)
    with pytest.raises(error):
        generate(model, cache, PROMPTS)
    handle.remove()
    assert model.config._attn_implementation == (NAME if error is KeyboardInterrupt else "sdpa")


def test_a_forward_that_accelerate_put_around(case):
    """The cache works in models whose forward accelerate wraps, as it does to spread them over devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, served = case("qwen3", "kvpop")
    expected = [generate(model, cache, PROMPTS, new=3) for cache in (KVpopCache(model, **served.settings), None)]
    spread = copy.deepcopy(model)
    modules = []

    class Counts(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            modules.append(type(module))
            return args, kwargs

    for module in (spread, spread.get_decoder(), *spread.get_decoder().layers):
        hooks.add_hook_to_module(module, Counts())
    for variant in (spread, copy.deepcopy(spread)):
        caches = KVpopCache(variant, **served.settings), None
        assert [generate(variant, cache, PROMPTS, new=3) for cache in caches] == expected
    assert len(modules) == 4 * 3 * 4


def test_another_model_inside_of_a_pass(case):
    """Another model may run inside a pass, with and without its own cache, after a layer got its tokens."""
    model, served = case("llama", "h2o")
    guard, guard_case = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **served.settings), PROMPTS, new=3)
    alone = [generate(guard, cache, PROMPTS, new=2) for cache in (KVpopCache(guard, **guard_case.settings), None)]
    inside = []

    def ask(*_):
        for cache in (KVpopCache(guard, **guard_case.settings), None):
            inside.append(generate(guard, cache, PROMPTS, new=2))

    handle = model.get_decoder().layers[1].register_forward_pre_hook(ask)
    assert generate(model, KVpopCache(model, **served.settings), PROMPTS, new=3) == expected
    handle.remove()
    assert inside == alone * 3


def test_models_are_copied_pickled_and_forgotten(case):
    model, served = case("qwen3", "kvpop")
    expected = generate(model, KVpopCache(model, **served.settings), PROMPTS)
    for copied in (lambda: pickle.loads(pickle.dumps(model)), lambda: copy.deepcopy(model)):
        copied_model = copied()
        assert generate(copied_model, KVpopCache(copied_model, **served.settings), PROMPTS) == expected
        decoder, forward = weakref.ref(copied_model.get_decoder()), copied_model.get_decoder().forward
        gc.disable()
        del copied_model
        assert forward(torch.tensor(PROMPTS[:1])).last_hidden_state.shape[:2] == (1, 70)
        del forward
        gone = decoder() is None
        gc.enable()
        assert gone, "it would stay in memory until Python looks for cycles"


def test_caches_are_copied_and_not_pickled(case):
    model, served = case("llama", "h2o")
    cache = KVpopCache(model, **served.settings)
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(
            ConfigError, match="^a KVpopCache belongs to the model .*: do not pickle it, and copy it by"
        ):
            copied(cache)
    tokens = generate(model, cache, PROMPTS)
    again = copy.deepcopy(cache)
    cache.reset()
    assert generate(model, cache, PROMPTS) == tokens and again.lengths == cache.lengths
    assert all(torch.equal(again.held(row), cache.held(row)) for row in range(2))


def test_threads_take_turns(case):
    """A pass during another thread's pass is refused, with or without a cache, and the other continues."""
    model, served = case("llama", "h2o")
    expected = generate(model, KVpopCache(model, **served.settings), PROMPTS)
    inside, go, tokens, after = threading.Event(), threading.Event(), [], []

    def wait(*_):
        inside.set()
        assert go.wait(20)

    def ask(answer):
        answer.extend(generate(model, KVpopCache(model, **served.settings), PROMPTS))

    handle = model.get_decoder().layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=ask, args=[tokens])
    thread.start()
    try:
        assert inside.wait(20)
        for cache in (KVpopCache(model, **served.settings), None):
            with pytest.raises(RuntimeError, match="another thread has the model in a pass .*: one thread at a time"):
                generate(model, cache, PROMPTS)
            assert cache is None or cache.lengths == []
    finally:
        go.set()
        thread.join()
        handle.remove()
    assert tokens == expected == generate(model, KVpopCache(model, **served.settings), PROMPTS)
    interrupt(model, 1, KVpopCache(model, **served.settings))
    thread = threading.Thread(target=ask, args=[after])
    thread.start()
    thread.join()
    assert after == expected, "the pass that was interrupted here is not running"


def test_slow_kernels_are_said_once(case):
    model = copy.deepcopy(case("llama", "h2o")[0]).to(torch.float16)
    _warn_of_reference.cache_clear()
    message = "slow reference kernels: .* torch.float16 and size 32; .* change the model's"
    with pytest.warns(UserWarning, match=message) as warned:
        for _ in range(2):
            generate(model, KVpopCache(model, "h2o", budget=9), [PROMPTS[0][:12]], new=2)
    assert len([variant for variant in warned if "slow" in str(variant.message)]) == 1
