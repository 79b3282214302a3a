"""Scorer files and the tensor names of full checkpoints: round trips, and every kind of wrong file."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import Decay, checkpoint, from_tensors, make_config, parse_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, TENSORS_NAME
from kvpop_vllm.scorers.init import init_scorer, model_shape
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

KINDS = ("mlstm", "mlp", "linear")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=2)


@pytest.fixture
def scorer(model, tmp_path):
    return write_random_scorer(tmp_path / "scorer", model, "mlstm", norm=True, skip=True)


def refusal(call, *args, **options):
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def edit(path, **changes):
    raw = json.loads(path.read_text())
    raw |= {key: value for key, value in changes.items() if value is not ...}
    for key in [key for key, value in changes.items() if value is ...]:
        del raw[key]
    path.write_text(json.dumps(raw))


def edit_tensors(folder, change):
    tensors = load_file(folder / TENSORS_NAME)
    change(tensors)
    save_file(tensors, folder / TENSORS_NAME)


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


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_missing_file_is_named(scorer, name):
    (scorer / name).unlink()
    assert name in refusal(checkpoint.read_scorer, scorer)


def test_a_missing_folder_says_how_to_get_one(tmp_path):
    message = refusal(checkpoint.read_scorer, tmp_path / "nowhere")
    assert "--kv-scorer" in message and "kvpop init-scorer" in message


@pytest.mark.parametrize("text", ["", "{", "[1]", '"kvpop"'])
def test_a_config_that_is_no_json_object(scorer, text):
    (scorer / CONFIG_NAME).write_text(text)
    message = refusal(checkpoint.read_config, scorer)
    assert CONFIG_NAME in message and "JSON" in message


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"format": "other"}, "'other'"),
        ({"format": ...}, "format None"),
        ({"version": 2}, "version 2"),
        ({"scorer": "lstm"}, "'lstm'"),
        ({"wnidow": 1}, "'wnidow'"),
        ({"topk": ...}, "'topk'"),
        ({"feature_map": ...}, "'feature_map'"),
        ({"feature_map": "relu"}, "'relu'"),
        ({"model_type": 1}, "model_type"),
        ({"num_layers": 0}, "num_layers"),
        ({"head_dim": "64"}, "head_dim"),
        ({"sinks": -1}, "sinks"),
        ({"window": 0}, "window"),
        ({"topk": True}, "topk"),
        ({"topk": 2**31}, "topk"),
        ({"sinks": 2**40}, "sinks"),
        ({"window": 2**40}, "window"),
        ({"decay": {"step": 2**31, "min": 0.9, "max": 0.99}}, "decay.step"),
        ({"decay": {"step": 2**70, "min": 0.9, "max": 0.99}}, "decay.step"),
        ({"gate_softcap": 0}, "gate_softcap"),
        ({"gate_softcap": True}, "gate_softcap"),
        ({"gate_softcap": 10**400}, "gate_softcap"),
        ({"gate_softcap": 1e-300}, "gate_softcap"),
        ({"norm": 1}, "norm"),
        ({"delayed": None}, "delayed"),
        ({"decay": 0.9}, "decay"),
        ({"decay": {"min": 0.9, "max": 0.99}}, "decay"),
        ({"decay": {"step": 0, "min": 0.9, "max": 0.99}}, "decay.step"),
        ({"decay": {"step": True, "min": 0.9, "max": 0.99}}, "decay.step"),
        ({"decay": {"step": 1, "min": 0.99, "max": 0.9}}, "min <= max"),
        ({"decay": {"step": 1, "min": 0, "max": 0.9}}, "0 < min"),
        ({"decay": {"step": 1, "min": 0.9, "max": "1"}}, "min <= max"),
        ({"trained": 5}, "trained"),
        ({"trained": [[16, 44]]}, "window and topk"),
        ({"trained": [{"window": 16}]}, "window and topk"),
        ({"trained": [{"window": 0, "topk": 1}]}, "trained: window must be"),
        ({"trained": [{"window": 1, "topk": True}]}, "trained: topk must be"),
        ({"trained": [{"window": 1, "topk": 1}]}, "trained must begin with window"),
    ],
)
def test_wrong_config_values(scorer, changes, named):
    edit(scorer / CONFIG_NAME, **changes)
    message = refusal(checkpoint.read_config, scorer)
    assert CONFIG_NAME in message and named in message


@pytest.mark.parametrize("kind", KINDS)
def test_files_may_say_that_every_step_decides(model, tmp_path, kind):
    """A config may contain ``decide_every`` only with the value 1, and written configs omit it."""
    folder = write_random_scorer(tmp_path / "scorer", model, kind)
    plain = checkpoint.read_config(folder)
    edit(folder / CONFIG_NAME, decide_every=1)
    assert checkpoint.read_config(folder) == plain and "decide_every" not in plain.to_json()
    for other in (0, 2, 8, "1", None):
        edit(folder / CONFIG_NAME, decide_every=other)
        assert refusal(checkpoint.read_config, folder).endswith(f"{CONFIG_NAME}: unknown key 'decide_every'")


def test_mlstm_keys_do_not_belong_to_other_scorers(model, tmp_path):
    folder = write_random_scorer(tmp_path / "linear", model, "linear")
    edit(folder / CONFIG_NAME, norm=False)
    assert "'norm'" in refusal(checkpoint.read_config, folder)


def test_a_truncated_tensor_file(scorer):
    data = (scorer / TENSORS_NAME).read_bytes()
    for length in (0, 5, 200, len(data) - 4):
        (scorer / TENSORS_NAME).write_bytes(data[:length])
        message = refusal(checkpoint.read_scorer, scorer)
        assert TENSORS_NAME in message and "complete" in message


def without(name):
    return lambda tensors: tensors.pop(name)


def with_tensor(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "change, named",
    [
        (without("layers.1.igate.bias"), "layers.1.igate.bias is missing"),
        (without("layers.1.v_proj"), "layers.1.v_proj is missing"),
        (without("layers.0.norm.weight"), "layers.0.norm.weight is missing"),
        (with_tensor("layers.0.extra", torch.zeros(2)), "layers.0.extra does not belong"),
        (with_tensor("layers.2.decay_logit", torch.zeros(2)), "'layers.2.decay_logit'"),
        (with_tensor("layers.01.decay_logit", torch.zeros(2)), "'layers.01.decay_logit'"),
        (with_tensor("layers.00.decay_logit", torch.zeros(2)), "'layers.00.decay_logit'"),
        (with_tensor(f"layers.{'9' * 5000}.decay_logit", torch.zeros(2)), "'layers.999"),
        (with_tensor("decay_logit", torch.zeros(2)), "'decay_logit'"),
        (with_tensor("layers.1.decay_logit", torch.zeros(3)), "layers.1.decay_logit has shape (3,), expected (2,)"),
        (with_tensor("layers.0.q_proj", torch.zeros(2, 60, 16)), "layers.0.q_proj has shape"),
        (with_tensor("layers.0.q_proj", torch.zeros(2, 64, 0)), "no size may be 0"),
        (with_tensor("layers.1.k_proj", torch.zeros(2, 64, 8)), "layers.1.k_proj has shape"),
        (with_tensor("layers.0.out.bias", torch.zeros(2, 1)), "layers.0.out.bias has shape (2, 1), expected (2,)"),
        (with_tensor("layers.1.out.bias", torch.tensor([0.0, torch.nan])), "layers.1.out.bias holds values"),
        (with_tensor("layers.1.out.bias", torch.zeros(2, dtype=torch.int32)), "layers.1.out.bias holds values"),
    ],
)
def test_wrong_tensors(scorer, change, named):
    edit_tensors(scorer, change)
    message = refusal(checkpoint.read_scorer, scorer)
    assert TENSORS_NAME in message and named in message


@pytest.mark.parametrize("kind, length", [("mlstm", "V"), ("mlp", "M")])
def test_sizes_of_nothing(model, tmp_path, kind, length):
    """Sizes of 0 are refused by the shapes alone, which is how a full checkpoint is checked."""
    config = checkpoint.read_config(write_random_scorer(tmp_path / "scorer", model, kind))
    sizes = {"F": 8, "V": 8, "M": 8} | {length: 0}
    shapes = {n: tuple(sizes.get(axis, axis) for axis in s) for n, s in config.shapes({"v_proj"}).items()}
    assert "no size may be 0" in refusal(checkpoint.check_shapes, config, [shapes] * config.num_layers, "file")


def test_a_full_checkpoints_layers_are_counted_plainly():
    name = "model.layers.{}.self_attn.kvpop.out.bias"
    assert checkpoint.full_checkpoint_name(name.format(10)) == "layers.10.out.bias"
    assert "layers.{i}.self_attn.kvpop.out.bias" in refusal(
        checkpoint.check_layout, [name.format(0), name.format("00")], "file"
    )


def test_a_scorer_made_for_a_full_checkpoint_is_its_base_models(model, tmp_path):
    raw = json.loads((model / "config.json").read_text())
    for kind, found in (("qwen3_kvpop", "qwen3"), ("qwen3", "qwen3"), (None, None)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": kind}))
        assert model_shape(tmp_path)["model_type"] == found
    assert "model_type must be a string" in refusal(init_scorer, tmp_path, tmp_path / "scorer")


def test_optional_tensors_must_match_their_flags(scorer):
    edit(scorer / CONFIG_NAME, norm=False)
    assert "layers.0.norm.weight does not belong" in refusal(checkpoint.read_scorer, scorer)


def test_a_scorer_of_another_model_names_the_difference(scorer):
    config = checkpoint.read_config(scorer)
    shape = {"model_type": "qwen3", "num_layers": 2, "num_kv_heads": 2, "head_dim": 32}
    checkpoint.check_model(config, **shape, source="s")
    for key, other in {"model_type": "llama", "num_layers": 3, "num_kv_heads": 4, "head_dim": 64}.items():
        message = refusal(checkpoint.check_model, config, **(shape | {key: other}), source="s")
        assert key in message and repr(other) in message and "--kv-scorer" in message


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


def test_an_unknown_layout_is_refused_with_the_names_found():
    unknown = [f"model.layers.{i}.retention.{name}" for i in range(40) for name in ("query", "gate.0.weight")]
    message = refusal(checkpoint.check_layout, [*FULL, *unknown], "checkpoint")
    assert "model.layers.{i}.retention.query, " not in message.split("names found")[0]
    assert "model.layers.{i}.retention.gate.{i}.weight, model.layers.{i}.retention.query;" in message
    assert "q_proj" not in message and "FULL_CHECKPOINT_NAMES" in message


def test_names_beside_a_known_layout_are_refused_when_they_look_like_ours():
    known = checkpoint.full_checkpoint_target(0, "bias")
    checkpoint.check_layout([*FULL, known], "checkpoint")
    message = refusal(checkpoint.check_layout, [*FULL, known, "model.kvpop_gate.weight"], "checkpoint")
    assert "found that are neither theirs nor the model's own: model.kvpop_gate.weight;" in message
    assert "none;" in refusal(checkpoint.check_layout, FULL, "checkpoint")
