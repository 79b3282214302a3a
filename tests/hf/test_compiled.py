"""Models that torch compiles, which have had caches or have one."""

from __future__ import annotations

import copy

import pytest
import torch
from engine.matrix import BUDGET
from hf.prompts import generate
from transformers import AutoModelForCausalLM

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt, write_tiny_model

PROMPT = random_prompt(BUDGET + 5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path_factory.mktemp("model"), layers=1)).eval()


@pytest.fixture
def model(plain):
    """A copy, of which nothing is compiled yet, and each function only once: what comes otherwise is done in eager mode."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield copy.deepcopy(plain)
    torch._dynamo.reset()


def test_generate(plain, model):
    expected = generate(plain, KVpopCache(plain, "h2o", budget=BUDGET), [PROMPT], new=2)
    model.model.compile(backend="eager")
    assert generate(model, KVpopCache(model, "h2o", budget=BUDGET), [PROMPT], new=2) == expected
    model.model._compiled_call_impl = None
    model.compile(backend="eager")
    assert generate(model, KVpopCache(model, "h2o", budget=BUDGET), [PROMPT], new=2) == expected


def test_dense_passes(plain, model):
    """Of a model that has had a cache, with a break in the graph; after a pass with a cache was interrupted, too."""
    inputs, cache = torch.tensor([PROMPT]), KVpopCache(model, "h2o", budget=BUDGET)
    model.model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="eager")

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = plain(inputs).logits
        torch.testing.assert_close(compiled(inputs, use_cache=False).logits, expected)
        handle = model.model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(inputs, past_key_values=cache)
        handle.remove()
        torch.testing.assert_close(compiled(inputs, use_cache=False).logits, expected)
    assert model.config._attn_implementation == "sdpa"
