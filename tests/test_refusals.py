"""Every refusal is one line that names the remedy. Other tests look at the type of an error only.

Refusals of the cache under transformers are in tests/hf/test_refusals.py, those of `kvpop distill` and
`kvpop eval` in tests/distill/test_command.py.
"""

import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine.tiny_configs import FP8_CACHE, LLAMA, REFUSED, SERVED, text
from safetensors.torch import load_file, save_file

from kvpop_vllm import policies
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError, PolicySettings, ScorerShape, TrainedBudget, check_spelling, resolve_retention
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.requests import named as cartridges_named
from kvpop_vllm.requests import resolve
from kvpop_vllm.rules.rounds import room_for_drafts
from kvpop_vllm.scorers import checkpoint
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, TENSORS_NAME
from kvpop_vllm.scorers.export import INDEX, SCORER_SHARD, export_checkpoint
from kvpop_vllm.scorers.untrained import init_scorer
from kvpop_vllm.testing import write_mixed_model, write_random_scorer, write_tiny_model

NAN, MANY = float("nan"), 2**40


def refusal(call, *args, **options) -> str:
    """Return the message of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# Settings of a policy.


def settings(**options) -> PolicySettings:
    return PolicySettings.parse({"policy": "p"} | options)


PROTECT = f"--kv-protect-prompt must be all or a number of tokens up to {2**24}, got "
SETTINGS = [
    *(({"budget": x}, f"--kv-budget must be an integer of at least 1, got {x!r}") for x in (0, -1, 64.0, "64", True)),
    *(({"sinks": x}, f"--kv-sinks must be an integer of at least 0, got {x!r}") for x in (-1, 1.5)),
    *(
        ({"cartridge": x}, f"--kv-cartridge takes one or more NAME=DIR, got {x!r}")
        for x in (["a"], ["=b"], ["a="], "a=b", {"a": 3})
    ),
    ({"cartridge": ["a=b", "a=c"]}, "--kv-cartridge names 'a' twice: give each cartridge a name of its own"),
    *(({"window": x}, f"--kv-window must be an integer of at least 1, got {x!r}") for x in (0, False)),
    *(
        ({"threshold": x}, f"--kv-threshold must be a number, got {x!r}")
        for x in (NAN, float("inf"), -float("inf"), 10**400, "0", True)
    ),
    *(({n: MANY}, f"--kv-{n} {MANY} is more than {2**24} tokens: lower it") for n in ("budget", "sinks", "window")),
    *(
        ({"compression": x}, f"--kv-compression must be a number of at least 1, got {x!r}")
        for x in (0.99, -2, NAN, float("inf"), 10**400, "4", True)
    ),
    *(({n: x}, f"--kv-{n} must be true or false, got {x!r}") for n in ("reserve", "inspect") for x in (1, "yes")),
    *(({"scorer": x}, f"--kv-scorer must be a folder name, got {x!r}") for x in (1, ["a"])),
    *(
        ({"protect_prompt": x}, f"{PROTECT}{x!r}")
        for x in ("some", "ALL", "", " 1", "-1", -1, 1.0, "1.5", NAN, [1], {}, 2**24 + 1)
    ),
    ({"protect_prompt": "1" * 30}, f"{PROTECT}{'1' * 30}"),
    ({"allocator": "cone"}, "--kv-allocator must be one of uniform, pyramid, ada, got 'cone'"),
    ({"correction": "momentum"}, "--kv-correction must be one of none, moment, got 'momentum'"),
    ({"budget": 64, "compression": 4}, "--kv-budget and --kv-compression both set the budget: give only one of them"),
    *(
        (
            {key: 1},
            f"unknown key {key!r} in kv_policy: use policy, budget, compression, sinks, window, threshold, scorer, map, calibration, "
            "correction, allocator, protect_prompt, max_budget, max_protect, reserve, inspect, cartridge",
        )
        for key in ("bugdet", "decide_every")
    ),
    *(({"policy": x}, "kv_policy needs a policy: give --kv-policy NAME or a 'policy' key") for x in (None, 7)),
]


@pytest.mark.parametrize("options, message", SETTINGS, ids=repr)
def test_settings(options, message):
    assert refusal(settings, **options) == message


@pytest.mark.parametrize("options", ["kvpop", ["policy"], 3, None, {}, {"budget": 64}])
def test_settings_of_another_kind(options):
    line = "kv_policy needs a policy: give --kv-policy NAME or a 'policy' key"
    if not isinstance(options, dict):
        like = "{'policy': 'streaming-llm', 'budget': 1024}"
        line = f"additional_config['kv_policy'] must be a mapping such as {like}, got {options!r}"
    assert refusal(PolicySettings.parse, options) == line


NEARLY = ["kv_polcy", "kvpolicy", "kv-policy", "KV_policy", "kv_policy ", "kv-policies"]
NEARLY += ["kv_budget", "kv_scorer", "kv_sink", "kvpop"]


def test_keys_next_to_the_settings():
    for key in NEARLY:
        assert "did you mean 'kv_policy'?" in refusal(check_spelling, {"kv_policy": {}, key: {}})
    for extra in ({}, {"kv_policy": {}}):
        message = refusal(check_spelling, {"policy": "streaming-llm", "budget": 64} | extra)
        assert message == "--additional-config has a policy's settings outside 'kv_policy': put them into it"


DELAYED = ScorerShape(sinks=4, window=16, topk=44, delayed=True)
SEVERAL = ScorerShape(4, 16, 44, True, tuple(TrainedBudget(*t) for t in ((16, 44), (8, 12), (32, 92))))
NOTHING, HUGE = (ScorerShape(sinks=4, window=16, topk=k, delayed=True) for k in (0, 2**24))
SMALL = "a budget of {} is too small for {} sinks + window {} + 1: "
ROOM = "raise --kv-budget to at least {}"
RETENTIONS = [
    (dict(window=32), 1000, DELAYED, "--kv-window 32 is not what the delayed scorer was trained with, window 16: leave --kv-window out"),
    (dict(budget=128, window=7), 1000, SEVERAL, "--kv-window 7 is not"),
    (dict(budget=128, window=33), 1000, SEVERAL, "windows from 8 to 32"),
    (dict(budget=12), 1000, SEVERAL, ROOM.format(13)),
    ({}, 1000, None, "--kv-policy p needs a budget: give --kv-budget or --kv-compression"),
    (dict(budget=20), 1000, DELAYED, SMALL.format(20, 4, 16) + ROOM.format(21)),
    (dict(budget=20, window=16), 1000, None, ROOM.format(21)),
    (dict(budget=5), 1000, None, ROOM.format(6)),
    (dict(budget=1, sinks=0), 1000, None, ROOM.format(2)),
    (dict(budget=64, sinks=60), 1000, DELAYED, SMALL.format(64, 60, 16) + ROOM.format(77)),
    (dict(compression=100), 1000, DELAYED, SMALL.format(10, 4, 16) + "lower --kv-compression to at most 47.619"),
    ({}, 1000, NOTHING, SMALL.format(20, 4, 16) + "set --kv-budget to at least 21"),
    (dict(compression=1), 16, DELAYED, SMALL.format(16, 4, 16) + "raise --max-model-len to at least 21"),
    ({}, 1000, HUGE, "is more than 16777216 tokens: set a lower --kv-budget"),
]  # fmt: skip
KEPT = "--kv-policy p keeps every token: leave --kv-budget and --kv-compression out"
KEEPING = [
    (dict(sinks=99), 64, "raise --max-model-len to at least 101 or lower --kv-sinks"),
    ({}, 1, "raise --max-model-len to at least 2"),
    ({}, 2**24 + 1, "is more than 16777216 tokens: lower --max-model-len"),
    (dict(budget=999), 1000, KEPT),
    (dict(compression=2), 1000, KEPT),
]


def test_budgets():
    for options, length, scorer, message in RETENTIONS:
        assert message in refusal(resolve_retention, settings(**options), length, scorer)
    for options, length, message in KEEPING:
        assert refusal(resolve_retention, settings(**options), length, None, keeps_all=True).endswith(message)


def test_the_compression_named_does():
    """The compression that the message names is rounded and still small enough."""
    for length, window in itertools.product(range(30, 300, 7), range(1, 24)):
        message = refusal(resolve_retention, settings(compression=1000, window=window), length, None)
        named = float(message.rsplit(" ", 1)[1])
        assert resolve_retention(settings(compression=named, window=window), length, None).topk >= 1


# Servers and requests with options of their own.

SHAPE = ModelShape("llama", 2, 2, 32, 4096, num_heads=4)


def server(policy="h2o", **options):
    return policies.get(policy)(PolicySettings(policy, **{"budget": 64} | options), SHAPE)


WHOLE = "kv_budget must be a whole number of tokens, got "
ONE_BUDGET = "gives all requests one budget here: leave {} out"
PROTECTS = 'kv_protect_prompt must be "all" or a whole number of tokens, got '
SERVERS = [
    ("h2o", {"max_budget": 63}, "--kv-max-budget 63 is below the server's own budget: raise it to at least 64"),
    ("snapkv", {"allocator": "ada", "max_budget": 80}, "leave --kv-max-budget out"),
    ("adakv", {"max_budget": 80}, "leave --kv-max-budget out"),
    ("full", {"budget": None, "max_budget": 8192}, ONE_BUDGET.format("--kv-max-budget")),
    ("h2o", {"protect_prompt": True, "max_protect": 9}, "raise it to all"),
    ("h2o", {"protect_prompt": 10, "max_protect": 9}, "raise it to at least 10"),
    ("random", {"max_protect": 9}, "raise it to all"),
    ("snapkv", {"max_protect": True}, "leave --kv-max-protect out"),
    ("snapkv", {"protect_prompt": True}, "leave --kv-protect-prompt out"),
    ("snapkv", {"correction": "moment"}, "leave --kv-correction out"),
    ("attention-matching", {"allocator": "pyramid"}, "makes as many slots for every head: leave --kv-allocator out"),
    ("attention-matching", {"sinks": 4}, "makes slots of the first tokens too: leave --kv-sinks out"),
    ("attention-matching", {"protect_prompt": 9}, "leave --kv-protect-prompt out"),
    ("attention-matching", {"correction": "moment"}, "leave --kv-correction out"),
    ("attention-matching", {"budget": 64, "window": 64}, "window 64 + 1: raise --kv-budget to at least 65"),
    ("snapkv", {"budget": 32}, "too small for 0 sinks + window 32 + 1: raise --kv-budget to at least 33"),
]
REQUESTS = [
    *(("h2o", {}, {"kv_budget": x}, f"{WHOLE}{x!r}") for x in (True, NAN, "512", 30.5, [30])),
    *(("h2o", {}, {"kv_budget": x}, f"kv_budget must be at least 1, got {x}") for x in (-5, 0)),
    ("h2o", {}, {"kv_budget": 65}, "kv_budget 65 is more than this server allows: lower it to at most 64"),
    ("h2o", {"window": 20}, {"kv_budget": 20}, "a budget of 20 is too small for 0 sinks + window 20 + 1: raise kv_budget to at least 21"),
    *(("h2o", {}, {"kv_protect_prompt": x}, f"{PROTECTS}{x!r}") for x in ("40", "al", -1)),
    ("h2o", {}, {"kv_protect_prompt": 1}, "this server protects no prompts: leave kv_protect_prompt out"),
    *(
        ("h2o", {"max_protect": 30}, {"kv_protect_prompt": x}, f"kv_protect_prompt asks for {tokens} tokens, more than this server allows: lower it to at most 30")
        for x, tokens in ((31, 31), ("all", 40))
    ),
    ("h2o", {}, {"kv_seed": 1}, "--kv-policy h2o draws nothing: leave kv_seed out"),
    *(("h2o", {}, {"kv_report": x}, f"kv_report must be 0 or 1, got {x!r}") for x in (2, -1, "1", 1.0, [1])),
    ("random", {}, {"kv_seed": 2**64}, "must be a whole number of 64 bits"),
    ("random", {}, {"kv_seed": 1.0}, "must be a whole number of 64 bits"),
    ("adakv", {}, {"kv_budget": 60}, ONE_BUDGET.format("kv_budget")),
    ("snapkv", {"allocator": "ada"}, {"kv_budget": 60}, ONE_BUDGET.format("kv_budget")),
    ("full", {"budget": None}, {"kv_budget": 60}, ONE_BUDGET.format("kv_budget")),
    ("snapkv", {}, {"kv_protect_prompt": 1}, "holds the prompt until its end anyway: leave kv_protect_prompt out"),
    ("h2o", {}, {"kv_cartridges": "a"}, "kv_cartridges must be a list of names, got 'a'"),
    ("h2o", {}, {"kv_cartridges": ["a", "a"]}, "kv_cartridges names a cartridge twice: name each once"),
    ("h2o", {}, {"kv_cartridges": ["a"]}, "the cartridge 'a' does not exist: this server has none, start it with --kv-cartridge"),
    *(("h2o", {}, {key: 3}, f"unknown key {key!r}: use kv_budget, kv_protect_prompt, kv_cartridges, kv_seed, kv_report") for key in ("kv_policy", "kv_bugdet")),
    ("h2o", {}, {"kvpop": [1, 2, 3, None]}, "the key 'kvpop' is reserved: leave it out"),
]  # fmt: skip


def test_servers():
    for policy, options, message in SERVERS:
        assert message in refusal(server, policy, **options)


@pytest.mark.parametrize("policy, options, keys, message", REQUESTS, ids=repr)
def test_requests(policy, options, keys, message):
    def resolved(policy):
        return resolve(policy, keys, 40, tuple(cartridges_named(keys, {}).values()))

    assert message in refusal(resolved, server(policy, **options))


# Folders of scorers.


@pytest.fixture
def written(model, tmp_path):
    """Return ``write(kind, **options)``, which writes a scorer folder."""
    return lambda kind, **options: write_random_scorer(tmp_path / "scorer", model, kind, **options)


@pytest.fixture
def scorer(written):
    return written("mlstm", norm=True, skip=True)


def edit(path: Path, **changes) -> None:
    """Change keys of a JSON file. ``...`` removes a key."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def edit_tensors(path: Path, **changes) -> None:
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, path)


