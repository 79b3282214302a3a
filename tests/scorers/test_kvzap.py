"""Published gates of KVzap: files of kvpress's own class (tests/data/kvzap.py) are read as they are, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scorers.hub_server import lay_out

from kvpop_vllm import policies
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers import Signals
from kvpop_vllm.scorers.checkpoint import read_config, read_scorer
from kvpop_vllm.testing import raw_scores
from kvpop_vllm.testing import read_scorer as read_by_the_oracle

DATA = Path(__file__).parents[1] / "data" / "kvzap"
SCORES = load_file(DATA / "scores.safetensors")
KINDS = ("mlp", "linear")
SHAPE = ModelShape("qwen3", 2, 2, 32, 40960, hidden_size=64)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def published(kind, tmp_path):
    """Return a copy of a published folder."""
    return Path(shutil.copytree(DATA / kind, tmp_path / "published"))


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def policy(scorer, **settings):
    return policies.get("kvzap")(PolicySettings("kvzap", scorer=str(scorer), **settings), SHAPE)


def test_scores_are_those_of_kvpress(kind):
    resolved, theirs, hidden = policy(DATA / kind), SCORES[f"{kind} scores"], SCORES["hidden"]
    with safe_open(DATA / "scores.safetensors", "pt") as file:
        assert file.metadata()["kvpress"] == "0.5.5"
    assert theirs.std() > 0.5
    for layer in range(2):
        scores = resolved.gate(layer, slice(0, 2))(Signals(hidden))
        torch.testing.assert_close(scores[0].T, theirs[layer], rtol=1e-5, atol=1e-5)


def test_budget_and_window_are_defaults_or_flags(kind):
    roles = policy(DATA / kind).retention
    assert (roles.budget, roles.sinks, roles.window) == (4096, 4, 128)
    roles = policy(DATA / kind, budget=1000, sinks=0, window=64).retention
    assert (roles.budget, roles.sinks, roles.window) == (1000, 0, 64)
    assert policy(DATA / kind).layer_rule(0, slice(0, 2)).threshold is None
    early = policy(DATA / kind, threshold=-4)
    assert early.layer_rule(0, slice(0, 2)).threshold == -4 and early.drops_early
    with pytest.raises(ConfigError, match="a budget of 132 is too small for 4 sinks . window 128 . 1: raise"):
        policy(DATA / kind, budget=132)


def test_a_name_of_the_hub(kind, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay_out(tmp_path, f"nvidia/KVzap-{kind}-Tiny", {"main": DATA / kind})
    assert policy(f"nvidia/KVzap-{kind}-Tiny").config == policy(DATA / kind).config


def test_import_writes_what_the_oracle_reads(kind, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["import", str(DATA / kind), str(out), "--topk", "60", "--window", "32"]) == 0, capsys.readouterr()
    config = read_config(out)
    assert (config.scorer, config.sinks, config.window, config.topk) == ("kvzap", 4, 32, 60)
    assert (config.linear, config.model_type, config.head_dim) == (kind == "linear", None, None)
    hidden, theirs = SCORES["hidden"][0].double(), SCORES[f"{kind} scores"]
    keys = torch.zeros(2, len(hidden), 32, dtype=torch.float64)
    for layer in range(2):
        scores = raw_scores(read_by_the_oracle(out), layer, keys, keys, 32, hidden)
        torch.testing.assert_close(scores.float(), theirs[layer], rtol=1e-5, atol=1e-5)
    roles = policy(out).retention
    assert (roles.budget, roles.window) == (96, 32)


def test_an_imported_scorer_goes_before_the_published_one(published):
    assert main(["import", str(published), str(published), "--topk", "60"]) == 0
    assert policy(published).retention.budget == 192


def test_shards(kind, published):
    (file,) = published.glob("*.safetensors")
    tensors = load_file(file)
    for i in range(2):
        mine = {name: tensor for name, tensor in tensors.items() if name.startswith(f"layers.{i}.")}
        save_file(mine, published / f"model-0000{i + 1}-of-00002.safetensors")
    file.unlink()
    for layer, expected in zip(read_scorer(published)[1], read_scorer(DATA / kind)[1], strict=True):
        assert layer.keys() == expected.keys() and all(torch.equal(layer[name], expected[name]) for name in layer)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"input_dim": ...},
            "input_dim must be an integer from 1 to 16777216, got None: give a folder that KVzapModel",
        ),
        ({"n_modules": 0}, "n_modules must be an integer from 1"),
        ({"output_dim": "2"}, "output_dim must be an integer from 1 to 16777216, got '2'"),
        ({"hidden_dim": 1.5}, "hidden_dim must be an integer from 1 to 16777216, or null, got 1.5"),
        ({"n_modules": 1}, "unexpected tensor"),
        ({"n_modules": 3}, "layers.2."),
        ({"output_dim": 3}, "expected (3"),
        ({"input_dim": 65}, "65)"),
    ],
    ids=str,
)
def test_wrong_configs(published, changes, message):
    edit(published, **changes)
    with pytest.raises(ConfigError) as error:
        read_scorer(published)
    assert message in str(error.value) and "\n" not in str(error.value) and str(published) in str(error.value)


def test_config_and_tensors_that_disagree(published, kind):
    edit(published, hidden_dim=17 if kind == "mlp" else 16)
    wrong = "layers.0.fc1.weight has 16 rows and hidden_dim is 17" if kind == "mlp" else "layers.0.bias does not belong"
    with pytest.raises(ConfigError, match=wrong):
        read_scorer(published)


def test_tensors_of_two_files(published):
    (file,) = published.glob("*.safetensors")
    shutil.copy(file, published / "old.safetensors")
    with pytest.raises(ConfigError, match="old.safetensors holds .* a second time: give a folder"):
        read_scorer(published)


def test_folders_without_tensors_and_pickles(published):
    (file,) = published.glob("*.safetensors")
    torch.save(load_file(file), published / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ConfigError, match="holds no tensors in safetensors files: give a folder"):
        read_scorer(published)


def test_another_model_and_another_policy(kind):
    wide = ModelShape("qwen3", 2, 2, 32, 256, hidden_size=128)
    with pytest.raises(
        ConfigError, match="made for a model with hidden_size = 64, this one has 128: give a scorer for"
    ):
        policies.get("kvzap")(PolicySettings("kvzap", scorer=str(DATA / kind)), wide)
    with pytest.raises(ConfigError, match="holds 'kvzap': use --kv-policy kvzap"):
        policies.get("kvpop")(PolicySettings("kvpop", scorer=str(DATA / kind)), SHAPE)
    with pytest.raises(ConfigError, match="--kv-map is for full checkpoints of other authors"):
        policy(DATA / kind, map="map.json")
