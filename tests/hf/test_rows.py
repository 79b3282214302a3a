"""Rows are separate requests, later calls continue the cache, and memory stays constant."""

import pytest
import torch
from engine.matrix import BUDGET
from hf.prompts import generate, padded
from policies.matrix import MILD_SHARES, SHARES
from transformers import AutoModelForCausalLM

from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.cache.step import StepPlan
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.layer import LayerPages, SequenceLengths
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.testing import random_prompt, write_tiny_model

LENGTHS = (70, 9, 63)
POLICIES = ["kvpop", "h2o", "h2o-pyramid", "momentkv", "trimkv", "dms-query", "vase", "rkv", "snapkv", "adakv"]
POLICIES += ["attention-matching", "triattention"]
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Bytes of keys and values of a token: two layers, two heads of 32 float32."""


def alone(model, settings, prompt, new=8):
    """Return the greedy tokens of one row and its cache."""
    cache = KVpopCache(model, **settings)
    return generate(model, cache, [prompt], new)[0], cache


SHORT = [("kvpop", (1, 1, 1)), ("h2o", (1, 64, 2)), ("dms-query", (1, 64, 2))]


@pytest.mark.parametrize("policy, lengths", [*((policy, LENGTHS) for policy in POLICIES), *SHORT], ids=str)
def test_a_row_of_a_padded_batch_is_the_row_alone(case, policy, lengths):
    model, served = case("qwen3", policy)
    prompts, cache = [random_prompt(n, seed=n + i) for i, n in enumerate(lengths)], KVpopCache(model, **served.settings)
    together = generate(model, cache, prompts)
    for row, prompt in enumerate(prompts):
        tokens, row_cache = alone(model, served.settings, prompt)
        assert together[row] == tokens and cache.lengths[row] == row_cache.lengths[0] == len(prompt) + 7
        assert torch.equal(cache.held(row), row_cache.held())
    again = cache.lengths
    cache.reset()
    assert cache.get_seq_length() == 0 and generate(model, cache, prompts[::-1]) == together[::-1]
    assert cache.lengths == again[::-1]


def test_full_keeps_everything_and_has_an_end(tiny):
    _, model = tiny("llama")
    cache = KVpopCache(model, "full", max_length=100)
    prompts = [random_prompt(n, seed=n) for n in (60, 90)]
    assert generate(model, cache, prompts) == generate(model, None, prompts)
    with pytest.raises(ValueError, match="101 tokens are more than max_length 100, which full keeps: raise max_length"):
        generate(model, KVpopCache(model, "full", max_length=100), prompts, new=13)


def turns(model, cache, prompts, cuts, **options):
    """Feed the same texts in several calls of ``generate()``, each with one token that is dropped."""
    width = max(map(len, prompts))
    inputs = padded(prompts)
    for cut in cuts:
        part = {name: x[:, : width - cut] for name, x in inputs.items()}
        model.generate(**part, past_key_values=cache, max_new_tokens=1, do_sample=False, **options)
    return generate(model, cache, prompts)


@pytest.mark.parametrize("policy", ["kvpop", "h2o", "h2o-pyramid", "momentkv", "trimkv", "dms", "dms-late"])
def test_two_turns_are_one_prompt(case, policy):
    model, served = case("llama", policy)
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    at_once, chunked = KVpopCache(model, **served.settings), KVpopCache(model, **served.settings)
    expected = generate(model, at_once, prompts)
    assert turns(model, chunked, prompts, (30, 29, 3)) == expected
    assert all(torch.equal(at_once.held(row), chunked.held(row)) for row in range(3))
    assert chunked.lengths == at_once.lengths


def test_chats_in_a_batch(case):
    """Whole texts with masks, padded on the left, continue if turns have one length, else are refused."""
    model, served = case("qwen3", "kvpop")
    cache, starts = KVpopCache(model, **served.settings), [random_prompt(n, seed=n) for n in (63, 9)]

    def more(texts, lengths):
        return [text + random_prompt(n, seed=len(text)) for text, n in zip(texts, lengths, strict=True)]

    def answered(cache, texts):
        return [text + new for text, new in zip(texts, generate(model, cache, texts, new=4), strict=True)]

    texts = answered(cache, starts)
    differ = "rows whose turns differ in length in caches of their own"
    for lengths, rows_now in (
        ((7, 5), "rows had .66, 10."),
        ((7, 61), "positions do not follow|rows had .66, 66."),
        ((7, 70), "positions do not follow|rows had .57, 66."),
    ):
        with pytest.raises(ValueError, match=f"({rows_now}).*{differ}"):
            generate(model, cache, more(texts, lengths))
    together = answered(cache, more(texts, (7, 7)))
    for row, start in enumerate(starts):
        row_cache = KVpopCache(model, **served.settings)
        assert answered(row_cache, more(answered(row_cache, [start]), [7])) == [together[row]]
        assert torch.equal(row_cache.held(), cache.held(row))


def test_prompts_in_chunks(case):
    """Prompts in chunks give the same tokens, also if a chunk of a row is all pads."""
    model, served = case("qwen3", "kvpop")
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    expected = generate(model, KVpopCache(model, **served.settings), prompts)
    for size in (7, 32, 1):
        assert generate(model, KVpopCache(model, **served.settings), prompts, prefill_chunk_size=size) == expected


def test_sampling_and_several_answers(case):
    model, served = case("llama", "kvpop")
    inputs = {"input_ids": torch.tensor([random_prompt(70)])}
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6}
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(model.generate(**inputs, past_key_values=KVpopCache(model, **served.settings), **options).tolist())
    assert drawn[0] == drawn[1] and len({tuple(row) for row in drawn[0]}) == 3


@pytest.mark.parametrize("policy, options", [("kvpop", {}), ("h2o", {}), ("h2o", {"allocator": "pyramid"})])
def test_memory_is_constant(case, policy, options):
    model, served = case("llama", policy, **options)
    cache, sizes, text = KVpopCache(model, **served.settings), [], random_prompt(40)
    for new in (1, 30, 30):
        text += generate(model, cache, [text], new=new)[0]
        sizes.append(cache.allocated_bytes())
    assert len(set(sizes)) == 1 and cache.dense_bytes() == (len(text) - 1) * TOKEN_BYTES
    slots = sizes[0] / (TOKEN_BYTES + 4 * 8)
    assert BUDGET <= slots < BUDGET + 6 * 64, "pages of 64 slots, those of a state, and small change"
    assert int(cache.held().sum()) <= 4 * BUDGET


@pytest.mark.parametrize("policy", ["kvpop", "h2o", "h2o-pyramid", "trimkv", "dms-query", "dms-late"])
def test_decoding_looks_at_no_tensor(case, monkeypatch, policy):
    """A decode step reads no value from the device "meta", whose tensors have none. Kernels are left out."""
    model, served = case("llama", policy)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(model.config)
    cache, steps = KVpopCache(hollow, **served.settings), []

    def decode_step(q, k, v, pages, table, positions, budgets, **options):
        steps.append((positions, budgets))
        return torch.empty_like(q), None

    monkeypatch.setattr("kvpop_vllm.kernels.ops.decode_step", decode_step)
    with torch.no_grad():
        for length in range(1, 5):
            tokens = torch.zeros(3, 1, dtype=torch.int64, device="meta")
            inputs = {"attention_mask": tokens.expand(3, length), "position_ids": tokens} if length > 1 else {}
            hollow(tokens, past_key_values=cache, **inputs)
    assert cache.lengths == [4, 4, 4] and len(steps) == 8
    assert all(positions is steps[0][0] and budgets.shape == (3, 2) for positions, budgets in steps)


HEADS = {"allocator": str(SHARES)}
OWN = [("kvpop", {}), ("h2o", {}), ("momentkv", {}), ("random", {}), ("kvpop", HEADS), ("h2o-pyramid", {})]
OWN += [("rkv", HEADS), ("triattention", {"allocator": str(MILD_SHARES)})]


@pytest.mark.parametrize("policy, options", OWN)
def test_rows_with_budgets_protection_and_seeds_of_their_own(case, policy, options):
    """Each row equals a cache of one row with its options, also after a reset and with unequal heads."""
    model, served = case("qwen3", policy, **options)
    settings = {name: value for name, value in served.settings.items() if name not in ("budget", "protect_prompt")}
    row_options = {"budget": [40, 72, 56], "protect_prompt": [True, 0, LENGTHS[2] + 25]}  # the last ends in an answer
    if policy == "random":
        row_options["seed"] = [5, 6, 5]
    prompts = [random_prompt(n, seed=n + i) for i, n in enumerate(LENGTHS)]
    cache = KVpopCache(model, **settings | row_options)
    together = generate(model, cache, prompts, 60)
    for row, prompt in enumerate(prompts):
        tokens, alone_cache = alone(
            model, settings | {name: values[row] for name, values in row_options.items()}, prompt, 60
        )
        assert together[row] == tokens and torch.equal(cache.held(row), alone_cache.held())
        protected = (LENGTHS[0], 0, LENGTHS[2] + 25)[row]
        assert cache.protected[row] == protected
        assert cache.held(row).sum() <= 4 * (row_options["budget"][row] + protected)
        assert served.allocator != "uniform" or cache.held(row).sum(-1).max() <= row_options["budget"][row] + protected
    cache.reset()
    assert generate(model, cache, prompts, 60) == together


def test_budgets_of_chunks_stay_on_the_host():
    """Kernels on another device take them from there, so that planning a prefill does not wait for that device."""
    rule = RetentionRule(2, 5, torch.zeros(2, dtype=torch.float64))
    lengths = SequenceLengths([RequestSlots(0, 0, 16, 5)] * 2, torch.device("meta"))
    for budgets in (None, {16: [12, 20]}):
        pages = LayerPages(rule, budgets, torch.empty(2, 2, 1, 32, device="meta"), 1.0, lengths)
        batch = pages.plan_prefill([0, 0], [7, 7], 7, [0, 0]).batch(pages.shares)
        assert batch.chunks.table.device.type == "meta" and batch.chunks.budgets.device.type == "cpu"
        assert batch.chunks.budgets.tolist() == [[16, 16] if budgets is None else [12, 20]] * 2


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "attention-matching"])
def test_a_pass_is_planned_once(tmp_path, monkeypatch, policy):
    """Layers share the plan of a pass, and nothing that grows with the rows is placed again for each of them."""
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model", "llama", layers=4)).eval()
    plans, places = [], []
    for cls, name, calls in ((StepPlan, "__init__", plans), (EqualHeads, "place", places)):
        original = getattr(cls, name)

        def counted(self, *args, original=original, calls=calls, **options):
            calls.append(self)
            return original(self, *args, **options)

        monkeypatch.setattr(cls, name, counted)
    cache = KVpopCache(model, policy, budget=BUDGET)
    generate(model, cache, [random_prompt(n, seed=n) for n in (70, 9)], 5)
    assert len(plans) == len(places) == cache.passes == 5