def decay(step=1, low=0.9, high=0.99) -> dict:
    return {"decay": {"step": step, "min": low, "max": high}}


CONFIGS = [
    ({"format": "other"}, "'other'"),
    ({"format": ...}, "format None"),
    ({"version": 2}, "version 2"),
    ({"scorer": "lstm"}, "'lstm'"),
    ({"wnidow": 1}, "'wnidow'"),
    *(({"decide_every": x}, "unknown key 'decide_every'") for x in (0, 2, "1", None)),
    ({"topk": ...}, "'topk'"),
    ({"feature_map": ...}, "'feature_map'"),
    ({"feature_map": "relu"}, "'relu'"),
    *(({"trained": x}, named) for x, named in (
        (5, "trained"), ([[16, 44]], "window and topk"), ([{"window": 16}], "window and topk"),
        ([{"window": 0, "topk": 1}], "trained: window must be"), ([{"window": 1, "topk": True}], "trained: topk must be"),
        ([{"window": 1, "topk": 1}], "trained must begin with window"),
    )),
    *(({name: x}, name) for name, values in {
        "model_type": [1], "num_layers": [0], "head_dim": ["64"], "sinks": [-1, MANY], "window": [0, MANY],
        "topk": [True, 2**31], "gate_softcap": [0, True, 10**400, 1e-300], "norm": [1], "delayed": [None],
        "decay": [0.9, {"min": 0.9, "max": 0.99}],
    }.items() for x in values),
    *((decay(step=x), "decay.step") for x in (0, True, 2**31, 2**70)),
    (decay(low=0.99, high=0.9), "min <= max"),
    (decay(low=0), "0 < min"),
    *((decay(**{end: x}), "min <= max") for end, x in (("high", "1"), ("high", True), ("low", True))),
]  # fmt: skip
TENSORS = [
    ("layers.1.igate.bias", ..., "layers.1.igate.bias is missing"),
    ("layers.1.v_proj", ..., "layers.1.v_proj is missing"),
    ("layers.0.norm.weight", ..., "layers.0.norm.weight is missing"),
    ("layers.0.extra", torch.zeros(2), "layers.0.extra does not belong"),
    *((name, torch.zeros(2), repr(name)) for name in ("layers.2.decay_logit", "layers.01.decay_logit", "decay_logit")),
    (f"layers.{'9' * 5000}.decay_logit", torch.zeros(2), "'layers.999"),
    ("layers.1.decay_logit", torch.zeros(3), "layers.1.decay_logit has shape (3,), expected (2,)"),
    ("layers.0.q_proj", torch.zeros(2, 60, 16), "layers.0.q_proj has shape"),
    ("layers.0.q_proj", torch.zeros(2, 64, 0), "no size may be 0"),
    ("layers.1.k_proj", torch.zeros(2, 64, 8), "layers.1.k_proj has shape"),
    ("layers.0.out.bias", torch.zeros(2, 1), "layers.0.out.bias has shape (2, 1), expected (2,)"),
    ("layers.1.out.bias", torch.tensor([0.0, torch.nan]), "layers.1.out.bias holds values"),
    ("layers.1.out.bias", torch.zeros(2, dtype=torch.int32), "layers.1.out.bias holds values"),
]
GATES = [
    ("trimkv", {}, {"reads": "query"}, "reads must be one of hidden, kv, got 'query'"),
    ("dms", {}, {"reads": "kv"}, "reads must be one of hidden, query, got 'kv'"),
    ("trimkv", {}, {"gated": 1}, "gated must be true or false, got 1"),
    ("trimkv", {}, {"hidden_size": "64"}, "hidden_size must be an integer from 1"),
    ("dms", {}, {"hidden_size": ...}, "key 'hidden_size' is missing"),
    ("trimkv", {}, decay(), "unknown key 'decay'"),
    ("linear", {}, {"norm": False}, "'norm'"),
    ("dms", {}, {"scale": 0}, "scale must be a positive float32 number, got 0"),
    ("dms", {}, {"window": 1}, "window must be an integer from 2"),
    ("trimkv", {}, {"hidden_size": 65}, "tensor layers.0.linear1.weight has shape (16, 64), expected (16, 65)"),
    ("trimkv", {}, {"reads": "kv"}, "tensor layers.0.linear1.weight has shape (16, 64), expected (16, 128)"),
    ("trimkv", {}, {"gated": True}, "tensor layers.0.linear1.bias does not belong to this trimkv scorer"),
    ("dms", {"reads": "query", "shifted": True}, {"reads": "hidden"}, "tensor layers.0.weight is missing"),
    ("kvzap", {}, {"reads": "kv"}, "reads must be one of hidden, got 'kv'"),
    ("kvzap", {}, {"linear": 1}, "linear must be true or false, got 1"),
    ("kvzap", {}, {"model_type": 3}, "model_type must be a string, or null, got 3"),
    ("kvzap", {}, {"hidden_size": 65}, "tensor layers.0.fc1.weight has shape (16, 64), expected (16, 65)"),
    ("kvzap", {}, {"linear": True}, "tensor layers.0.fc1.bias does not belong to this kvzap scorer"),
    ("mlstm", {"norm": True}, {"norm": False}, "layers.0.norm.weight does not belong"),
]


