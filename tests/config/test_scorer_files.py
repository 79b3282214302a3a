"""Scorer files and the tensor names of full checkpoints. Wrong files are in tests/test_refusals.py."""

import json

import pytest
import torch

from kvpop_vllm.scorers import checkpoint, from_tensors
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME
from kvpop_vllm.testing import write_random_scorer

KINDS = ("mlstm", "mlp", "linear", "trimkv", "dms", "kvzap")


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
    assert config.retention.delayed == (kind == "mlstm")
    for a, b in zip(layers, same, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("target", ["kvpop_vllm.tensor_files.save_file", "os.replace"])
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


@pytest.mark.parametrize("kind", ["mlstm", "mlp", "linear"])
def test_files_may_say_that_every_step_decides(model, tmp_path, kind):
    """A config may contain ``decide_every`` only with the value 1, and written configs omit it."""
    folder = write_random_scorer(tmp_path / "scorer", model, kind)
    plain = checkpoint.read_config(folder)
    (folder / CONFIG_NAME).write_text(json.dumps(plain.to_json() | {"decide_every": 1}))
    assert checkpoint.read_config(folder) == plain and "decide_every" not in plain.to_json()


FULL = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.11.mlp.up_proj.weight"]


def test_full_checkpoint_names():
    for i, name in ((0, "decay_logit"), (11, "igate.weight")):
        target = checkpoint.full_checkpoint_target(i, name)
        assert target == f"model.layers.{i}.self_attn.kvpop.{name}" and checkpoint.looks_like_scorer(target)
        assert checkpoint.full_checkpoint_name(target) == f"layers.{i}.{name}"
    for name in FULL:
        assert checkpoint.full_checkpoint_name(name) is None and not checkpoint.looks_like_scorer(name)
