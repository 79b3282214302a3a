"""Models with layers of several kinds under transformers, judged by the oracle of kinds."""

import functools
import json

import pytest
import torch
import transformers
from hf.prompts import distinct, generate, padded
from hf.test_saved_cache import answered, check_saved
from packaging.version import Version
from transformers import AutoModelForCausalLM

from kvpop_vllm import local_attention
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache, local_layers
from kvpop_vllm.hf.local_layers import LocalLayer, parts_of_pass
from kvpop_vllm.model_hook import CACHE_NAME
from kvpop_vllm.supported import BORROWING, EQUAL, FAMILIES, LOCAL_LAYERS, POLICY_LAYERS, RECURRENCES
from kvpop_vllm.testing import KindsOracle, OraclePolicy, write_mixed_model, write_random_scorer

SERVED = [kind for family in FAMILIES if family.state == EQUAL for kind in family.model_types]
if Version(transformers.__version__) < Version("5.17"):
    SERVED.remove("falcon_h1")  # its layers hand no arguments on to their attention
RECURRENT_MODELS = [kind for kind in SERVED if kind in RECURRENCES]
BUDGET, TOLERANCE = 56, 1e-5
PROMPTS = [distinct(n) for n in (5, 64, 130, 200)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return ``make(kind)``, which returns a model of a family and its oracle, built once."""

    @functools.cache
    def make(kind):
        folder = write_mixed_model(tmp_path_factory.mktemp(kind), kind)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), KindsOracle(folder)

    return make


LIKE_OTHERS = {"qwen3_5_text"}
"""Families whose layers are those of another one, in slow tests only."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ()) for kind in SERVED],
)
def family(request, mixed):
    """Return a model of a family and its oracle."""
    return mixed(request.param)


def layers_of(oracle) -> list[int]:
    """Return the layers that a policy acts on, none if these are all."""
    layers = [i for i, kind in enumerate(oracle.kinds) if kind in POLICY_LAYERS]
    return layers if len(layers) < len(oracle.kinds) else []


def cached(model, oracle, tmp_path, **options) -> tuple[KVpopCache, OraclePolicy]:
    """Return a cache with a random scorer for the layers of full attention, and the oracle's policy."""
    scorer = write_random_scorer(tmp_path / "scorer", model.name_or_path, layers=layers_of(oracle), topk=BUDGET - 20)
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


@pytest.mark.slow
def test_answers(family, tmp_path):
    """`generate()` takes the oracle's greedy tokens, and the same after reset()."""
    model, oracle = family
    cache, policy = cached(model, oracle, tmp_path)
    expected = [oracle.greedy(prompt, 10, policy) for prompt in PROMPTS]
    for _ in range(2):
        assert generate(model, cache, PROMPTS, new=10) == expected
        assert len(cache.held()) == oracle.layers
        cache.reset()


