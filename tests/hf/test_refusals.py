"""Refusals of a cache, each in one line with the remedy. Nothing falls back to dense attention."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from engine.matrix import BUDGET
from hf.prompts import generate, padded
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.devices import check_kernels, kernel_device
from kvpop_vllm.kernels.ops import PromptVotes, Redundancy, RetentionRule
from kvpop_vllm.model_hook import NAME
from kvpop_vllm.testing import random_prompt, write_random_scorer, write_tiny_model

PROMPT = random_prompt(30)
FULL = ["full_attention"] * 2
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
STREAMING = {"policy": "streaming-llm", "budget": BUDGET}
LISTS = {"policy": "streaming-llm", "budget": [40, 56], "window": 8}


@pytest.fixture
def model(tiny):
    return tiny("llama")[1]


@pytest.fixture
def used(model):
    """Return a cache of two rows with the same 37 tokens each."""
    cache = KVpopCache(model, **STREAMING)
    generate(model, cache, [PROMPT, PROMPT])
    return cache


SETTINGS = [
    ({"policy": "kvpops", "budget": 64}, "unknown policy 'kvpops': policy takes kvpop, "),
    ({"policy": "streaming-llm"}, "policy streaming-llm needs a budget: give budget or compression$"),
    ({"policy": "tova", "budget": 1}, "a budget of 1 is too small .*: raise budget to at least 2$"),
    ({"policy": "h2o", "budget": 64, "compression": 2.0}, "budget and compression both set the budget"),
    ({"policy": "kvpop"}, "policy kvpop needs a scorer: give scorer DIR"),
    ({"policy": "h2o", "budget": 64, "scorer": "x"}, "policy h2o uses no scorer: leave scorer out"),
    ({"policy": "full", "allocator": "pyramid"}, "policy full keeps every token: leave allocator out$"),
    ({"policy": "full", "max_length": 0}, "max_length must be an integer of at least 1, got 0"),
    ({"policy": None, "budget": 64}, "^policy must be the name of one, such as 'kvpop', got None$"),
    (LISTS | {"protect_prompt": [True]}, "budget has 2, protect_prompt has 1: make them equally long"),
    (LISTS | {"budget": []}, "budget has 0: make them equally long"),
    (LISTS | {"budget": [40, "56"]}, "budget must be an integer for each row, got '56'"),
    (LISTS | {"budget": [40, 3]}, "a budget of 3 is too small .* raise budget to at least"),
    (LISTS | {"policy": "snapkv", "allocator": "ada"}, "gives all requests one budget here: leave budget out"),
    (LISTS | {"protect_prompt": [True, "some"]}, "protect_prompt must be all or a number of tokens"),
    (LISTS | {"seed": [1, "2"]}, "seed must be an integer, got '2'"),
    (LISTS | {"seed": None}, "seed must be an integer, got None"),
    ({"policy": "snapkv", "budget": 64, "prompt": 0}, "^prompt must be a number of tokens, for a policy that"),
    ({"policy": "snapkv", "budget": 64, "prompt": "all"}, "^prompt must be a number of tokens, for a policy that"),
    ({"policy": "h2o", "budget": 64, "prompt": 40}, "^prompt must be a number of tokens, for a policy that compresses"),
]


@pytest.mark.parametrize("settings, message", SETTINGS)
def test_settings(model, settings, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        KVpopCache(model, **settings)
    assert "\n" not in str(refusal.value) and "--" not in str(refusal.value)


def test_a_scorer_of_another_model(tiny, tmp_path, model):
    fitting = write_random_scorer(tmp_path / "own", tiny("llama")[0])
    other_scorer = write_random_scorer(tmp_path / "other", write_tiny_model(tmp_path / "model", layers=3))
    with pytest.raises(ConfigError, match="made for a model with num_layers = 3, this one has 2: .* with scorer$"):
        KVpopCache(model, "kvpop", scorer=other_scorer)
    assert KVpopCache(model, "kvpop", scorer=fitting).policy.retention.budget == 64  # a Path is accepted too
    with pytest.raises(ConfigError, match="needs a scorer of kind 'dms', .* holds 'mlstm': use policy kvpop"):
        KVpopCache(model, "dms", scorer=fitting)


def small(kind, **keys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | keys))


@pytest.mark.parametrize(
    "kind, keys, message",
    [
        ("mistral", {"sliding_window": 64}, "layers other than full attention"),
        ("gemma2", {}, "logit soft-capping in attention"),
        ("gemma2", {"layer_types": FULL, "sliding_window": None}, "logit soft-capping in attention"),
        ("bloom", {}, "attention that transformers cannot exchange"),
        ("gpt_neox", {}, "no layers that have a self_attn of the decoder's config"),
        ("minicpm3", LATENT, "latent attention .MLA."),
        ("stablelm", {}, "layers that hand no further arguments on to their attention"),
        ("nemotron", {}, "layers that hand no further arguments on to their attention"),
    ],
)
def test_models(kind, keys, message):
    with pytest.raises(ConfigError, match=f"fixed-size cache cannot serve {kind}, a model with .*{message}"):
        KVpopCache(small(kind, **keys), **STREAMING)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma", "phi3", "olmo2", "mixtral", "granite"])
def test_models_that_are_served(kind):
    """Further models give their dense logits if the cache has room for all tokens."""
    model, inputs = small(kind, sliding_window=None, pad_token_id=0).eval(), torch.tensor([PROMPT]) % 64
    cache = KVpopCache(model, "streaming-llm", budget=64)
    with torch.no_grad():
        logits = [model(part, past_key_values=cache).logits for part in (inputs[:, :28], inputs[:, 28:])]
        torch.testing.assert_close(torch.cat(logits, 1), model(inputs).logits)


def check_served_up_to_32_tokens(model, **options):
    model, inputs = model.eval(), torch.tensor([PROMPT]) % 64
    cache = KVpopCache(model, "streaming-llm", budget=64, **options)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs, past_key_values=cache).logits, model(inputs).logits)
        with pytest.raises(ValueError, match="33 tokens are more than max_length 32, up to which the model attends"):
            model(inputs[:, :3], past_key_values=cache)


def test_a_sliding_window_that_no_text_outgrows():
    """A model with sliding windows is served up to their length, where they hide nothing."""
    check_served_up_to_32_tokens(small("mistral", sliding_window=32, pad_token_id=0), max_length=32)


@pytest.mark.parametrize("kind", ["phi3", "qwen2"])
def test_a_sliding_window_as_long_as_the_models_positions(kind):
    """It is full attention, up to the positions. One token less is refused."""
    windows = {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 32, "pad_token_id": 0}
    check_served_up_to_32_tokens(small(kind, sliding_window=32, **windows))
    if kind == "phi3":  # all its layers have windows; of the other's one has full attention
        with pytest.raises(ConfigError, match="layers other than full attention"):
            KVpopCache(small(kind, sliding_window=31, **windows), **STREAMING)
    else:
        assert KVpopCache(small(kind, sliding_window=31, **windows), **STREAMING).policy.model.layers == (0,)
    assert KVpopCache(small(kind, sliding_window=31, **windows), **STREAMING, max_length=31)


def test_attention_that_is_not_given_the_step(model, monkeypatch):
    """A layer that drops the keyword argument, though its signature takes any, is found during the pass."""
    kind = type(model.get_decoder().layers[0])
    forward = kind.forward
    cache = KVpopCache(model, **STREAMING)
    monkeypatch.setattr(kind, "forward", lambda self, hidden, attend=None, **options: forward(self, hidden, **options))
    with pytest.raises(
        TypeError, match="nor with one, if its layers do not hand keyword arguments on to their attention$"
    ):
        generate(model, cache, [PROMPT])
    assert cache.lengths == [] and model.config._attn_implementation == "sdpa"


def longrope(kind, **keys):
    """Return a model whose rotation changes beyond 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "short_mscale": 1.0, "long_mscale": 1.2}
    sizes = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": rope}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return small(kind, **sizes | {"sliding_window": None} | ids | keys).eval()