def test_configs_of_scorers(scorer):
    right = (scorer / CONFIG_NAME).read_text()
    for changes, named in CONFIGS:
        (scorer / CONFIG_NAME).write_text(right)
        edit(scorer / CONFIG_NAME, **changes)
        message = refusal(checkpoint.read_config, scorer)
        assert CONFIG_NAME in message and named in message, changes
    for words in ("", "{", "[1]", '"kvpop"'):
        (scorer / CONFIG_NAME).write_text(words)
        message = refusal(checkpoint.read_config, scorer)
        assert CONFIG_NAME in message and "JSON" in message


def test_tensors_of_scorers(scorer):
    right = (scorer / TENSORS_NAME).read_bytes()
    for name, tensor, named in TENSORS:
        (scorer / TENSORS_NAME).write_bytes(right)
        edit_tensors(scorer / TENSORS_NAME, **{name: tensor})
        message = refusal(checkpoint.read_scorer, scorer)
        assert TENSORS_NAME in message and named in message, name
    for length in (0, 5, 200, len(right) - 4):
        (scorer / TENSORS_NAME).write_bytes(right[:length])
        message = refusal(checkpoint.read_scorer, scorer)
        assert TENSORS_NAME in message and "complete" in message


@pytest.mark.parametrize("kind, options, change, message", GATES, ids=repr)
def test_configs_that_do_not_fit_their_tensors(written, kind, options, change, message):
    folder = written(kind, **options)
    edit(folder / CONFIG_NAME, **change)
    assert message in refusal(checkpoint.read_scorer, folder)


