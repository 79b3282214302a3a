"""A KVpopCache that was saved and loaded goes on to the tokens of the cache itself, or is refused in one line."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from engine.test_cartridges import write as write_cartridge
from hf.prompts import distinct, generate, padded
from hf.test_cache import CASES
from safetensors.torch import load_file, save_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.cache_files import CONFIG_NAME, RULES, TENSORS_NAME
from kvpop_vllm.hf.digests import digest_of
from kvpop_vllm.model_hook import CACHE_NAME

PROMPTS, NEW = [distinct(75), distinct(50)], 6


def decode(model, cache, tokens, count=NEW):
    """Return ``count`` greedy tokens of each row, whose last tokens ``[R]`` have not been read."""
    answers = []
    for _ in range(count):
        with torch.no_grad():
            tokens = model(tokens.unsqueeze(1), **{CACHE_NAME: cache}).logits[:, -1].argmax(-1)
        answers.append(tokens)
    return torch.stack(answers, 1).tolist()


def go_on(model, cache, last, texts):
    """Return the tokens of the rest of an answer and of the next turn, and what is held after each."""
    continued = decode(model, cache, last)
    retained = [cache.held(row) for row in range(len(texts))]
    turn = [[*text, *answer, *distinct(20)] for text, answer in zip(texts, continued, strict=True)]
    answers = generate(model, cache, turn, new=NEW)
    return continued, answers, [*retained, *(cache.held(row) for row in range(len(texts)))]


def check_saved(model, cache, folder, texts, last, **moved):
    """Check that two loaded caches go on as a copy of the cache does, after it went on, and that one can be saved again."""
    cache.save(folder)
    branch, size = copy.deepcopy(cache), cache.allocated_bytes()
    expected = go_on(model, branch, last, texts)
    for number in range(2):
        loaded = KVpopCache.load(folder, model, **moved)
        assert (loaded.lengths, loaded.protected, loaded.passes) == (cache.lengths, cache.protected, cache.passes)
        assert loaded.allocated_bytes() == size
        loaded.save(folder.parent / f"again-{number}")
        assert (folder.parent / f"again-{number}" / TENSORS_NAME).read_bytes() == (folder / TENSORS_NAME).read_bytes()
        continued, answers, retained = go_on(model, loaded, last, texts)
        assert (continued, answers) == expected[:2]
        assert all(map(torch.equal, retained, expected[2]))
    return expected


def answered(model, cache, prompts=PROMPTS, new=NEW):
    """Return texts that a cache has read but their last tokens ``[R]``, and these tokens."""
    texts = [
        [*prompt, *answer] for prompt, answer in zip(prompts, generate(model, cache, prompts, new=new), strict=True)
    ]
    return texts, torch.tensor([text[-1] for text in texts])


@pytest.mark.parametrize("kind, policy, options", CASES, ids=lambda value: str(value) if value else "")
def test_every_policy_goes_on(case, tmp_path, kind, policy, options):
    """A padded batch, whose answer and next turn follow."""
    model, matrix_case = case(kind, policy, **options)
    cache = KVpopCache(model, **matrix_case.settings)
    check_saved(model, cache, tmp_path / "saved", *answered(model, cache))


@pytest.mark.parametrize(
    "policy, settings",
    [
        ("kvpop", {"protect_prompt": True}),
        ("h2o", {"protect_prompt": [True, 20]}),
        ("random", {"protect_prompt": 30, "seed": [3, 4]}),
        ("h2o", {"budget": [24, 40]}),
    ],
)
def test_rows_go_on_as_their_own(case, tmp_path, policy, settings):
    """Protected prompts, budgets and seeds of rows. A later call computes unprotected text again."""
    model, matrix_case = case("qwen3", policy)
    cache = KVpopCache(model, **matrix_case.settings | settings)
    check_saved(model, cache, tmp_path / "saved", *answered(model, cache))


@pytest.mark.parametrize("protect", [{}, {"protect_prompt": True}])
def test_cartridges_stay_in_front(case, tiny, tmp_path, protect):
    """Their folders may be elsewhere. Without them, or with others, the cache is refused."""
    model, matrix_case = case("qwen3", "kvpop")
    plain, biased = (write_cartridge(tmp_path / name, tiny("qwen3")[0], name) for name in ("plain", "biased"))
    cache = KVpopCache(model, **matrix_case.settings | protect, cartridge=[plain, biased])
    check_saved(model, cache, tmp_path / "saved", *answered(model, cache))
    moved = shutil.move(plain, tmp_path / "moved")
    with pytest.raises(ConfigError, match="no cartridge at"):
        KVpopCache.load(tmp_path / "saved", model)
    KVpopCache.load(tmp_path / "saved", model, cartridge=[moved, biased])
    with pytest.raises(ConfigError, match="was saved with another scorer, map, calibration or cartridge"):
        KVpopCache.load(tmp_path / "saved", model, cartridge=[biased, moved])


@pytest.mark.parametrize("policy", ["snapkv", "attention-matching"])
def test_a_prompt_goes_on_before_it_is_compressed(case, tmp_path, policy):
    """The cache is saved between two parts of a prompt, and right after it."""
    model, matrix_case = case("qwen3", policy)
    inputs, last = padded([distinct(120)]), torch.tensor([7])
    cache = KVpopCache(model, **matrix_case.settings, prompt=120)

    def read(cache, first, end):
        mask = inputs["attention_mask"][:, :end]
        with torch.no_grad():
            model(inputs["input_ids"][:, first:end], attention_mask=mask, **{CACHE_NAME: cache})

    read(cache, 0, 70)
    cache.save(tmp_path / "half")
    loaded = KVpopCache.load(tmp_path / "half", model)
    for reader in (cache, loaded):
        read(reader, 70, 120)
    cache.save(tmp_path / "whole")
    results = [decode(model, reader, last) for reader in (cache, loaded, KVpopCache.load(tmp_path / "whole", model))]
    assert results[0] == results[1] == results[2]


def test_bfloat16_goes_on(case, tmp_path):
    model, matrix_case = case("llama", "h2o")
    model = copy.deepcopy(model).to(torch.bfloat16)
    cache = KVpopCache(model, **matrix_case.settings)
    check_saved(model, cache, tmp_path / "saved", *answered(model, cache))


def test_generate_goes_on_by_itself(case, tmp_path):
    """A chat's second turn takes what the first left. Another text is refused, as by the cache itself."""
    model, matrix_case = case("qwen3", "kvpop")
    cache = KVpopCache(model, **matrix_case.settings)
    texts, _ = answered(model, cache)
    cache.save(tmp_path / "saved")
    turn = [[*text, *distinct(9)] for text in texts]
    expected = generate(model, cache, turn, new=NEW)
    loaded = KVpopCache.load(tmp_path / "saved", model)
    with pytest.raises(ValueError, match="the text does not begin with the 80 tokens that the KVpopCache has seen"):
        generate(model, loaded, [[1, *text[1:]] for text in turn], new=NEW)
    assert generate(model, loaded, turn, new=NEW) == expected
    assert loaded.passes == NEW * 2