TOWERS = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1},
    "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 1},
}
TOWERS["vision_config"] |= {"image_size": 28, "crop_size": 28, "image_token_id": 63}
TOWERS["audio_config"] |= {"nemo_conv_channels": 8, "audio_token_id": 62}


@pytest.mark.parametrize(
    "kind, keys", [("phi3", {}), ("phimoe", {"num_local_experts": 2}), ("phi4_multimodal", TOWERS)]
)
def test_longrope(kind, keys):
    """A rotation that changes within the text is refused. Up to there the model is served, and never densely."""
    model, refused = longrope(kind, **keys), "rotates keys differently in texts of more than 32 tokens .LongRoPE."
    for options in ({}, {"max_length": 33}):
        with pytest.raises(ConfigError, match=f"^{kind} {refused}, .*: set max_length to at most 32$"):
            KVpopCache(model, **STREAMING, **options)
    ids = torch.tensor([PROMPT]) % 61 + 1
    cache = KVpopCache(model, "streaming-llm", budget=64, max_length=32)
    tokens = model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)
    assert tokens.equal(model.generate(ids, max_new_tokens=3, do_sample=False)) and cache.lengths == [32]
    longer, message = torch.cat([ids, ids], 1), "generate.. went on without its KVpopCache, which has seen"
    for text, new, lengths in ((ids, 4, [32]), (longer[:, :33], 1, []), (longer, 1, [])):
        cache.reset()
        with pytest.raises(
            ConfigError, match=f"^{message} {sum(lengths)} of {max(33, text.shape[1])} tokens; .* LongRoPE"
        ):
            model.generate(text, cache=cache, max_new_tokens=new, do_sample=False)
        assert cache.lengths == lengths
    limit = "33 tokens are more than max_length 32, up to which the model attends alike"
    with torch.no_grad(), pytest.raises(ValueError, match=limit):
        model(longer[:, :33], cache=KVpopCache(model, "streaming-llm", budget=64, max_length=32))


