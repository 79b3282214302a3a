"""Models with layers of several kinds under transformers, judged by the oracle of kinds."""

from __future__ import annotations

import pytest
import torch
from hf.prompts import distinct, generate, padded
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache, local_layers
from kvpop_vllm.model_hook import CACHE_NAME
from kvpop_vllm.supported import EQUAL, FAMILIES, FULL
from kvpop_vllm.testing import KindsOracle, OraclePolicy, write_mixed_model, write_random_scorer

SERVED = [kind for family in FAMILIES if family.state == EQUAL and family.transformers for kind in family.model_types]
BUDGET, TOLERANCE = 56, 1e-5
PROMPTS = [distinct(n) for n in (5, 64, 130, 200)]


@pytest.fixture(scope="module", params=SERVED)
def family(request, tmp_path_factory):
    """Return a model of a family and its oracle."""
    folder = write_mixed_model(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), KindsOracle(folder)


def cached(model, oracle, tmp_path, **options) -> tuple[KVpopCache, OraclePolicy]:
    """Return a cache with a random scorer for the layers of full attention, and the oracle's policy."""
    layers = [i for i, kind in enumerate(oracle.kinds) if kind == FULL]
    scorer = write_random_scorer(tmp_path / "scorer", model.name_or_path, layers=layers, topk=BUDGET - 20)
    return KVpopCache(model, "kvpop", scorer=scorer, **options), OraclePolicy.from_scorer(scorer)


def test_a_padded_batch(family, tmp_path):
    """Log-probabilities of prompts and answers of all rows are the oracle's, with prompts in one pass and in two."""
    model, oracle = family
    for first in (200, 120):
        cache, policy = cached(model, oracle, tmp_path)
        inputs, logits = padded(PROMPTS), []
        with torch.no_grad():
            for part in (slice(0, first), slice(first, 200)):
                if inputs["input_ids"][:, part].numel():
                    mask = inputs["attention_mask"][:, : part.stop]
                    out = model(inputs["input_ids"][:, part], attention_mask=mask, **{CACHE_NAME: cache})
                    logits.append(out.logits)
        rows = torch.cat(logits, 1).double().log_softmax(-1)
        for row, prompt in zip(rows, PROMPTS, strict=True):
            exact = oracle.logprobs(prompt, policy)
            assert float((row[-len(prompt) :] - exact).abs().max()) <= TOLERANCE


def test_answers(family, tmp_path):
    """`generate()` takes the oracle's greedy tokens, and the same after reset()."""
    model, oracle = family
    cache, policy = cached(model, oracle, tmp_path)
    expected = [oracle.greedy(prompt, 10, policy) for prompt in PROMPTS]
    for _ in range(2):
        assert generate(model, cache, PROMPTS, new=10) == expected
        assert len(cache.held()) == oracle.kinds.count(FULL)
        cache.reset()


def test_a_protected_prompt_cannot_be_gone_back_to(family, tmp_path):
    model, oracle = family
    cache, policy = cached(model, oracle, tmp_path, protect_prompt=True)
    prompt = PROMPTS[2]
    (answer,) = generate(model, cache, [prompt], new=80)
    tokens = [*prompt, *answer]
    exact = oracle.logprobs(tokens, policy.protecting(True, len(prompt)))[len(prompt) - 1 : -1]
    assert all(float(row.max() - row[token]) <= 2 * TOLERANCE for row, token in zip(exact, answer, strict=True))
    with pytest.raises(ValueError, match="cannot go back|have given up what they would need to go back"):
        generate(model, cache, [[*tokens, 7]], new=2)


def test_llama_4_is_refused(tmp_path):
    """Its decoder is not found as that of other models is."""
    model = AutoModelForCausalLM.from_pretrained(write_mixed_model(tmp_path, "llama4_text"))
    with pytest.raises(ConfigError, match="cannot serve llama4_text, a model with no layers that have a self_attn"):
        KVpopCache(model, "streaming-llm", budget=BUDGET)


def test_a_gate_that_reads_every_layer_is_refused(tmp_path):
    folder = write_mixed_model(tmp_path / "model", "gemma3_text")
    gate = write_random_scorer(tmp_path / "gate", folder, "trimkv", layers=[2, 5])
    message = "cannot serve gemma3_text, a model with layers without full attention, and the gate of trimkv reads"
    with pytest.raises(ConfigError, match=message):
        KVpopCache(AutoModelForCausalLM.from_pretrained(folder), "trimkv", scorer=gate)


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention"])
def test_long_passes_are_read_in_parts_and_not_held(kind, monkeypatch):
    q, k, v = (torch.randn(2, heads, 300, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    positions = torch.stack([torch.arange(300), torch.arange(300) - 40])
    results = []
    for queries in (1000, 64):
        monkeypatch.setattr(local_layers, "QUERIES", queries)
        layer = local_layers.LocalLayer(kind, 50)
        parts = [layer.attend(q[:, :, :260], k[:, :, :260], v[:, :, :260], 0.3, positions[:, :260], [260, 220])]
        parts.append(layer.attend(q[:, :, 260:], k[:, :, 260:], v[:, :, 260:], 0.3, positions[:, 260:], [40, 40]))
        results.append(torch.cat(parts, 2))
        stored = sum(tensor.untyped_storage().nbytes() for tensor in (layer.k, layer.v))
        assert stored == layer.allocated_bytes() == 2 * 2 * 2 * 49 * 8 * 4
    real = torch.arange(300) >= torch.tensor([[0], [40]])
    assert torch.allclose(*(result.transpose(1, 2)[real] for result in results), atol=1e-6)
