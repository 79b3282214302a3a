"""A model whose weights are read by shards is the one that is loaded as a whole; other folders are loaded as a whole."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvpop_vllm.distill.sharding import Process, empty_model, policy_of, read_weights, shard_layers
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.testing import write_tiny_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 256}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48, "global_head_dim": 32}
GEMMA |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 256}


def write_with_buffers(folder):
    """Write a tiny Gemma 4, whose layers have a buffer ``layer_scalar`` that is saved, with random buffers."""
    config = CONFIG_MAPPING["gemma4_text"](**SIZES | GEMMA)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return folder


def move_weights(folder, name, change=lambda weights: weights):
    """Move the weights of a folder to another file, changed."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(change(weights), folder / name, metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(model):
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    } | dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "tied", "shards", "stray", "buffers"])
def test_weights_that_are_read_by_shards_equal_those_of_the_whole_model(tmp_path, case, dtype):
    if case == "buffers":
        write_with_buffers(tmp_path)
    else:
        write_tiny_model(tmp_path, "qwen3", tied=case == "tied", dtype=torch.bfloat16)
    if case == "shards":
        load_model(tmp_path, torch.float32).save_pretrained(tmp_path, max_shard_size="100KB")
        (tmp_path / "model.safetensors").unlink()
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    if case == "stray":  # as an older version of the weights
        weights = load_file(tmp_path / "model.safetensors")
        save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "adapter.safetensors")
        save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "old.safetensors")
    model, loaded = empty_model(tmp_path, dtype), load_model(tmp_path, dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    with Process() as process:
        shard_layers(model, process.mesh, policy_of(False))
        fully_shard(model, mesh=process.mesh)
        read_weights(model, tmp_path, CPU)
        read, expected = tensors(model), tensors(loaded)
    assert read.keys() == expected.keys() and model.training == loaded.training
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    if case == "buffers":
        assert any(name.endswith("layer_scalar") for name in expected)


def codes(weights):
    name = "model.layers.0.mlp.up_proj.weight"
    return weights | {name: weights[name].to(torch.float8_e4m3fn)}


@pytest.mark.parametrize("case", ["quantised", "codes", "unknown", "other name", "missing buffer", "damaged index"])
def test_other_files_are_loaded_as_a_whole(tmp_path, case):
    if case == "missing buffer":
        write_with_buffers(tmp_path)
    else:
        write_tiny_model(tmp_path, "qwen3")
    assert empty_model(tmp_path, torch.float32) is not None
    single = "model.safetensors"
    if case == "quantised":
        change_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    elif case == "damaged index":
        move_weights(tmp_path, "model-1.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text("{")
    else:
        change, name = {
            "codes": (codes, single),
            "unknown": (lambda weights: weights | {"model.extra.weight": torch.zeros(2)}, single),
            "other name": (dict, "other.safetensors"),
            "missing buffer": (lambda weights: {n: t for n, t in weights.items() if "layer_scalar" not in n}, single),
        }[case]
        move_weights(tmp_path, name, change)
    assert empty_model(tmp_path, torch.float32) is None