def test_tensors_of_gates(written):
    folder, name = written("trimkv"), "layers.1.linear2.weight"
    edit_tensors(folder / TENSORS_NAME, **{name: torch.zeros(2, 17)})
    assert f"{name} has shape (2, 17), expected (2, 16)" in refusal(checkpoint.read_scorer, folder)
    edit_tensors(folder / TENSORS_NAME, **{name: ...})
    assert f"{name} is missing" in refusal(checkpoint.read_scorer, folder)


def test_files_that_are_missing(scorer, tmp_path):
    for name in (TENSORS_NAME, CONFIG_NAME):
        (scorer / name).unlink()
        assert f"{name} is missing" in refusal(checkpoint.read_scorer, scorer)
    message = refusal(checkpoint.read_scorer, tmp_path / "nowhere")
    assert "--kv-scorer" in message and "kvpop init-scorer" in message


def test_a_scorer_of_another_model(model, scorer, written):
    config = checkpoint.read_config(scorer)
    shape = {"model_type": "qwen3", "num_layers": 2, "num_kv_heads": 2, "head_dim": 32}
    for key, value in {"model_type": "llama", "num_layers": 3, "num_kv_heads": 4, "head_dim": 64}.items():
        message = refusal(checkpoint.check_model, config, **(shape | {key: value}), source="s")
        assert key in message and repr(value) in message and "--kv-scorer" in message
    raw = json.loads((model / "config.json").read_text())
    (scorer / "config.json").write_text(json.dumps(raw | {"model_type": None}))
    assert "has no 'model_type': give the folder of a decoder-only language model" in refusal(
        init_scorer, scorer, scorer / "new"
    )


def test_a_gate_of_another_model(written):
    gate = PolicySettings("trimkv", scorer=str(written("trimkv")))
    wide = ModelShape("qwen3", 2, 2, 32, 256, hidden_size=128)
    assert "hidden_size = 64, this one has 128" in refusal(policies.get("trimkv"), gate, wide)
    message = refusal(policies.get("dms"), gate, wide)
    assert "--kv-policy dms needs a scorer of kind 'dms'" in message and "use --kv-policy trimkv" in message


def test_names_in_full_checkpoints():
    model_tensors = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    unknown = [f"model.layers.{i}.retention.{name}" for i in range(40) for name in ("query", "gate.0.weight")]
    message = refusal(checkpoint.check_layout, [*model_tensors, *unknown], "checkpoint")
    assert "model.layers.{i}.retention.query, " not in message.split("names found")[0]
    assert "model.layers.{i}.retention.gate.{i}.weight, model.layers.{i}.retention.query;" in message
    assert "q_proj" not in message and "FULL_CHECKPOINT_NAMES" in message
    kvpop_tensor = checkpoint.full_checkpoint_target(0, "bias")
    message = refusal(checkpoint.check_layout, [*model_tensors, kvpop_tensor, "model.kvpop_gate.weight"], "checkpoint")
    assert "found that are neither theirs nor the model's own: model.kvpop_gate.weight;" in message
    assert "none;" in refusal(checkpoint.check_layout, model_tensors, "checkpoint")
    names = [f"model.layers.{i}.self_attn.kvpop.out.bias" for i in ("0", "00")]
    assert "layers.{i}.self_attn.kvpop.out.bias" in refusal(checkpoint.check_layout, names, "file")