def test_a_reset_leaves_nothing_to_save(case, tmp_path):
    """A cache that is used again is saved without the text before: its file is that of a new cache."""
    model, matrix_case = case("qwen3", "kvpop")
    for name, first in (("used", True), ("new", False)):
        cache = KVpopCache(model, **matrix_case.settings, protect_prompt=20)
        if first:
            answered(model, cache)
            cache.reset()
        answered(model, cache, [prompt[:30] for prompt in PROMPTS], new=2)
        cache.save(tmp_path / name)
    assert (tmp_path / "used" / TENSORS_NAME).read_bytes() == (tmp_path / "new" / TENSORS_NAME).read_bytes()


@pytest.fixture(scope="module")
def saved(case, tmp_path_factory):
    """Return a model, the settings of its cache, and a folder in which it was saved."""
    model, matrix_case = case("qwen3", "kvpop")
    cache, folder = KVpopCache(model, **matrix_case.settings), tmp_path_factory.mktemp("saved") / "cache"
    answered(model, cache)
    cache.save(folder)
    return model, matrix_case.settings, folder


def test_what_differs_is_named(saved, case, tiny, tmp_path):
    model, settings, folder = saved
    assert KVpopCache.load(folder, model, **settings, seed=0).lengths == [80, 55]
    for name, value in (("policy", "h2o"), ("budget", 32), ("seed", [0, 1]), ("protect_prompt", True)):
        with pytest.raises(ConfigError, match=rf"was saved with {name} = .*, not .*: leave {name} out"):
            KVpopCache.load(folder, model, **{name: value})
    with pytest.raises(ConfigError, match="was made for a model with model_type = 'qwen3', the model has 'llama'"):
        KVpopCache.load(folder, tiny("llama")[1])
    model_copy = copy.deepcopy(model)
    model_copy.config.rope_parameters["rope_theta"] = 500.0
    with pytest.raises(
        ConfigError, match="was made for rotary embeddings with rope_theta = 10000.0, the model has 500.0"
    ):
        KVpopCache.load(folder, model_copy)
    with pytest.raises(ConfigError, match="was saved with a model in float32, the model is in bfloat16"):
        KVpopCache.load(folder, copy.deepcopy(model).to(torch.bfloat16))
    model_copy = copy.deepcopy(model)
    model_copy.model.layers[1].mlp.down_proj.weight.data *= 1.5
    with pytest.raises(
        ConfigError, match="was saved with a model of other weights: load it with the model that it was saved with"
    ):
        KVpopCache.load(folder, model_copy)
    with pytest.raises(ConfigError, match="Linear is not a causal language model"):
        KVpopCache.load(folder, torch.nn.Linear(2, 2))
    scorer = shutil.copytree(settings["scorer"], tmp_path / "scorer")
    assert KVpopCache.load(folder, model, scorer=scorer).lengths == [80, 55]
    tensors = load_file(scorer / "kvpop_scorer.safetensors")
    tensors["layers.1.out.bias"] += 1
    save_file(tensors, scorer / "kvpop_scorer.safetensors")
    with pytest.raises(ConfigError, match="was saved with another scorer, map, calibration or cartridge"):
        KVpopCache.load(folder, model, scorer=scorer)
    config = json.loads((scorer / "kvpop_config.json").read_text())
    (scorer / "kvpop_config.json").write_text(json.dumps(config | {"window": config["window"] - 1}))
    with pytest.raises(ConfigError, match=r"was saved with \w+ \d+, and its scorer or calibration gives \d+ now"):
        KVpopCache.load(folder, model, scorer=scorer)


