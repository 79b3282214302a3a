"""Models that torch compiles and that have, or had, a cache."""

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


def test_generate_and_dense_passes(plain):
    """A compiled model that had a cache generates and passes densely as without compilation.

    Its graph has a break, and one pass with a cache is interrupted.
    """
    torch._dynamo.reset()
    model, inputs = copy.deepcopy(plain), torch.tensor([PROMPT])
    caches = [KVpopCache(variant, "h2o", budget=BUDGET) for variant in (plain, model, model)]
    expected = generate(plain, caches[0], [PROMPT], new=1)
    model.model.norm.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    model.compile(backend="eager")
    assert generate(model, caches[1], [PROMPT], new=1) == expected

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        dense = plain(inputs).logits
        torch.testing.assert_close(model(inputs, use_cache=False).logits, dense)
        handle = model.model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.compiler.set_stance("force_eager"):
            model(inputs, past_key_values=caches[2])
        handle.remove()
        torch.testing.assert_close(model(inputs, use_cache=False).logits, dense)
    assert model.config._attn_implementation == "sdpa"
    torch._dynamo.reset()