# Exports of checkpoints with scorers.


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return folders of a base model, its scorer, and the export of both."""
    root = tmp_path_factory.mktemp("exported")
    base = write_tiny_model(root / "base", "qwen3")
    adapter = write_random_scorer(root / "adapter", base, "mlstm")
    export_checkpoint(base, adapter, root / "full")
    return SimpleNamespace(base=base, adapter=adapter, full=root / "full")


def exporting(capsys, *arguments) -> str:
    """Return the line that ``kvpop export`` prints when it refuses."""
    assert main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvpop: ") and error.count("\n") == 1
    return error


def tensor(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


HEADERS = [[1], 3, {"a": 1}, {"a": {}}, {"a": {"shape": [1], "data_offsets": [0, 4]}}, tensor(dtype=[1])]
HEADERS += [tensor(data_offsets=x) for x in (4, ["0", "4"], [0], [0, 0, 4], [4, 0])]
HEADERS += [tensor(shape=[2], data_offsets=[0, 8])]
INDICES = [[1], 3, {}, *({"weight_map": m} for m in (None, [1], {}, {"a": 1}, {"a": ["x"]}, {"a": "../x.safetensors"}))]


def test_exports(exported, tmp_path, capsys):
    out, adapter = tmp_path / "out", exported.adapter
    other_model = write_tiny_model(tmp_path / "other", "llama")
    bigger = write_tiny_model(tmp_path / "bigger", "qwen3", layers=3)
    no_room = write_tiny_model(tmp_path / "qwen2", "qwen2", hidden=128)
    empty = shutil.copytree(exported.base, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    for base, scorer, message in (
        (other_model, adapter, "model_type"),
        (bigger, adapter, "num_layers"),
        (no_room, adapter, "'qwen2' cannot carry scorers"),
        (exported.full, adapter, "carries a scorer already"),
        (empty, adapter, "model.safetensors cannot be read"),
        (tmp_path / "nowhere", adapter, "config.json"),
        (exported.base, tmp_path / "nowhere", "kvpop_config.json"),
    ):
        assert message in exporting(capsys, base, scorer, out)
    model = shutil.copytree(exported.base, tmp_path / "base")
    weights = (model / "model.safetensors").read_bytes()
    headers = [json.dumps(header).encode() for header in HEADERS]
    for damaged in (weights[:-8], *(struct.pack("<Q", len(header)) + header + bytes(4) for header in headers)):
        (model / "model.safetensors").write_bytes(damaged)
        assert "is not a complete safetensors file" in exporting(capsys, model, adapter, out)
    save_file({}, model / "model.safetensors", metadata={"format": "pt"})
    assert "holds no tensors" in exporting(capsys, model, adapter, out)
    (model / "model.safetensors").write_bytes(weights)
    for index in INDICES:
        (model / INDEX).write_text(json.dumps(index))
        assert "is not an index of safetensors files" in exporting(capsys, model, adapter, out)
    (model / INDEX).unlink()
    for kind in (None, 3, ["llama"], {"a": 1}):
        edit(model / "config.json", model_type=kind)
        assert "has no 'model_type': give the folder" in exporting(capsys, model, adapter, out)
    assert not out.exists()
    out.mkdir()
    (out / "note.txt").write_text("mine")
    assert "not an empty folder" in exporting(capsys, exported.base, adapter, out)


# Engines. None of the model folders has weights.

STREAMING = {"policy": "streaming-llm", "budget": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return ``write(name, config)``, which writes a model folder with a config only."""
    root = tmp_path_factory.mktemp("models")

    def write(name: str, config: dict) -> Path:
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_text(json.dumps(config))
        return root / name

    return write


@pytest.fixture(scope="module")
def llama(folder):
    return folder("llama", LLAMA)


@pytest.fixture(scope="module")
def configure():
    """Return a function that makes an engine's config.

    vLLM inspects model classes in this process. To avoid CUDA here it would start a process of 10 s for each
    class.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    def config(model, policy=STREAMING, **options):
        options = {"skip_tokenizer_init": True, "max_model_len": 256} | options
        additional = {} if policy is None else {"kv_policy": policy}
        return EngineArgs(model=str(model), additional_config=additional, **options).create_engine_config()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield config


@pytest.mark.parametrize("name", REFUSED)
def test_models(configure, folder, name):
    """A policy refuses the model, and vLLM takes it without a policy, so the user sees the policy's line."""
    named, config = REFUSED[name]
    model = folder(name, config)
    message = refusal(configure, model)
    assert named in message and "--kv-policy" in message
    configure(model, None)


@pytest.mark.parametrize("name", SERVED)
def test_models_that_are_served(configure, folder, name):
    configure(folder(name, SERVED[name]))


STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
EAGER_STAGES = STAGES | {"enforce_eager": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
ARGUMENTS = [
    (
        "speculative decoding with eagle: choose the method ngram, suffix, custom_class, eagle3 or mtp in",
        {"speculative_config": NGRAM | {"method": "eagle"}},
    ),
    ("speculative decoding with dflash: choose", {"speculative_config": NGRAM | {"method": "dflash"}}),
    ("speculative decoding with medusa: choose", {"speculative_config": NGRAM | {"method": "medusa"}}),
    ("speculative decoding with ngram_gpu: choose", {"speculative_config": NGRAM | {"method": "ngram_gpu"}}),
    ("--kv-transfer-config", {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}),
    ("--kv-offloading-size", {"kv_offloading_size": 1.0}),
    ("--decode-context-parallel-size", {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}),
    ("--prefill-context-parallel-size", {"prefill_context_parallel_size": 2}),
    ("--enable-dbo", {"enable_dbo": True}),
    ("--ubatch-size", {"ubatch_size": 2}),
    ("--kv-sharing-fast-prefill", {"kv_sharing_fast_prefill": True}),
    ("--runner pooling", {"runner": "pooling"}),
    ("leave --enforce-eager", EAGER_STAGES),
    ("Ray on a CPU", {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}),
    ("--data-parallel-backend out", {"data_parallel_backend": "ray", "data_parallel_size": 2}),
    ("--enable-lora out, or set --pipeline-parallel-size 1", STAGES | {"enable_lora": True}),
    ("--dtype bfloat16 or float32", {"dtype": "float16"}),
    ("--block-size 8", {"block_size": 8}),
    ("(fp8", {"kv_cache_dtype": "fp8"}),
]
POLICIES = [
    ("--kv-policy takes", {"policy": "h3o"}),
    ("additional_config", "streaming-llm"),
    ("uses no scorer: leave --kv-scorer out", STREAMING | {"scorer": "nowhere-at-all"}),
    ("nowhere-at-all has no shares.json", STREAMING | {"calibration": "nowhere-at-all"}),
    ("needs statistics of the model's queries: give --kv-calibration", {"policy": "triattention", "budget": 300}),
    ("no statistics at 'nowhere'", {"policy": "triattention", "budget": 300, "calibration": "nowhere"}),
    ("--kv-scorer", {"policy": "kvpop"}),
    ("--kv-scorer", {"policy": "kvpop-linear", "scorer": "nowhere-at-all"}),
]


def test_engine_arguments(configure, llama):
    for flag, options in ARGUMENTS:
        assert flag in refusal(configure, llama, **options), flag
    for named, policy in POLICIES:
        assert named in refusal(configure, llama, policy), policy
    together = refusal(configure, llama, ubatch_size=2, enable_dbo=True, kv_offloading_size=1.0)
    assert all(flag in together for flag in ("--ubatch-size", "--enable-dbo", "--kv-offloading-size"))
    several = refusal(configure, llama, STREAMING | {"inspect": True}, data_parallel_size=2)
    assert several == "--kv-inspect cannot be combined with --data-parallel-size 2: set it to 1"
    assert [file.name for file in llama.iterdir()] == ["config.json"]


SPECULATION = [
    ("--tensor-parallel-size 2: set it to 1", STREAMING, {"tensor_parallel_size": 2}),
    ("--pipeline-parallel-size 2: set it to 1", STREAMING, STAGES),
    ("leave --enable-prompt-embeds out", STREAMING, {"enable_prompt_embeds": True}),
    (
        "--long-prefill-token-threshold 4, where vLLM stops at a hit: raise it to more than 4",
        STREAMING,
        {"long_prefill_token_threshold": 4},
    ),
    *(
        (f"{name}, since it compresses prompts", {"policy": name, "budget": 64}, {})
        for name in ("snapkv", "pyramidkv", "adakv", "attention-matching")
    ),
]


@pytest.mark.parametrize("reason, policy, options", SPECULATION, ids=str)
def test_speculative_decoding(configure, llama, reason, policy, options):
    message = refusal(configure, llama, policy, speculative_config=NGRAM, **options)
    assert message.startswith("--speculative-config with a policy cannot be combined with") and reason in message
    configure(llama, policy, **options)


def test_speculative_decoding_that_is_served(configure, llama):
    for policy, options in (
        (STREAMING, {"long_prefill_token_threshold": 5}),
        (STREAMING | {"reserve": True}, {"enable_lora": True}),
        ({"policy": "rkv", "budget": 256}, {}),
    ):
        config = configure(llama, policy, speculative_config=NGRAM, **options)
        assert config.num_speculative_tokens == 4 and not config.scheduler_config.async_scheduling


@pytest.mark.parametrize(
    "topk, allocator, none",
    [(5, "uniform", True), (6, "uniform", False), (9, "pyramid", True), (10, "pyramid", False)],
)
def test_rounds_that_leave_no_room_for_drafts_are_named(configure, llama, topk, allocator, none):
    from kvpop_vllm.vllm_glue.start.engine_policy import describe

    policy = {"policy": "rkv", "sinks": 0, "window": 8, "budget": 8 + topk, "allocator": allocator}
    lines = describe(configure(llama, policy, speculative_config=NGRAM))
    assert any(line.startswith("no draft is verified") for line in lines) == none
    rooms = {room_for_drafts(128, topk, allocator == "uniform", position) for position in range(15)}
    assert (rooms == {0}) == none


def test_speculative_decoding_with_asynchronous_scheduling(configure, llama):
    """VLLM refuses it with n-grams by itself, and leaves it off by default."""
    with pytest.raises(ValueError, match="async"):
        configure(llama, STREAMING, speculative_config=NGRAM, async_scheduling=True)


def test_speculative_decoding_of_models_and_gates(configure, folder, llama, tmp_path):
    """Recurrent states under refused drafts, a gate whose scores come late, and blocks that hold no draft are refused."""
    for kind in ("nemotron_h", "qwen3_next"):
        recurrent = write_mixed_model(tmp_path / kind, kind)
        message = refusal(configure, recurrent, STREAMING, speculative_config=NGRAM, dtype="bfloat16")
        assert "models with recurrent layers: leave --speculative-config out" in message
    config = configure(folder("gpt-oss", SERVED["gpt-oss"]), STREAMING, speculative_config=NGRAM)
    assert config.num_speculative_tokens == 4
    write_random_scorer(tmp_path, llama, "dms", shifted=True)
    late = {"policy": "dms", "scorer": str(tmp_path)}
    reason = "--kv-policy dms, since the scores of its shifted gate come a token late: choose another policy"
    assert reason in refusal(configure, llama, late, speculative_config=NGRAM)
    wide = folder(
        "wide", LLAMA | {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 2048}
    )
    h2o = {"policy": "h2o", "budget": 64}
    message = refusal(configure, wide, h2o, speculative_config=NGRAM, block_size=16)
    assert "no room for a draft and its" in message and "raise --block-size to 32" in message
    configure(wide, h2o, speculative_config=NGRAM, block_size=32)


def test_a_draft_model(configure, llama):
    config = {"model": str(llama), "num_speculative_tokens": 2}
    assert "speculative decoding with draft_model: choose" in refusal(configure, llama, speculative_config=config)


def test_the_rust_front_end(configure, llama, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "unset VLLM_USE_RUST_FRONTEND" in refusal(configure, llama)


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"policy": "h2o", "budget": 64, "allocator": "pyramid"}, None),
        ({"policy": "pyramidkv", "budget": 64}, None),
        ({"policy": "adakv", "budget": 64}, None),
        ({"policy": "random", "budget": 64}, "--kv-policy random draws by seeds of requests"),
        ({"policy": "vase", "budget": 70}, "set --pipeline-parallel-size 1"),
    ],
    ids=str,
)
def test_pipeline_stages(configure, llama, policy, message):
    if message is None:
        configure(llama, policy, **STAGES)
    else:
        assert message in refusal(configure, llama, policy, **STAGES)