def damaged(folder: Path, copied: Path, name: str, change) -> Path:
    """Return a copy of a folder in which a file's bytes are changed."""
    shutil.copytree(folder, copied)
    (copied / name).write_bytes(change((folder / name).read_bytes()))
    return copied


def flipped(data: bytes) -> bytes:
    return data[:-500] + bytes([data[-500] ^ 1]) + data[-499:]


CHANGES = {
    "cut": (TENSORS_NAME, lambda data: data[:-9], "is not a complete safetensors file"),
    "flipped": (TENSORS_NAME, flipped, "is damaged, or its files are not of one cache"),
    "a pickle": (TENSORS_NAME, lambda data: b"\x80\x04N.", "is not a complete safetensors file .* it is a pickle"),
    "cut config": (CONFIG_NAME, lambda data: data[:-9], "cannot be read as JSON"),
    "edited": (CONFIG_NAME, lambda data: data.replace(b'"passes": 6', b'"passes": 7'), "is damaged, or its files"),
    "a word": (CONFIG_NAME, lambda data: data.replace(b'"passes": 6', b'"passes": "a"'), "passes must be an integer"),
    "without a key": (CONFIG_NAME, lambda data: data.replace(b'"passes": 6,', b""), "key 'passes' is missing"),
    "version": (
        CONFIG_NAME,
        lambda data: data.replace(b'"version": 1', b'"version": 2'),
        "format 'kvpop-cache' version 2, and is not",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_files_are_refused(saved, tmp_path, name):
    model, _, folder = saved
    file, change, message = CHANGES[name]
    copied = damaged(folder, tmp_path / "copied", file, change)
    with pytest.raises(ConfigError, match=message) as error:
        KVpopCache.load(copied, model)
    assert "\n" not in str(error.value) and str(copied) in str(error.value)


def test_a_config_asks_for_no_more_than_its_file_explains(saved, case, tmp_path):
    """Its digest may be right: more rows, or a larger budget, are refused before memory is allocated."""
    model, matrix_case = case("llama", "streaming-llm")
    cache = KVpopCache(model, "streaming-llm", budget=24, sinks=4, window=10)
    answered(model, cache)
    cache.save(tmp_path / "saved")
    large = KVpopCache(model, "streaming-llm", budget=10**7, sinks=4, window=10)
    budgets = {"settings": large.settings, "roles": large._roles(), "policy": large._policy_digest()}
    rows = {name: [80] * 10**6 for name in ("lengths", "protected", "prefixes")}
    for changes, message in (
        (budgets, "fewer slots than the cache"),
        (rows, "fewer slots"),
        ({"scales": []}, "other rows or layers"),
        ({"settings": cache.settings | {"budgets": 24}}, "unknown setting 'budgets': save the cache again"),
    ):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / "_".join(changes), dirs_exist_ok=True)
        config = json.loads((folder / CONFIG_NAME).read_text()) | changes
        body = {name: config[name] for name in RULES if name != "digest"}
        config["digest"] = digest_of([body, load_file(folder / TENSORS_NAME)])
        (folder / CONFIG_NAME).write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            KVpopCache.load(folder, model)


def test_missing_files_are_refused(saved, tmp_path):
    model, _, folder = saved
    for name in (CONFIG_NAME, TENSORS_NAME):
        copied = shutil.copytree(folder, tmp_path / name)
        (copied / name).unlink()
        with pytest.raises(ConfigError, match=f"no saved cache at .*: {name} is missing; give a folder that save"):
            KVpopCache.load(copied, model)


def test_a_cache_is_saved_at_rest_and_to_a_new_folder(saved, tmp_path):
    model, settings, folder = saved
    cache = KVpopCache(model, **settings)
    with pytest.raises(RuntimeError, match="empty, or broken off in a pass, cannot be saved: begin with a prompt"):
        cache.save(tmp_path / "empty")
    answered(model, cache)
    with pytest.raises(ConfigError, match="holds something already: choose another folder"):
        cache.save(folder)
    cache._sequence_lengths(torch.device("cpu"), 2).advance([1, 1])
    with pytest.raises(RuntimeError, match=r"call replayed\(\) before save\(\)"):
        cache.save(tmp_path / "replayed")
    assert not list(tmp_path.iterdir())
