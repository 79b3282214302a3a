"""Scorer files and the tensor names of full checkpoints. Wrong files are in tests/test_refusals.py."""

import json
import os
import re

import pytest
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import Decay, checkpoint, from_tensors, make_config, parse_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, TENSORS_NAME
from kvpop_vllm.scorers.init import model_shape
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

KINDS = ("mlstm", "mlp", "linear")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=2)


@pytest.fixture
def scorer(model, tmp_path):
    return write_random_scorer(tmp_path / "scorer", model, "mlstm", norm=True, skip=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(model, tmp_path, kind):
    source = write_random_scorer(tmp_path / "a", model, kind)
    config, layers = checkpoint.read_scorer(source)
    checkpoint.write_scorer(tmp_path / "b", config, layers)
    again, same = checkpoint.read_scorer(tmp_path / "b")
    assert again == config and config.scorer == kind and len(layers) == 2
    for a, b in zip(layers, same, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("target", [f"{checkpoint.__name__}.save_file", "os.replace"])
def test_a_write_that_fails_leaves_what_was_there(model, scorer, tmp_path, monkeypatch, target):
    """A write that fails leaves no partial file, and a new folder gets no config without its tensors."""
    config, layers = checkpoint.read_scorer(write_random_scorer(tmp_path / "other", model, seed=1))
    before = {file.name: file.read_bytes() for file in scorer.iterdir()}

    def fail(*args, **options):
        if target != "os.replace":
            args[1].write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(target, fail)
    for folder in (scorer, tmp_path / "new"):
        with pytest.raises(OSError, match="disk full"):
            checkpoint.write_scorer(folder, config, layers)
    assert {file.name: file.read_bytes() for file in scorer.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_the_config_is_written_last(model, scorer, tmp_path, monkeypatch):
    config, layers = checkpoint.read_scorer(scorer)
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, name: (order.append(name.name), replace(source, name)))
    checkpoint.write_scorer(tmp_path / "new", config, layers)
    assert order == [TENSORS_NAME, CONFIG_NAME]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(order)
    assert len({file.stat().st_mode for file in (tmp_path / "new").iterdir()}) == 1


def test_shapes_may_differ_from_the_defaults(model, tmp_path):
    for i, options in enumerate([{"features": 8, "value_width": 24}, {"v_proj": False}, {"feature_map": "softmax"}]):
        config, layers = checkpoint.read_scorer(write_random_scorer(tmp_path / str(i), model, **options))
        assert from_tensors(config, layers[0]).weights().q_proj.shape == layers[0]["q_proj"].shape


def test_scorers_are_float32_whatever_the_default_dtype(scorer):
    """Scorers stay float32 although vLLM loads weights with the model's dtype as torch's default."""
    config, layers = checkpoint.read_scorer(scorer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = from_tensors(config, layers[1])
    finally:
        torch.set_default_dtype(before)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, layers[1][name])


def test_only_a_delayed_mlstm_fixes_the_window(model, tmp_path):
    delayed = {
        kind: checkpoint.read_config(write_random_scorer(tmp_path / kind, model, kind)).retention.delayed
        for kind in KINDS
    }
    assert delayed == {"mlstm": True, "mlp": False, "linear": False}
    ablation = write_random_scorer(tmp_path / "now", model, delayed=False)
    assert not checkpoint.read_config(ablation).retention.delayed


@pytest.mark.parametrize("kind", KINDS)
def test_files_may_say_that_every_step_decides(model, tmp_path, kind):
    """A config may contain ``decide_every`` only with the value 1, and written configs omit it."""
    folder = write_random_scorer(tmp_path / "scorer", model, kind)
    plain = checkpoint.read_config(folder)
    (folder / CONFIG_NAME).write_text(json.dumps(plain.to_json() | {"decide_every": 1}))
    assert checkpoint.read_config(folder) == plain and "decide_every" not in plain.to_json()


@pytest.mark.parametrize("kind, length", [("mlstm", "V"), ("mlp", "M")])
def test_sizes_of_nothing(model, tmp_path, kind, length):
    """Sizes of 0 are refused by the shapes alone, which is how a full checkpoint is checked."""
    config = checkpoint.read_config(write_random_scorer(tmp_path / "scorer", model, kind))
    sizes = {"F": 8, "V": 8, "M": 8} | {length: 0}
    shapes = {n: tuple(sizes.get(axis, axis) for axis in s) for n, s in config.shapes({"v_proj"}).items()}
    with pytest.raises(ConfigError):
        checkpoint.check_shapes(config, [shapes] * config.num_layers, "file")


def test_a_full_checkpoints_layers_are_counted_plainly():
    name = "model.layers.{}.self_attn.kvpop.out.bias"
    assert checkpoint.full_checkpoint_name(name.format(10)) == "layers.10.out.bias"


def test_a_scorer_made_for_a_full_checkpoint_is_its_base_models(model, tmp_path):
    raw = json.loads((model / "config.json").read_text())
    for kind, found in (("qwen3_kvpop", "qwen3"), ("qwen3", "qwen3"), (None, None)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": kind}))
        assert model_shape(tmp_path)["model_type"] == found


def test_defaults_are_the_papers():
    shape = {"model_type": "llama", "num_layers": 1, "num_kv_heads": 1, "head_dim": 32}
    config = make_config(shape, "mlstm", source="test", sinks=4, window=16, topk=44)
    assert config.decay == Decay(1, 0.999, 0.999999) and config.feature_map == "hedgehog" and config.delayed
    assert parse_config(config.to_json(), "x") == config


FULL = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.11.mlp.up_proj.weight"]


def test_full_checkpoint_names():
    for i, name in ((0, "decay_logit"), (11, "igate.weight")):
        target = checkpoint.full_checkpoint_target(i, name)
        assert target == f"model.layers.{i}.self_attn.kvpop.{name}" and checkpoint.looks_like_scorer(target)
        assert checkpoint.full_checkpoint_name(target) == f"layers.{i}.{name}"
    for name in FULL:
        assert checkpoint.full_checkpoint_name(name) is None and not checkpoint.looks_like_scorer(name)


def test_another_layout_is_one_more_row(monkeypatch):
    row = (
        re.compile(r"^model\.layers\.(?P<layer>\d+)\.retention\.(?P<gate>\w)_gate\.(?P<name>\w+)$"),
        "{gate}gate.{name}",
    )
    monkeypatch.setattr(checkpoint, "FULL_CHECKPOINT_NAMES", (*checkpoint.FULL_CHECKPOINT_NAMES, row))
    assert checkpoint.full_checkpoint_name("model.layers.3.retention.i_gate.bias") == "layers.3.igate.bias"