def test_sleep_mode_on_a_cpu(configure, llama):
    """Sleep mode is refused by vLLM itself, with a policy or without."""
    for policy in (STREAMING, None):
        with pytest.raises(ValueError, match="Sleep mode is not supported"):
            configure(llama, policy, enable_sleep_mode=True)


def test_asynchronous_scheduling_on_a_cpu(configure, llama):
    """Asynchronous scheduling is switched off by vLLM, with a policy or without."""
    for policy in (STREAMING, None):
        assert not configure(llama, policy, async_scheduling=True).scheduler_config.async_scheduling


def test_a_cache_dtype_next_to_another_of_the_model(configure, llama):
    """Since 0.33 vLLM itself refuses it, with a policy or without."""
    with pytest.raises(ValueError, match="leave --kv-cache-dtype out|set `--kv-cache-dtype` to `auto`"):
        configure(llama, STREAMING, dtype="float32", kv_cache_dtype="bfloat16")


def test_a_cache_dtype_of_the_checkpoint(configure, folder):
    chosen = folder("fp8-cache", LLAMA | {"quantization_config": FP8_CACHE})
    assert "chosen by the checkpoint" in refusal(configure, chosen)
    configure(chosen, dtype="bfloat16", kv_cache_dtype="bfloat16")


def test_other_platforms(configure, llama):
    """A device that calls itself cuda is NVIDIA's only if vLLM's platform says so.

    tests/engine/test_cuda_contract.py tests platforms that do.
    """
    from kvpop_vllm.vllm_glue.start import refusals

    vllm_config = configure(llama)
    for platform, named in (
        ("cpu", None),
        ("cuda", "the CpuPlatform platform yet"),
        ("xpu", "the xpu platform yet: serve on a CPU or an NVIDIA GPU"),
    ):
        vllm_config.device_config.device_type = platform
        with pytest.raises(ConfigError, match=named) if named else nullcontext():
            refusals.check_config(vllm_config)


def test_a_length_that_is_fitted_later(configure, llama):
    """A ratio of a length that is not fixed yet is refused, but `full` keeps all tokens of any length."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    ratio = {"policy": "streaming-llm", "compression": 4}
    for max_model_len in ("-1", "auto"):
        length = parser.parse_args(["--max-model-len", max_model_len]).max_model_len
        message = refusal(configure, llama, ratio, max_model_len=length)
        assert "--kv-compression" in message and "fixed --max-model-len, or --kv-budget" in message
        for policy in (STREAMING, {"policy": "full"}):
            configure(llama, policy, max_model_len=length)
    configure(llama, ratio, max_model_len=None)


def test_scorers_of_engines(configure, folder, llama, tmp_path):
    sizes = {"sinks": 4, "window": 16, "topk": 44}
    scorer = write_random_scorer(tmp_path / "scorer", llama, "mlstm", **sizes)
    kvpop = {"policy": "kvpop", "scorer": str(scorer)}
    configure(llama, kvpop)
    assert "--kv-window 32" in refusal(configure, llama, kvpop | {"window": 32})
    assert "--kv-policy kvpop" in refusal(configure, llama, kvpop | {"policy": "kvpop-mlp"})
    fewer_heads = folder("other", LLAMA | {"num_key_value_heads": 1})
    message = refusal(configure, fewer_heads, kvpop)
    assert "num_kv_heads" in message and "--kv-scorer" in message
    for changes, named in (({"num_kv_heads": 4}, "has shape"), ({"num_layers": 3}, "layers.2.decay_logit is missing")):
        right = (scorer / CONFIG_NAME).read_text()
        edit(scorer / CONFIG_NAME, **changes)
        assert named in refusal(configure, llama, kvpop)
        (scorer / CONFIG_NAME).write_text(right)


def test_gates_of_engines(configure, folder, llama, tmp_path):
    """Channels that are borrowed in other places are refused, and windows that are too narrow for a threshold."""
    qwen2 = folder("qwen2", text("Qwen2ForCausalLM", "qwen2"))
    borrows = {"policy": "dms", "scorer": str(write_random_scorer(tmp_path / "query", qwen2, "dms", reads="query"))}
    message = refusal(configure, qwen2, borrows)
    assert "the gate borrows a channel of the queries" in message and "not in qwen2: choose another scorer" in message
    over_kv = write_random_scorer(tmp_path / "kv", llama, "trimkv", reads="kv")
    message = refusal(configure, llama, {"policy": "trimkv", "scorer": str(over_kv)}, tensor_parallel_size=2)
    assert message.endswith("reads the keys and values of all heads: set --tensor-parallel-size 1")
    gate = {"policy": "trimkv", "scorer": str(write_random_scorer(tmp_path / "cached", llama, "trimkv"))}
    message = refusal(configure, llama, gate, load_format="ipc_cache")
    assert message == (
        "--kv-policy trimkv, which has a gate, cannot be combined with weights of a weight cache: leave --load-format"
        " ipc_cache out"
    )
    configure(llama, STREAMING, load_format="ipc_cache")
    for shifted in (False, True):
        scorer = write_random_scorer(tmp_path / f"own-{shifted}", llama, "dms", shifted=shifted)
        message = refusal(configure, llama, {"policy": "dms", "scorer": str(scorer), "window": 1})
        assert message == "--kv-policy dms needs a window of two tokens: set --kv-window to at least 2"
    scorer = write_random_scorer(tmp_path / "early", llama, "kvzap")
    early = {"policy": "kvzap", "scorer": str(scorer), "window": 1}
    configure(llama, early)
    message = refusal(configure, llama, early | {"threshold": -4})
    assert message == "--kv-policy kvzap needs a window of two tokens: set --kv-window to at least 2"


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o", "trimkv", "kvpop"])
def test_a_threshold_of_a_policy_without(configure, llama, tmp_path, policy):
    settings = {"policy": policy, "threshold": 0.5}
    if policy in ("trimkv", "kvpop"):
        settings["scorer"] = str(write_random_scorer(tmp_path, llama, {"kvpop": "mlstm"}.get(policy, policy)))
    else:
        settings["budget"] = 64
    message = refusal(configure, llama, settings)
    assert message == f"--kv-policy {policy} has no threshold: leave --kv-threshold out"


def test_streaming_input(configure, llama):
    """A streaming request is refused by the wrapper, and a plain one goes on to vLLM's own checks."""
    from vllm.v1.engine.input_processor import InputProcessor

    processor = InputProcessor.__new__(InputProcessor)
    processor.vllm_config, arguments = configure(llama), ("0", {"prompt_token_ids": [1]}, None, ("generate",))
    message = refusal(processor.process_inputs, *arguments, resumable=True)
    assert "streaming-input" in message and "--kv-policy streaming-llm" in message
    with pytest.raises(TypeError, match="SamplingParams"):
        processor.process_inputs(*arguments)


