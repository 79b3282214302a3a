"""Published cartridges: imported in a process of their own, in which no pickle runs code."""

import pytest
import torch

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import read_cartridge
from kvpop_vllm.compaction.published import layers_of
from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing.models import write_tiny_model

LAYERS, HEADS, DIM = 2, 2, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("import") / "model")


def published(fixed, trainable, kind=torch.nn.ParameterList, seed=0):
    """Return what TrainableCache.save of HazyResearch/cartridges hands to torch.save."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(count):
        drawn = [torch.randn(1, HEADS, count, DIM, generator=generator) for _ in range(LAYERS if count else 0)]
        return kind([torch.nn.Parameter(tensor) for tensor in drawn] if kind is torch.nn.ParameterList else drawn)

    sizes = {"trainable_keys": trainable, "trainable_values": trainable, "fixed_keys": fixed, "fixed_values": fixed}
    return {name: tensors(count) for name, count in sizes.items()}


@pytest.mark.parametrize(
    ("fixed", "trainable", "kind"), [(1, 127, torch.nn.ParameterList), (0, 100, torch.nn.ParameterList), (1, 100, list)]
)
def test_published_cartridge(tmp_path, model, fixed, trainable, kind, capsys):
    source = published(fixed, trainable, kind)
    torch.save(source, tmp_path / "cache-step10.pt")
    assert main(["import", str(tmp_path / "cache-step10.pt"), str(tmp_path / "out"), "--model", str(model)]) == 0
    assert "wrote a cartridge of" in capsys.readouterr().out
    cartridge, tokens = read_cartridge(tmp_path / "out"), fixed + trainable
    assert cartridge.config.next_position == tokens and cartridge.config.slots == -(-tokens // 64) * 64
    for i, (k, v, bias) in enumerate(cartridge.layers):
        for read_part, part in ((k, "keys"), (v, "values")):
            pieces = [source[f"{name}_{part}"][i] for name in ("fixed", "trainable") if len(source[f"{name}_{part}"])]
            assert torch.equal(read_part[:, :tokens], torch.cat(pieces, 2)[0]) and not read_part[:, tokens:].any()
        assert (bias is None) == (tokens % 64 == 0)
        assert bias is None or (not bias[:, :tokens].any() and (bias[:, tokens:] < -1e29).all())


def test_a_folder_and_other_names(tmp_path, model):
    source = {name.replace("fixed", "frozen"): tensor for name, tensor in published(1, 63, list).items()}
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save(source, folder / "kv_cache.torch")
    assert main(["import", str(folder), str(tmp_path / "out"), "--model", str(model)]) == 0
    assert read_cartridge(tmp_path / "out").config.slots == 64


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def hostile(path):
    return published(0, 64, list) | {"trainable_keys": [Hostile(path.parent / "was run")]}


REFUSALS = {
    "code": (hostile, "tensors alone: UnpicklingError: it holds more than tensors and lists"),
    "no cartridge": (lambda path: [1, 2], "no dict with trainable_keys"),
    "more": (lambda path: published(0, 64, list) | {"optimizer": {}}, "unknown key 'optimizer'"),
    "one part by two names": (
        lambda path: (source := published(4, 60, list)) | {"frozen_values": source["fixed_values"]},
        "fixed_values and frozen_values, which are two names of the same",
    ),
    "no tensors": (lambda path: published(0, 64, list) | {"fixed_keys": [3]}, "fixed_keys is not a list of tensors"),
    "larger than the file": (
        lambda path: published(0, 64, list) | {"trainable_keys": [torch.zeros(1).expand(1, 2, 1 << 30, 32)] * 2},
        "larger than the file",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path, model, capsys, case):
    make, message = REFUSALS[case]
    source = tmp_path / "cache.pt"
    torch.save(make(source), source)
    assert main(["import", str(source), str(tmp_path / "out"), "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.pt"]


def test_the_hostile_pickle_is_hostile(tmp_path):
    torch.save(hostile(tmp_path / "cache.pt"), tmp_path / "cache.pt")
    torch.load(tmp_path / "cache.pt", weights_only=False)
    assert (tmp_path / "was run").exists()


MISFITS = {
    "other model": (
        lambda tensors: {n: t[..., :16] for n, t in tensors.items()},
        "give --model the cartridge's base model",
    ),
    "no batch": (lambda tensors: {n: t[0] for n, t in tensors.items()}, "give --model the cartridge's base model"),
    "a layer less": (lambda tensors: {n: t for n, t in tensors.items() if n[-1] == "0"}, "no keys of layer 1"),
    "a layer more": (
        lambda tensors: tensors | {"fixed_keys.2": torch.zeros(1)},
        "fixed_keys.2, a layer that the model lacks",
    ),
    "a token more": (
        lambda tensors: tensors | {"fixed_keys.1": torch.zeros(1, HEADS, 1, DIM)},
        "another number of tokens",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_of_another_model(model, case):
    change, message = MISFITS[case]
    tensors = {f"{name}.{i}": tensor for name, owns in published(0, 64, list).items() for i, tensor in enumerate(owns)}
    assert layers_of(tensors, base_of(model), "file")[1] == 64
    with pytest.raises(ConfigError, match=message):
        layers_of(change(tensors), base_of(model), "file")


def test_damaged_file(tmp_path, model, capsys):
    torch.save(published(0, 64), tmp_path / "cache.pt")
    content = (tmp_path / "cache.pt").read_bytes()
    (tmp_path / "cache.pt").write_bytes(content[: len(content) // 2])
    assert main(["import", str(tmp_path / "cache.pt"), str(tmp_path / "out"), "--model", str(model)]) == 2
    assert "cannot be read as a cartridge's tensors" in capsys.readouterr().err


def test_options_of_the_other_kind(tmp_path, model, capsys):
    torch.save(published(0, 64), tmp_path / "cache.pt")
    assert main(["import", str(tmp_path / "cache.pt"), str(tmp_path / "out")]) == 2
    assert "give its base model with --model" in capsys.readouterr().err
    assert (
        main(["import", str(tmp_path / "cache.pt"), str(tmp_path / "out"), "--model", str(model), "--topk", "3"]) == 2
    )
    assert "no use for --topk" in capsys.readouterr().err
    assert main(["import", str(model), str(tmp_path / "out"), "--model", str(model)]) == 2
    assert "leave --model out" in capsys.readouterr().err