def test_windows_and_rotation_that_no_text_outgrows():
    """Windows beyond all positions of the model hide nothing, and need no max_length."""
    assert KVpopCache(small("mistral", sliding_window=129, max_position_embeddings=128), **STREAMING).lengths == []
    short = longrope("phi3", max_position_embeddings=32)
    short.config.rope_parameters["factor"] = 1.0
    assert KVpopCache(short, **STREAMING).lengths == []


@pytest.mark.parametrize("from_step", [0, 2])
def test_a_cache_that_is_set_aside(model, monkeypatch, from_step):
    """Whatever makes generate() go on with another cache, it ends at the next token and not after an answer."""
    prepare, steps = model.prepare_inputs_for_generation, []

    @functools.wraps(prepare)
    def set_aside(ids, **named):
        steps.append(ids.shape[1])
        name = "cache" if "cache" in named else "past_key_values"
        return prepare(ids, **named | ({name: DynamicCache()} if len(steps) > from_step else {}))

    monkeypatch.setattr(model, "prepare_inputs_for_generation", set_aside)
    cache = KVpopCache(model, **STREAMING)
    with pytest.raises(ConfigError, match="^generate.. went on without its KVpopCache"):
        generate(model, cache, [PROMPT], new=9)
    assert len(steps) == from_step + 1 and cache.columns == (30 + from_step - 1 if from_step else 0)