@pytest.mark.parametrize("kind", ["gpt_oss", "granite_swa"])
def test_attention_sinks_are_those_of_the_pass(kind, tmp_path):
    """Sinks that change after a text count in the next one. Without them the answers are others."""
    model = AutoModelForCausalLM.from_pretrained(
        write_mixed_model(tmp_path / "model", kind), dtype=torch.float32
    ).eval()
    cache, answers = KVpopCache(model, "h2o", budget=BUDGET), []
    for change in (0.0, -30.0):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks += change
        model.save_pretrained(tmp_path / "changed")
        answers.append(generate(model, cache, PROMPTS, new=10))
        oracle = KindsOracle(tmp_path / "changed")
        policy = OraclePolicy("mean mass", 0, BUDGET // 2, BUDGET - BUDGET // 2)
        assert answers[-1] == [oracle.greedy(prompt, 10, policy) for prompt in PROMPTS]
        cache.reset()
    assert answers[0] != answers[1]


def test_masks_are_made_once_a_pass(family, tmp_path, monkeypatch):
    """All layers of a kind share the positions and masks of a pass."""
    model, oracle = family
    passes = []
    monkeypatch.setattr(local_layers, "parts_of", lambda *inputs: passes.append(1) or local_attention.parts_of(*inputs))
    cache, _ = cached(model, oracle, tmp_path)
    generate(model, cache, PROMPTS, new=10)
    assert cache.passes > 1 and len(passes) == cache.passes * len(LOCAL_LAYERS & {*oracle.kinds})


def test_a_protected_prompt_cannot_be_gone_back_to(family, tmp_path):
    model, oracle = family
    cache, policy = cached(model, oracle, tmp_path, protect_prompt=True)
    prompt = PROMPTS[2]
    (answer,) = generate(model, cache, [prompt], new=80)
    tokens = [*prompt, *answer]
    exact = oracle.logprobs(tokens, policy.protecting(True, len(prompt)))[len(prompt) - 1 : -1]
    assert all(float(row.max() - row[token]) <= 2 * TOLERANCE for row, token in zip(exact, answer, strict=True))
    with pytest.raises(ValueError, match="have given up what they would need to go back"):
        generate(model, cache, [[*tokens, 7]], new=2)


def test_rows_with_pads_are_refused_where_queries_are_scaled_by_their_column(tmp_path):
    """Llama 4 counts pads as positions there. Rows of equal length, and shorter ones, go through."""
    tuning = {"attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 0.1}
    model = AutoModelForCausalLM.from_pretrained(write_mixed_model(tmp_path, "llama4_text", **tuning))
    cache = KVpopCache(model, "streaming-llm", budget=BUDGET)
    generate(model, cache, [distinct(40), distinct(50)], new=2)
    cache.reset()
    generate(model, cache, [distinct(80), distinct(80)], new=2)
    cache.reset()
    with pytest.raises(
        ValueError, match="scales queries by their column from 64 columns on .* give rows of equal length"
    ):
        generate(model, cache, [distinct(40), distinct(62)], new=3)


def test_protected_prompts_leave_the_columns_of_queries_alone(tmp_path):
    """Llama 4 asks for its queries' columns within a pass. With nothing evicted the logits are those without a cache."""
    tuning = {"attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 0.5}
    model = AutoModelForCausalLM.from_pretrained(write_mixed_model(tmp_path, "llama4_text", **tuning))
    tokens = torch.tensor([distinct(160)])
    cache = KVpopCache(model, "streaming-llm", budget=400, protect_prompt=40)
    with torch.no_grad():
        logits = []
        for first, last in ((0, 120), (120, 160)):
            mask = torch.ones(1, last, dtype=torch.int64)
            logits.append(model(tokens[:, first:last], attention_mask=mask, **{CACHE_NAME: cache}).logits)
        exact = model(tokens, use_cache=False).logits
    assert torch.allclose(torch.cat(logits, 1), exact, atol=1e-4)


def test_a_saved_cache_goes_on(family, tmp_path):
    """Windows, chunks and recurrent states are saved with what the policy's layers hold."""
    model, oracle = family
    cache, _ = cached(model, oracle, tmp_path)
    texts, last = answered(model, cache, PROMPTS[1:3])
    check_saved(model, cache, tmp_path / "saved", texts, last)


@pytest.mark.parametrize("kind", RECURRENT_MODELS)
@pytest.mark.parametrize("policy", ["streaming-llm", "h2o"])
def test_policies_next_to_recurrent_layers(mixed, kind, policy):
    """`generate()` takes the oracle's tokens, with prompts in chunks and two turns of a chat."""
    model, oracle = mixed(kind)
    cache = KVpopCache(model, policy, budget=BUDGET, sinks=4, window=20)
    exact = (
        OraclePolicy.streaming(4, BUDGET - 4, 0)
        if policy == "streaming-llm"
        else OraclePolicy("mean mass", 4, 20, BUDGET - 24)
    )
    (first,) = generate(model, cache, [PROMPTS[3]], new=6, prefill_chunk_size=70)
    assert first == oracle.greedy(PROMPTS[3], 6, exact)
    turn = [*PROMPTS[3], *first, *distinct(30)]
    assert generate(model, cache, [turn], new=6) == [oracle.greedy(turn, 6, exact)]


def test_pads_that_would_enter_a_state_are_refused(mixed):
    model, _ = mixed("nemotron_h")
    cache = KVpopCache(model, "streaming-llm", budget=BUDGET)
    with pytest.raises(ValueError, match="a pass of one column has a pad, which would enter the recurrent states"):
        generate(model, cache, PROMPTS[:2], new=2, prefill_chunk_size=1)
    cache.reset()
    model.config.use_bias = True
    try:
        biased = KVpopCache(model, "streaming-llm", budget=BUDGET)
        with pytest.raises(ValueError, match="pads enter the recurrent states of this model, whose inputs have a bias"):
            generate(model, biased, PROMPTS[:2], new=2)
    finally:
        model.config.use_bias = False
    assert generate(model, cache, PROMPTS[:1], new=2) == generate(model, None, PROMPTS[:1], new=2)


def test_a_state_that_moved_on_before_a_failure_breaks_the_cache(mixed):
    """The first layer is recurrent, so that no layer has attended when the second fails."""
    model, _ = mixed("nemotron_h")
    cache, tokens = KVpopCache(model, "streaming-llm", budget=BUDGET), torch.tensor([PROMPTS[1]])

    def fail(*inputs):
        raise InterruptedError

    handle = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError), torch.no_grad():
        model(tokens, **{CACHE_NAME: cache})
    handle.remove()
    with pytest.raises(RuntimeError, match="was broken off when some layers had it: call reset"), torch.no_grad():
        model(tokens, **{CACHE_NAME: cache})
    cache.reset()
    assert generate(model, cache, [PROMPTS[1]], new=2) == generate(model, None, [PROMPTS[1]], new=2)


@pytest.mark.parametrize("kind", ["trimkv", "dms", "kvzap"])
def test_gates_read_the_input_of_layers_with_full_attention(family, tmp_path, kind):
    """Log-probabilities of a prompt in two passes are the oracle's."""
    model, oracle = family
    layers, tokens = layers_of(oracle), torch.tensor([distinct(200)])
    sizes = {"sinks": 0, "window": 1, "topk": BUDGET - 1} if kind == "trimkv" else {"window": 16, "topk": BUDGET - 20}
    gate = write_random_scorer(tmp_path / "gate", model.name_or_path, kind, layers=layers, **sizes)
    cache = KVpopCache(model, kind, scorer=gate)
    with torch.no_grad():
        logits = [model(part, **{CACHE_NAME: cache}).logits[0] for part in (tokens[:, :120], tokens[:, 120:])]
    exact = oracle.logprobs(tokens[0].tolist(), OraclePolicy.from_scorer(gate))
    assert float((torch.cat(logits).double().log_softmax(-1) - exact).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in BORROWING if kind in SERVED])
def test_a_channel_is_borrowed_in_layers_with_full_attention(mixed, tmp_path, kind):
    """Log-probabilities are the oracle's: of a prompt in two passes, and of as many tokens as there are query heads."""
    model, oracle = mixed(kind)
    gate = write_random_scorer(
        tmp_path, model.name_or_path, "dms", reads="query", evict=0.5, layers=layers_of(oracle), topk=BUDGET - 20
    )
    cache = KVpopCache(model, "dms", scorer=gate)
    for columns in ((0, 120, 200), (0, 4)):
        tokens, cuts = torch.tensor([distinct(columns[-1])]), zip(columns, columns[1:], strict=False)
        with torch.no_grad():
            logits = torch.cat([model(tokens[:, a:b], **{CACHE_NAME: cache}).logits[0] for a, b in cuts])
        exact = oracle.logprobs(tokens[0].tolist(), OraclePolicy.from_scorer(gate))
        assert float((logits.double().log_softmax(-1) - exact).abs().max()) <= TOLERANCE
        cache.reset()


def test_what_every_layer_has_is_refused(tmp_path):
    folder = write_mixed_model(tmp_path / "model", "gemma3_text")
    scorer = write_random_scorer(tmp_path / "scorer", folder, layers=[2, 5])
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ConfigError, match="gemma3_text: layers without full attention cannot have a cartridge, .*: leave it out"
    ):
        KVpopCache(model, "kvpop", scorer=scorer, cartridge=tmp_path)
    model.config.kvpop = json.loads((scorer / "kvpop_config.json").read_text())
    with pytest.raises(ConfigError, match="cannot have a checkpoint that carries scorers, .*: give a scorer"):
        KVpopCache(model, "kvpop")


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention"])
def test_long_passes_are_read_in_parts_and_not_held(kind, monkeypatch):
    q, k, v = (torch.randn(2, heads, 300, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    results = []
    for queries in (1000, 64):
        monkeypatch.setattr(local_attention, "QUERIES", queries)
        layer, outputs = LocalLayer(50), []
        for first, last in ((0, 260), (260, 300)):
            columns, ends = slice(first, last), torch.tensor([last, last - 40])
            parts = parts_of_pass(kind, 50, first, last - first, ends)
            outputs.append(layer.attend(*(x[:, :, columns] for x in (q, k, v)), 0.3, parts))
        results.append(torch.cat(outputs, 2))
        stored = sum(tensor.untyped_storage().nbytes() for tensor in (layer.k, layer.v))
        assert stored == layer.allocated_bytes() == 2 * 2 * 2 * 49 * 8 * 4
    real = torch.arange(300) >= torch.tensor([[0], [40]])
    assert torch.allclose(*(result.transpose(1, 2)[real] for result in results), atol=1e-6)
