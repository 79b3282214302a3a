"""`KVpopCache` with cartridges keeps the tokens of the oracle, and answers as it says."""

import copy

import pytest
import torch
from distill.byte_tokenizer import BOS, CHAT, byte_tokenizer
from engine.test_cartridges import SLOTS, CartridgeJudge, unrotated, write
from hf.prompts import generate
from transformers import AutoModelForCausalLM

from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

LENGTHS = (150, 1, 63)
CASES = {
    "kvpop": ("qwen3", "kvpop", {}),
    "h2o": ("llama", "h2o", {}),
    "protected": ("qwen3", "kvpop", {"protect_prompt": True}),
    "gate": ("llama", "dms-query", {"protect_prompt": 20}),
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    return lambda kind, *names: [write(tmp_path_factory.mktemp("c") / name, tiny(kind)[0], name) for name in names]


@pytest.mark.parametrize("names", [("biased",), ("plain", "biased")])
@pytest.mark.parametrize("name", CASES)
def test_rows_after_cartridges_are_the_oracles(case, folders, name, names):
    """Padded rows of several lengths share the slots. A copy goes on, and so does a second batch."""
    kind, policy, options = CASES[name]
    model, matrix_case = case(kind, policy, **options)
    cartridges = folders(kind, *names)
    judge = CartridgeJudge(matrix_case, cartridges, matrix_case.judge.protect)
    prompts, slots = [random_prompt(n, seed=n) for n in LENGTHS], sum(SLOTS[cartridge] for cartridge in names)
    cache = KVpopCache(model, **matrix_case.settings, cartridge=cartridges)
    answers = generate(model, cache, prompts, 30)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = [*prompt[:1] * slots, *prompt, *answer]
        run = judge.reference(tokens[:-1], prompt=slots + len(prompt)).exact
        best = run.logprobs.argmax(-1)[slots + len(prompt) - 1 :].tolist()
        assert answer == best
        masks = cache.held(row)
        assert all(torch.equal(masks[i], run.visible[i][:, -1]) for i in range(len(masks)))
    cache.reset()
    assert generate(model, cache, prompts, 30) == answers
    alone = KVpopCache(model, **matrix_case.settings, cartridge=cartridges)
    assert generate(model, alone, prompts[:1], 30) == answers[:1]
    branch = copy.deepcopy(alone)
    text = [*prompts[0], *answers[0], *random_prompt(9, seed=2)]
    assert generate(model, branch, [text], 8) == generate(model, alone, [text], 8)


def test_a_turn_after_columns_that_hold_only_pads_of_a_row(case, folders):
    """Its text is read again after the slots."""
    model, matrix_case = case("qwen3", "h2o")
    settings = matrix_case.settings | {"protect_prompt": [0, True], "cartridge": folders("qwen3", "biased")}
    turns, caches = [random_prompt(10), random_prompt(2, seed=1)], [KVpopCache(model, **settings) for _ in "ab"]
    answers = generate(model, caches[0], turns, 5)
    later = [[*turn, *answer, *random_prompt(4, seed=2)] for turn, answer in zip(turns, answers, strict=True)]
    assert generate(model, caches[0], later, 5) == generate(model, caches[1], later, 5)
    assert all(torch.equal(*(cache.held(row) for cache in caches)) for row in range(2))


def test_the_slots_are_there_once(case, folders):
    """Rows share the slots, and their bytes do not depend on the number of rows."""
    model, matrix_case = case("qwen3", "h2o")
    (folder,) = folders("qwen3", "biased")

    def allocated(rows, **options):
        cache = KVpopCache(model, **matrix_case.settings, **options)
        generate(model, cache, [random_prompt(70)] * rows, 3)
        return cache.allocated_bytes()

    extra = [allocated(rows, cartridge=folder) - allocated(rows) for rows in (1, 6)]
    page = KVpopCache(model, **matrix_case.settings).policy.model
    slot = page.num_layers * page.num_kv_heads * (2 * page.head_dim * 4 + 8)
    assert all(0 <= added - SLOTS["biased"] * slot < 6 * page.num_layers * 64 for added in extra)


def test_what_the_slots_hold_of_a_chat_is_not_given_again(case, tiny, tmp_path):
    """Ids after the head are the prompt. Ids that begin with it are refused, in a padded row too."""
    model, matrix_case = case("qwen3", "h2o")
    head, prompt = [5, 9, 7], random_prompt(20)
    plain, headed = (
        write(tmp_path / name, tiny("qwen3")[0], "biased", head=ids) for name, ids in (("a", []), ("b", head))
    )
    caches = [KVpopCache(model, **matrix_case.settings, cartridge=folder) for folder in (plain, headed)]
    assert [cache.head for cache in caches] == [[], head]
    assert generate(model, caches[0], [prompt], 8) == generate(model, caches[1], [prompt], 8)
    caches[1].reset()
    with pytest.raises(ValueError, match=r"holds the first 3 tokens of the chat: give the others, ids\[:, 3:\]"):
        generate(model, caches[1], [random_prompt(40), head + prompt], 8)
    with pytest.raises(ConfigError, match="were made with different system messages or places: leave one out"):
        KVpopCache(model, **matrix_case.settings, cartridge=[plain, headed])


def test_layers_without_rotation_are_not_turned(tmp_path):
    """Two cartridges in order, one from elsewhere in its text, give the logits of transformers."""
    folder, cartridges, plain, past = unrotated(tmp_path)
    model, prompt = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.tensor([random_prompt(30, seed=5)])
    cache = KVpopCache(model, "streaming-llm", budget=256, cartridge=cartridges)
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache).logits
        torch.testing.assert_close(logits, plain(prompt, past_key_values=past).logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("template", [None, CHAT, f"<bos>{CHAT}"])
def test_prompts_after_a_cartridge_begin_as_the_fits(tiny, tmp_path, template):
    """After a cartridge that holds BOS neither texts nor chats have another. After a chat's head they have no head."""
    folder, model = tiny("llama")
    tokenizer = byte_tokenizer(template, bos=True)
    place = place_of(tokenizer, "front")
    assert place.read("A text.") == [BOS, *b"A text."]
    caches = [
        KVpopCache(model, "h2o", budget=64, cartridge=write(tmp_path / name, folder, "plain", head=head))
        for name, head in (("front", place.head), ("message", list(b"<user>")))
    ]
    assert caches[0].encode(tokenizer, "What?").tolist() == [list(b"What?")]
    assert caches[0].encode(tokenizer, "<bos>What?").tolist() == [[BOS, *b"What?"]]  # the user's own
    if template is not None:
        messages = [{"role": "user", "content": "What?"}]
        assert list(b"\n\n") + caches[0].encode(tokenizer, messages)[0].tolist() == place.asking("What?")
    if template == CHAT:
        assert bytes(caches[1].encode(tokenizer, messages)[0].tolist()) == b"What?</user>\n"
        with pytest.raises(ConfigError, match="begins in another way than the cartridge"):
            caches[1].encode(tokenizer, "What?")
    with pytest.raises(ConfigError, match="has no cartridge"):
        KVpopCache(model, "h2o", budget=64).encode(tokenizer, "What?")


def test_refusals(case, folders, tiny):
    model, matrix_case = case("qwen3", "h2o")
    with pytest.raises(ConfigError, match="made for a model with model_type = 'llama'"):
        KVpopCache(model, **matrix_case.settings, cartridge=folders("llama", "plain"))
    with pytest.raises(ConfigError, match="no cartridge at"):
        KVpopCache(model, **matrix_case.settings, cartridge="/nowhere")
    with pytest.raises(ConfigError, match="snapkv gives up what stands before a prompt's end: leave cartridge out"):
        KVpopCache(model, "snapkv", budget=64, cartridge=folders("qwen3", "plain"))