BIAS = "model.layers.1.self_attn.kvpop.out.bias"
SECTIONS = [
    ("section kvpop: key 'topk' is missing", {"topk": ...}),
    ("version 2", {"version": 2}),
    ("head_dim", {"head_dim": 64}),
    ("--kv-policy kvpop-mlp", dict.fromkeys(("feature_map", "gate_softcap", "norm", "skip", "delayed"), ...) | {"scorer": "mlp"}),
]  # fmt: skip
SHARDS = [
    ("layers.1.out.bias is missing", {BIAS: ...}),
    ("layers.1.out.bias has shape (3,), expected (2,)", {BIAS: torch.zeros(3)}),
    ("model.layers.{i}.self_attn.kvpop_x.bias;", {BIAS.replace("kvpop.out", "kvpop_x"): torch.zeros(2)}),
    ("layers.9.out.bias", {BIAS.replace("1", "9"): torch.zeros(2)}),
]


def test_full_checkpoints(configure, exported, tmp_path):
    """Sections and tensors that are damaged are named before weights load."""
    copy, kvpop = shutil.copytree(exported.full, tmp_path / "copy"), {"policy": "kvpop"}
    right = json.loads((copy / "config.json").read_text())
    for named, changes in SECTIONS:
        section = {key: value for key, value in (right["kvpop"] | changes).items() if value is not ...}
        edit(copy / "config.json", kvpop=section)
        assert named in refusal(configure, copy, kvpop)
    edit(copy / "config.json", kvpop=...)
    assert "config.json does not say sinks and window and topk" in refusal(configure, copy, kvpop)
    edit(copy / "config.json", kvpop=right["kvpop"], architectures=["Qwen3ForCausalLM"])
    assert "must be one of LlamaKVpopForCausalLM" in refusal(configure, copy, kvpop)
    edit(copy / "config.json", **right)
    shard = (copy / SCORER_SHARD).read_bytes()
    for named, changes in SHARDS:
        edit_tensors(copy / SCORER_SHARD, **changes)
        assert named in refusal(configure, copy, kvpop)
        (copy / SCORER_SHARD).write_bytes(shard)
    renamed = {
        name.replace("self_attn.kvpop", "self_attn.retention"): t for name, t in load_file(copy / SCORER_SHARD).items()
    }
    save_file(renamed, copy / SCORER_SHARD)
    assert "names found" in refusal(configure, copy, kvpop)
    message = refusal(configure, exported.full, kvpop, load_format="dummy")
    assert "--load-format dummy brings no scorer" in message and "give --kv-scorer DIR" in message


# Commands.

BENCH = ["--model", "MODEL", "--kv-policy", "streaming-llm", "--kv-budget", "5"]
COMMANDS = [
    ("--kv-budget to at least 6", ["bench", "latency", *BENCH]),
    ("--kv-budget to at least 7", ["bench", "throughput", *BENCH, "--kv-sinks", "5", "--random-input-len", "8"]),
]


@pytest.fixture(scope="module")
def words_of(folder):
    """Return a function that completes a command of vLLM. Its model has a tokenizer.

    ``vllm bench throughput`` makes its prompts before it checks anything else.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = folder("with-tokenizer", LLAMA)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(LLAMA["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    vllm = str(Path(sys.executable).with_name("vllm"))
    return lambda words: [vllm, *(str(model) if w == "MODEL" else w for w in words), "--max-model-len", "256"]


def test_a_command_prints_one_line_and_no_traceback_and_fails(words_of):
    command = words_of(["serve", "MODEL", "--kv-policy", "h3o"])
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode not in (0, None) and "Traceback" not in run.stdout + run.stderr
    lines = [line for line in (run.stdout + run.stderr).splitlines() if "kvpop: error:" in line]
    assert len(lines) == 1 and run.stderr.rstrip().endswith(lines[0]), run.stderr
    assert lines[0].startswith("kvpop: error: ") and "--kv-policy takes" in lines[0]


@pytest.mark.parametrize("named, words", COMMANDS, ids=["latency", "throughput"])
def test_other_commands(configure, words_of, monkeypatch, named, words):
    """Other commands print the same line. They run in this process, because a new one would mostly import."""
    from vllm.entrypoints.cli.main import main

    monkeypatch.setattr(sys, "argv", words_of(words))
    with pytest.raises(SystemExit) as ended:
        main()
    message = ended.value.code
    assert message.startswith("kvpop: error: ") and "\n" not in message and named in message
