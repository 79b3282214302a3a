"""Cartridge files: what is written is read, and everything else is refused with one line."""

import dataclasses
import json
import pickle
import struct
import time

import pytest
import torch
from safetensors.torch import save_file

from kvpop_vllm.compaction.base_model import base_of, check_base
from kvpop_vllm.compaction.cartridge import (
    CONFIG_NAME,
    TENSORS_NAME,
    CartridgeConfig,
    read_cartridge,
    read_config,
    write_cartridge,
)
from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing.models import write_tiny_model

LAYERS, HEADS, SLOTS, DIM = 2, 2, 64, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("cartridge") / "model")


@pytest.fixture
def config(model):
    return CartridgeConfig(
        **base_of(model), slots=SLOTS, next_position=300, method="test", provenance={"a": [1]}, head=[1, 5]
    )


def layers_of(dtype=torch.float32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (HEADS, SLOTS, DIM)
    return [
        (
            torch.randn(size, generator=generator).to(dtype),
            torch.randn(size, generator=generator).to(dtype),
            torch.randn(size[:2], generator=generator) if bias else None,
        )
        for _ in range(LAYERS)
    ]


def test_a_file_without_a_head_has_none(config, tmp_path):
    write_cartridge(tmp_path / "c", config, layers_of())
    path = tmp_path / "c" / CONFIG_NAME
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "head"}))
    assert read_cartridge(tmp_path / "c").config == dataclasses.replace(config, head=[])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_round_trip(tmp_path, config, dtype, bias):
    layers = layers_of(dtype, bias)
    write_cartridge(tmp_path / "new" / "cartridge", config, layers)
    cartridge = read_cartridge(tmp_path / "new" / "cartridge")
    assert cartridge.config == config == read_config(tmp_path / "new" / "cartridge")
    for layer, original in zip(cartridge.layers, layers, strict=True):
        for a, b in zip(layer, original, strict=True):
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def test_digest_follows_both_files(tmp_path, config):
    digests = []
    without_provenance = dataclasses.replace(config, provenance={})
    for name, content, seed in (("a", config, 0), ("b", config, 0), ("c", config, 1), ("d", without_provenance, 0)):
        write_cartridge(tmp_path / name, content, layers_of(seed=seed))
        digests.append(read_cartridge(tmp_path / name).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_full_folder_is_left_alone(tmp_path, config):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="choose another folder"):
        write_cartridge(tmp_path, config, layers_of())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wrong_tensors_are_not_written(tmp_path, config):
    layers = layers_of()
    layers[1][1][0, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layers.1.v"):
        write_cartridge(tmp_path / "new", config, layers)
    assert not (tmp_path / "new").exists()


def edited(**changes):
    """Return a change of the JSON file. A value of None removes the key."""

    def edit(folder):
        raw = json.loads((folder / CONFIG_NAME).read_text()) | changes
        (folder / CONFIG_NAME).write_text(json.dumps({n: v for n, v in raw.items() if v is not None}))

    return edit


def tensors(**changes):
    """Return a change of the tensors, by names with ``_`` for the dot. None removes one."""

    def edit(folder):
        named = {
            f"layers.{i}.{part}": tensor
            for i, layer in enumerate(layers_of())
            for part, tensor in zip(("k", "v", "bias"), layer, strict=True)
        }
        named |= {"layers." + name[1:].replace("_", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in named.items() if tensor is not None}, folder / TENSORS_NAME)

    return edit


def text(content):
    return lambda folder: (folder / CONFIG_NAME).write_bytes(content)


def raw_tensors(content):
    return lambda folder: (folder / TENSORS_NAME).write_bytes(content)


def cut(folder):
    content = (folder / TENSORS_NAME).read_bytes()
    (folder / TENSORS_NAME).write_bytes(content[: len(content) - 5])


def claim(shape):
    header = json.dumps({"layers.0.k": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def pickled_instead(folder):
    (folder / CONFIG_NAME).unlink()
    (folder / TENSORS_NAME).rename(folder / "cache.pt")


def pickled_tensors(folder):
    (folder / TENSORS_NAME).unlink()
    (folder / "weights.bin").write_bytes(pickle.dumps({}))


nan, small = torch.full((HEADS, SLOTS, DIM), torch.nan), torch.zeros(HEADS, SLOTS, DIM - 1)
half = torch.zeros(HEADS, SLOTS, DIM, dtype=torch.float16)
REFUSALS = {
    "no config": (lambda folder: (folder / CONFIG_NAME).unlink(), "kvpop_cartridge.json is missing"),
    "no tensors": (lambda folder: (folder / TENSORS_NAME).unlink(), "kvpop_cartridge.safetensors is missing"),
    "not JSON": (text(b"{"), "cannot be read as JSON"),
    "nested JSON": (text(b"[" * 100_000), "cannot be read as JSON"),
    "not text": (text(b"\xff\xfe\x00"), "cannot be read as JSON"),
    "a list": (text(b"[]"), "format must be"),
    "format": (edited(format="kvpop-scorer"), "format must be"),
    "version": (edited(version=2), "version 2"),
    "true version": (edited(version=True), "version True"),
    "unknown key": (edited(extra=1), "unknown key 'extra'"),
    "missing key": (edited(next_position=None), "no 'next_position'"),
    "slots": (edited(slots=65), "65 slots are not a multiple of 64"),
    "zero slots": (edited(slots=0), "slots is 0"),
    "many layers": (edited(num_layers=10**15), "num_layers is"),
    "negative position": (edited(next_position=-1), "next_position is -1"),
    "fraction": (edited(head_dim=32.5), "head_dim is 32.5"),
    "no name": (edited(method=""), "method is ''"),
    "dynamic rope": (edited(rope={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "type 'dynamic'"),
    "no rope": (edited(rope=[]), "rope must be an object"),
    "rope without theta": (edited(rope={"rope_type": "default"}), "rope_theta of rope is None"),
    "rope without factor": (edited(rope={"rope_type": "linear", "rope_theta": 1e4}), "factor of rope is None"),
    "base": (edited(base={}), "base must hold"),
    "base digests": (edited(base={"config": 1, "weights": None}), "digests of base"),
    "provenance": (edited(provenance=3), "provenance must be an object"),
    "head": (edited(head="<user>"), "head must be a list of token ids"),
    "negative head": (edited(head=[3, -1]), "head must be a list of token ids"),
    "long head": (edited(head=[1] * 301), "head has more tokens than next_position"),
    "more layers": (edited(num_layers=3), "layers.2.k is missing"),
    "fewer layers": (edited(num_layers=1), "unexpected tensor 'layers.1.bias'"),
    "more slots": (edited(slots=2**23), "layers.0.k has shape"),
    "a layer without values": (tensors(l1_v=None), "layers.1.v is missing"),
    "a layer without bias": (tensors(l1_bias=None), "layers.1.bias is missing"),
    "bias of one layer": (tensors(l0_bias=None), "unexpected tensor 'layers.1.bias'"),
    "shape": (tensors(l1_k=small), "layers.1.k has shape"),
    "dtype": (tensors(l0_k=torch.zeros(HEADS, SLOTS, DIM, dtype=torch.int32)), "layers.0.k has dtype I32"),
    "two dtypes": (tensors(l1_v=half), "layers.1.v has dtype F16, expected F32"),
    "bias dtype": (tensors(l0_bias=torch.zeros(HEADS, SLOTS).half()), "layers.0.bias has dtype F16"),
    "NaN": (tensors(l1_k=nan), "layers.1.k holds NaN"),
    "infinite bias": (tensors(l0_bias=torch.full((HEADS, SLOTS), -torch.inf)), "layers.0.bias holds NaN or inf"),
    "cut file": (cut, "not a complete safetensors file"),
    "empty file": (raw_tensors(b""), "not a complete safetensors file"),
    "giant header": (raw_tensors(struct.pack("<Q", 2**62) + b"{}"), "not a complete safetensors file"),
    "giant tensor": (raw_tensors(claim([2, 2**40, 32])), "not a complete safetensors file"),
    "overflowing tensor": (raw_tensors(claim([2**40, 2**40, 2**40])), "not a complete safetensors file"),
    "pickle as tensors": (raw_tensors(pickle.dumps({})), "it is a pickle, convert it with 'kvpop import'"),
    "zip as tensors": (raw_tensors(b"PK\x03\x04" + bytes(20)), "it is a pickle"),
    "pickle in the folder": (pickled_instead, "cache.pt is a pickle.*kvpop import"),
    "pickle next to the config": (pickled_tensors, "weights.bin is a pickle.*kvpop import"),
}
"""Damage of a folder, and what the error says."""


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(tmp_path, config, name):
    damage, message = REFUSALS[name]
    folder = tmp_path / "cartridge"
    write_cartridge(folder, config, layers_of())
    damage(folder)
    began = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        read_cartridge(folder)
    assert time.process_time() - began < 1
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_pickle_is_not_a_folder(tmp_path):
    torch.save({}, tmp_path / "cache.pt")
    with pytest.raises(ConfigError, match="cache.pt is a pickle"):
        read_cartridge(tmp_path / "cache.pt")


def test_base_is_checked(tmp_path, config, model):
    check_base(config, model)
    check_base(config, json.loads((model / "config.json").read_text()))
    from transformers import AutoConfig

    check_base(config, AutoConfig.from_pretrained(model))
    check_base(config, AutoConfig.from_pretrained(model), weights=model)
    misfits = {
        "other weights": write_tiny_model(tmp_path / "a", seed=1),
        "num_layers = 2": write_tiny_model(tmp_path / "b", layers=3),
        "model of other sizes": write_tiny_model(tmp_path / "c", vocab=300),
        "model_type = 'llama'": write_tiny_model(tmp_path / "d", "qwen3"),
    }
    for message, folder in misfits.items():
        with pytest.raises(ConfigError, match=message):
            check_base(config, folder)
    with pytest.raises(ConfigError, match="other weights"):
        check_base(config, AutoConfig.from_pretrained(model), weights=misfits["other weights"])
    changed = AutoConfig.from_pretrained(model, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    with pytest.raises(ConfigError, match="rope_theta = 10000.0, .* has 7.0"):  # though its folder has the right one
        check_base(config, changed, weights=model)
    raw = json.loads((model / "config.json").read_text())
    for rope in ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}):
        with pytest.raises(ConfigError, match="rotary embeddings with (rope_theta|factor)"):
            check_base(config, raw | {"rope_parameters": rope})


def test_old_names_of_rope_are_the_same(config, model):
    raw = json.loads((model / "config.json").read_text())
    del raw["rope_parameters"]
    check_base(config, raw | {"rope_theta": 10000.0, "rope_scaling": None})
