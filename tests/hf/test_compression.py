"""`KVpopCache` under policies that compress a prompt at its end: pieces, turns, memory, texts after the prompt."""

import pytest
import torch
from engine.matrix import BUDGET
from hf.prompts import generate, padded

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

POLICIES = ["snapkv", "pyramidkv", "adakv", "attention-matching"]
PROMPT = random_prompt(150)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_in_pieces_and_a_second_turn(case, policy):
    """Pieces of a prompt, shorter than the queries that vote or not, are one prompt. A later text is read again."""
    model, served = case("qwen3", policy)
    at_once = KVpopCache(model, **served.settings)
    expected = generate(model, at_once, [PROMPT], 30)[0]
    assert int(at_once.held().sum()) <= 4 * BUDGET and at_once.lengths == [179] and at_once.get_seq_length() == 0
    for size, options in ((50, {}), (17, {}), (149, {}), (149, {"prompt": 150}), (50, {"prompt": 150})):
        chunked = KVpopCache(model, **served.settings, **options)
        out = model.generate(
            **padded([PROMPT]), past_key_values=chunked, max_new_tokens=30, do_sample=False, prefill_chunk_size=size
        )
        assert out[0, 150:].tolist() == expected and torch.equal(chunked.held(), at_once.held())
    text, fresh = [*PROMPT, *expected, *random_prompt(20, seed=5)], KVpopCache(model, **served.settings)
    assert generate(model, at_once, [text], 10) == generate(model, fresh, [text], 10)
    assert torch.equal(at_once.held(), fresh.held())


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_protect_nothing_of_their_own_are_compressed(case, policy):
    model, served = case("qwen3", policy)
    caches = [KVpopCache(model, **served.settings, protect_prompt=protect) for protect in (None, [None, None])]
    answers = [generate(model, cache, [PROMPT, PROMPT[:100]], 9) for cache in caches]
    assert answers[0] == answers[1] and torch.equal(*(cache.held(1) for cache in caches))
    with pytest.raises(
        ConfigError, match=f"policy {policy} holds the prompt until its end anyway: leave protect_prompt"
    ):
        KVpopCache(model, **served.settings, protect_prompt=[None, True])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_retained_is_freed(case, policy):
    model, served = case("qwen3", policy)
    sizes = []
    for tokens, new in ((150, 1), (150, 3), (10, 3)):
        cache = KVpopCache(model, **served.settings)
        generate(model, cache, [PROMPT[:tokens]], new)
        sizes.append(cache.allocated_bytes())
    assert sizes[0] > sizes[1] == sizes[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_goes_on_after_its_prompt(case, policy):
    """A text whose first 40 tokens are its prompt is a prompt of 40 tokens, and the rest token by token."""
    model, served = case("llama", policy)
    ids, at_once, split = torch.tensor([PROMPT[:90]]), *(KVpopCache(model, **served.settings, prompt=40) for _ in "ab")
    cuts = [ids[:, :40], *ids[:, 40:].split(1, 1)]
    with torch.no_grad():
        expected = model(ids, past_key_values=at_once).logits
        logits = torch.cat([model(part, past_key_values=split).logits for part in cuts], 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(at_once.held(), split.held()) and not bool(at_once.held().all())