def test_texts_beyond_the_models_positions(recwarn):
    """Each text that grows beyond them is warned of once, also where transformers has given its one reminder."""
    model, ids = small("llama", max_position_embeddings=32, pad_token_id=0), torch.tensor([PROMPT]) % 63 + 1
    message = (
        "a text of 33 tokens goes beyond the model's 32 positions, .*: shorten .* or set max_length if this is meant$"
    )
    cache = KVpopCache(model, "streaming-llm", budget=24)
    for _ in range(2):
        cache.reset()
        with pytest.warns(UserWarning, match=message) as warned:
            model.generate(ids, cache=cache, max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert len([warning for warning in warned if "positions" in str(warning.message)]) == 1
    recwarn.clear()
    allowed = KVpopCache(model, "streaming-llm", budget=24, max_length=64)
    model.generate(ids, cache=allowed, max_new_tokens=9, do_sample=False, eos_token_id=None)
    cache.reset()
    model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert allowed.lengths == [38] and cache.lengths == [32]
    assert not [warning for warning in recwarn if "positions" in str(warning.message)]


class Adapted(nn.Module):
    """Wrapper with the interface of a ``peft.PeftModel``."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model


def test_what_is_no_model(model):
    for wrapper, remedy in (
        (nn.Linear(1, 1), "one of those"),
        (Adapted(model), r"the model in it, model\.get_base_model\(\)"),
        (nn.DataParallel(model), r"the model in it, model\.module"),
        (torch.compile(model), r"the model in it, model\._orig_mod"),
    ):
        kind = type(wrapper).__name__
        with pytest.raises(
            ConfigError, match=f"^{kind} is not a causal language model of transformers: give {remedy}$"
        ):
            KVpopCache(wrapper, **STREAMING)


def test_a_gate_that_borrows_needs_a_model_that_it_is_known_of(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen2", q_heads=2, kv_heads=1)
    scorer = write_random_scorer(tmp_path / "scorer", folder, "dms", reads="query")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match="borrows a channel of the queries, .* models only, not in qwen2"):
        KVpopCache(model, "dms", scorer=scorer)


@pytest.mark.parametrize(
    "options, message, lengths",
    [
        ({"num_beams": 2}, "does not exchange rows: set num_beams to 1", [30] * 2),
        ({"prompt_lookup_num_tokens": 3}, "cannot remove tokens: leave assistant_model and prompt_lookup", []),
        ({"assistant_model": True}, "cannot remove tokens: leave assistant_model and prompt_lookup", []),
    ],
)
def test_ways_of_generating(model, options, message, lengths):
    """Unsupported ways of generating are refused. Beams are first exchanged after the prompt."""
    cache = KVpopCache(model, **STREAMING)
    if "assistant_model" in options:
        options = {"assistant_model": model}
    with pytest.raises(ConfigError, match=message):
        generate(model, cache, [PROMPT], **options)
    assert cache.lengths == lengths


def test_what_is_done_to_caches(used):
    for name, args, message in (
        ("crop", (-1,), "cannot remove tokens: leave crop"),
        ("reorder_cache", (torch.tensor([1, 0]),), "set num_beams to 1"),
        ("batch_repeat_interleave", (2,), "does not repeat rows: repeat the inputs"),
        ("batch_select_indices", (torch.tensor([0]),), "does not choose among rows: make one cache"),
        ("offload", (0,), "leave offloading out"),
    ):
        with pytest.raises(ConfigError, match=message):
            getattr(used, name)(*args)
    assert not used.is_croppable and not used.is_compileable and used.batch_size == 2 and len(used) == 2


def test_texts_that_do_not_go_on(model, used):
    text = used.text[0].tolist() + random_prompt(4)
    longer = [text, text]
    for prompts, message in (
        ([longer[0]], "a batch of 1 rows for a KVpopCache of 2: call reset"),
        ([PROMPT, PROMPT], "(no new tokens|positions do not follow|attention_mask is .* and must be).* reset.. the"),
        ([longer[0], longer[1][:-2]], "attention_mask says .*.37, 35. tokens, .* has seen .37, 37.*reset.. this one"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, used, prompts)
    assert used.lengths == [37, 37] and len(generate(model, used, longer, new=1)) == 2
    with pytest.raises(ValueError, match="a batch of 3 rows for a KVpopCache with lists of 2: give one entry for each"):
        generate(model, KVpopCache(model, **LISTS), [PROMPT] * 3)


@pytest.mark.parametrize("protect", [None, True, 8])
def test_another_text(model, protect):
    """A longer text that does not begin with what the cache has seen is refused, and the cache stays as it is.

    With protected prompts the rest of the text may differ, since it is computed again.
    """
    cache, other_text = KVpopCache(model, **STREAMING, protect_prompt=protect), random_prompt(50, seed=1)
    tokens = PROMPT + generate(model, cache, [PROMPT])[0]
    columns = {None: 37, True: 30, 8: 8}[protect]
    refused = [other_text, [PROMPT[0] ^ 1, *tokens[1:], *other_text]]
    if protect is None:
        refused.append([*tokens[:36], tokens[36] ^ 1, *other_text])
    for text in refused:
        with pytest.raises(
            ValueError, match=f"the text does not begin with the {columns} tokens .* or reset.. the cache"
        ):
            generate(model, cache, [text])
        assert cache.lengths == [37]
    longer = [*tokens[:columns], *other_text]
    fresh = KVpopCache(model, **STREAMING, protect_prompt=protect)
    generate(model, fresh, [PROMPT])
    assert generate(model, cache, [longer]) == generate(model, fresh, [longer])
    cache.reset()
    assert len(generate(model, cache, [other_text])[0]) == 8


def test_a_pass_between_two_calls_may_read_another_token(model):
    """The last token of a call has not been read, so the text may go on otherwise."""
    cache = KVpopCache(model, **STREAMING)
    tokens = PROMPT + generate(model, cache, [PROMPT])[0]
    text = [*tokens[:-1], tokens[-1] ^ 1]
    with torch.no_grad():
        model(torch.tensor([text[-1:]]), past_key_values=cache)
    longer, fresh = [*text, *random_prompt(20, seed=1)], KVpopCache(model, **STREAMING)
    assert generate(model, cache, [longer]) == generate(model, fresh, [longer])
    with pytest.raises(ValueError, match=f"the text does not begin with the {len(longer) + 7} tokens"):
        generate(model, cache, [[*tokens, *longer, *tokens]])


def test_pads_are_no_text(model):
    """Ids of pads do not count, and neither do tokens that no pass has read."""
    cache, inputs = KVpopCache(model, **STREAMING), padded([PROMPT, PROMPT[:20]])
    out = model.generate(**inputs, cache=cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
    out[1, :10], out[:, -1] = 7, 7
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    assert cache.lengths == [34, 24]
    model.generate(out, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert cache.lengths == [39, 29]


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.tensor([[1, 1, 1, 0]]), "zeros after a row's first token: pad on the left"),
        (torch.tensor([[1, 0, 1, 1]]), "zeros after a row's first token: pad on the left"),
        (torch.ones(1, 1, 4, 4), "attention_mask is .1, 1, 4, 4. and must be a tensor of shape .1, 4."),
        ({"full_attention": None}, "attention_mask is a dict and must be a tensor of shape .1, 4."),
    ],
)
def test_masks(model, mask, message):
    cache = KVpopCache(model, **STREAMING)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(torch.tensor([PROMPT[:4]]), attention_mask=mask, past_key_values=cache)
    assert cache.lengths == []


def test_a_row_that_ended_cannot_be_continued_without_its_pads(model):
    cache, inputs = KVpopCache(model, **STREAMING), padded([PROMPT, PROMPT[:20]])
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
    longer = torch.cat([out, out], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, longer.shape[1] - 30), value=1)
    mask[1, 32:35] = 0
    with pytest.raises(ValueError, match="rows that ended early in caches of their own"):
        model.generate(longer, attention_mask=mask, past_key_values=cache, max_new_tokens=1)


def test_another_model_does_not_attend_with_it(tiny, model, used):
    """Another model refuses the cache, whether it has no cache yet or one of its own."""
    folder = tiny("llama")[0]
    strange = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match="attention is not the KVpopCache's: make one with KVpopCache.model"):
        generate(strange, KVpopCache(model, **STREAMING), [PROMPT])
    KVpopCache(strange, **STREAMING)
    with pytest.raises(ConfigError, match="made for another model"):
        generate(strange, used, [PROMPT, PROMPT])


def test_the_model_stays_as_it_is(model):
    before = generate(model, None, [PROMPT])
    for _ in range(3):
        cache = KVpopCache(model, "h2o", budget=20)
        assert generate(model, cache, [PROMPT]) != before
        assert model.config._attn_implementation == "sdpa" and generate(model, None, [PROMPT]) == before
        assert generate(model, DynamicCache(config=model.config), [PROMPT]) == before
    decoder = model.get_decoder()
    assert len(decoder._forward_pre_hooks) == len(decoder._forward_hooks) == 1 and "forward" not in vars(decoder)
    assert all(len(layer.self_attn._forward_pre_hooks) == 1 for layer in decoder.layers)


def test_attention_that_is_exchanged_during_a_pass(model):
    """The tokens of a pass whose attention was exchanged are not returned."""

    def exchange(*args):
        model.config._attn_implementation = "sdpa"

    for layer, message in ((0, "the model attended without"), (1, "layers attended without")):
        handle = model.get_decoder().layers[layer].register_forward_pre_hook(exchange)
        with pytest.raises(RuntimeError, match=f"{message} the KVpopCache: leave"):
            generate(model, KVpopCache(model, **STREAMING), [PROMPT])
        handle.remove()
        assert model.config._attn_implementation == "sdpa" != NAME


def test_gradients_and_attention_weights(model):
    inputs, cache = torch.tensor([PROMPT]), KVpopCache(model, **STREAMING)
    with pytest.raises(RuntimeError, match="no gradients go through a KVpopCache: call the model under torch.no_grad"):
        model(inputs, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="leave output_attentions out"):
            model(inputs, past_key_values=cache, output_attentions=True)
        with pytest.raises(TypeError, match="all inputs of the model but the first are given by name"):
            model.get_decoder()(inputs, torch.ones(1, 30), past_key_values=cache)
    assert cache.lengths == []


@pytest.mark.parametrize(
    "place, changes, message",
    [
        ("xpu", {}, "no kernels of a fixed-size cache for xpu: move the model to a GPU or the CPU"),
        (
            "cuda",
            {"dtype": torch.float64},
            "no GPU kernels for keys of torch.float64 and size 64: .* change the model's",
        ),
        ("cuda", {"size": 1024}, "no GPU kernels for keys of torch.bfloat16 and size 1024"),
        ("cuda", {"capability": (7, 5)}, "GPU kernels are for NVIDIA's from compute capability 8.0 on"),
        (
            "cuda",
            {"rounds": Redundancy(2)},
            "recomputes its scores in rounds, which only a CPU does: move the model to the CPU",
        ),
        (
            "cuda",
            {"compression": PromptVotes(2)},
            "compresses prompts at their end, which only a CPU does: move the model",
        ),
        ("cuda", {"dtype": torch.float16, "size": 80}, None),
    ],
)
def test_devices_without_kernels(model, monkeypatch, place, changes, message):
    settings = {"dtype": torch.bfloat16, "size": 64, "capability": (8, 0)} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: settings["capability"])
    options = {name: settings.get(name) for name in ("rounds", "compression")}
    rule = RetentionRule(4, 8, torch.zeros(2, dtype=torch.float64), **options)
    shape = (1, 2, 5, settings["size"])
    keys = SimpleNamespace(device=torch.device(place), dtype=settings["dtype"], shape=shape, requires_grad=False)
    assert kernel_device(keys, rule) == torch.device("cpu" if message else place)
    with torch.no_grad(), pytest.raises(ConfigError, match=message) if message else nullcontext():
        if place == "xpu":
            KVpopCache(model, **STREAMING).begin(model.get_decoder(), keys, None, None)
        check_kernels(keys, rule)
