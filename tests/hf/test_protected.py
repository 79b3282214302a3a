"""`KVpopCache` with protected prompts: rows, turns, prompts in chunks, first N tokens of prompts and answers."""

import copy

import pytest
import torch
from hf.prompts import generate

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

LENGTHS = (150, 9, 63)


@pytest.mark.parametrize("policy", ["kvpop", "h2o", "momentkv", "dms-query", "random", "vase", "rkv", "triattention"])
@pytest.mark.parametrize("protect, options", [(True, {}), (70, {}), (5, {"prefill_chunk_size": 16})])
def test_a_row_is_the_row_alone_and_a_turn_is_a_text_of_its_own(case, policy, protect, options):
    """Padded rows protect their own first tokens, also in a second turn and after chunks of pads only."""
    model, served = case("qwen3", policy)
    settings = served.settings | {"protect_prompt": protect}
    prompts, cache = [random_prompt(n, seed=n) for n in LENGTHS], KVpopCache(model, **settings)
    together, held_by_row = generate(model, cache, prompts, 40, **options), [cache.held(row) for row in range(3)]
    protected = [n if protect is True else protect for n in LENGTHS]
    assert cache.protected == protected
    texts = [[*prompt, *middle, *random_prompt(20, seed=5)] for prompt, middle in zip(prompts, together, strict=True)]
    later = generate(model, cache, texts, 30)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone, fresh = KVpopCache(model, **settings), KVpopCache(model, **settings)
        assert generate(model, alone, [prompt], 40)[0] == together[row] and torch.equal(alone.held(), held_by_row[row])
        assert bool(alone.held()[..., : protected[row]].all())
        assert generate(model, alone, [text], 30)[0] == generate(model, fresh, [text], 30)[0] == later[row]
        assert torch.equal(alone.held(), fresh.held()) and torch.equal(alone.held(), cache.held(row))


@pytest.mark.parametrize("policy", ["streaming-llm", "kvpop", "h2o", "momentkv", "dms-query", "random", "vase", "rkv"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}])
def test_protected_tokens_of_answers(case, policy, options):
    """N lies in a row's prompt, beyond another's turn, and in the third's answer. The oracle judges both turns."""
    protect = 80
    model, matrix_case = case("qwen3", policy, protect_prompt=protect)
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    cache = KVpopCache(model, **matrix_case.settings)
    for new, settings in ((40, options), (30, {})):
        answers = generate(model, cache, prompts, new, **settings)
        assert cache.protected == [protect] * 3
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            run = matrix_case.judge.reference([*prompt, *answer[:-1]], prompt=len(prompt)).exact
            assert answer == run.logprobs.argmax(-1)[len(prompt) - 1 :].tolist()
            masks = cache.held(row)
            assert all(torch.equal(masks[layer], run.visible[layer][:, -1]) for layer in range(len(masks)))
        question = random_prompt(20, seed=5)
        prompts = [[*prompt, *answer, *question] for prompt, answer in zip(prompts, answers, strict=True)]


def test_pages_of_protected_tokens_come_as_the_text_grows(case):
    model, matrix_case = case("qwen3", "h2o")
    cache, prompt = KVpopCache(model, **matrix_case.settings, protect_prompt=1000), random_prompt(100)
    answer = generate(model, cache, [prompt], 20)[0]
    before = cache.allocated_bytes()
    assert cache.protected == [1000] and cache.get_seq_length() == 119 and bool(cache.held().all())
    text = [*prompt, *answer]
    continued = generate(model, cache, [text], 30)[0]
    assert cache.lengths == [149] and bool(cache.held().all())
    block = 64 * (2 * 32 * 4 + 8) * cache.policy.model.num_layers * cache.policy.model.num_kv_heads
    assert block <= cache.allocated_bytes() - before < 1.1 * block
    dense = model.generate(torch.tensor([text]), max_new_tokens=30, do_sample=False)
    assert continued == dense[0, len(text) :].tolist()


def test_the_budget_bounds_what_is_not_protected(case):
    model, served = case("qwen3", "h2o")
    budget, prompt = served.settings["budget"], random_prompt(100)
    cache = KVpopCache(model, **served.settings, protect_prompt=True)
    generate(model, cache, [prompt], 2 * budget)
    held_counts = cache.held().sum(-1)
    assert bool((held_counts == 100 + budget - cache.policy.retention.sinks).all())
    assert cache.get_seq_length() == 100 and cache.lengths == [100 + 2 * budget - 1]


def test_a_prompt_in_pieces_and_a_copied_cache(case):
    """The last piece may have one token."""
    model, served = case("llama", "kvpop")
    settings, prompt = served.settings | {"protect_prompt": True}, random_prompt(130)
    at_once = KVpopCache(model, **settings)
    expected = generate(model, at_once, [prompt], 30)
    for size in (50, 43, 129):
        in_pieces = KVpopCache(model, **settings)
        assert generate(model, in_pieces, [prompt], 30, prefill_chunk_size=size) == expected
        assert in_pieces.protected == [130] and torch.equal(in_pieces.held(), at_once.held())
    branch = copy.deepcopy(at_once)
    text = [*prompt, *expected[0], *random_prompt(9, seed=3)]
    assert generate(model, branch, [text], 20) == generate(model, at_once, [text], 20)
    at_once.reset()
    assert generate(model, at_once, [prompt], 30) == expected and at_once.protected == [130]


def test_what_a_longer_pass_follows_must_be_said(case):
    model, served = case("llama", "kvpop")
    cache, ids = KVpopCache(model, **served.settings, protect_prompt=10), torch.tensor([random_prompt(45)])
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        with pytest.raises(
            ValueError, match="^10 columns may follow the 30 .* or the 10 .*: give attention_mask or position_ids"
        ):
            model(ids[:, 30:40], past_key_values=cache)
        model(ids[:, 30:40], past_key_values=cache, attention_mask=torch.ones(1, 40, dtype=torch.int64))
        model(ids[:, 40:], past_key_values=cache, position_ids=torch.arange(40, 45).unsqueeze(0))
    assert (cache.lengths, cache.protected) == ([45], [10])


def test_a_turn_that_fails_before_attention_leaves_the_cache_as_it_was(case):
    model, served = case("qwen3", "kvpop")
    cache, prompt = KVpopCache(model, **served.settings, protect_prompt=True), random_prompt(40)
    answer = generate(model, cache, [prompt], 6)[0]
    text = [*prompt, *answer, *random_prompt(14, seed=6)]
    untouched = copy.deepcopy(cache)

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.model.layers[0].input_layernorm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(model, cache, [text], 6)
    hook.remove()
    assert (cache.lengths, cache.protected, cache.get_seq_length()) == ([45], [40], 40)
    assert generate(model, cache, [text], 6) == generate(model, untouched, [text], 6)
