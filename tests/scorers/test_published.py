"""`kvpop import` of folders as the authors of TRIM-KV and DMS publish them, and of every wrong folder."""

import json
import os
import re

import pytest
import torch
from hf.prompts import generate
from safetensors.torch import load_file, save_file
from scorers.published_formats import (
    FASTDMS_METADATA,
    change_json,
    fastdms_logits,
    write_dbtrimkv,
    write_fastdms,
    write_indexmem,
)
from transformers import AutoModelForCausalLM

from kvpop_vllm.cli import main
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_hook import CACHE_NAME
from kvpop_vllm.scorers import Signals, from_tensors
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import random_prompt, write_random_scorer, write_tiny_model

MAKES = {"rg": {}, "rg2": {"reads": "kv"}, "rg3": {"reads": "kv", "gated": True}}


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.fixture
def trimkv(tmp_path):
    """Return ``write(make, suffix)``, which returns a published folder and its random gates in our layout.

    The weights are a pickle, as the authors publish them, unless ``suffix`` is "safetensors".
    """

    def write(make="rg", suffix="pth"):
        source = write_tiny_model(tmp_path / "published", "qwen3")
        gates = write_random_scorer(tmp_path / "gates", source, "trimkv", **MAKES[make])
        (source / "model.safetensors").unlink()
        edit(source, retention_gate=make, memory_size=128, retention_gate_intermediate_size=16, base_model="x")
        tensors = load_file(gates / "kvpop_scorer.safetensors")
        place = r"model.layers.\1.self_attn.retention_gate."
        theirs = {re.sub(r"^layers\.(\d)\.", place, name): tensor for name, tensor in tensors.items()}
        if suffix == "pth":
            torch.save(theirs, source / "trimkv_weights.pth")
        else:
            save_file(theirs, source / "trimkv_weights.safetensors")
        return source, read_scorer(gates)[1]

    return write


@pytest.fixture
def run(capsys, tmp_path):
    """Return ``call(source, *words)``, which runs `kvpop import` and returns its error line or None."""

    def call(source, *words):
        status = main(["import", str(source), str(tmp_path / "out"), *map(str, words)])
        error = capsys.readouterr().err
        assert (status == 2) == bool(error) and error.count("\n") <= 1
        return error or None

    return call


@pytest.mark.parametrize("make, suffix", [("rg", "pth"), ("rg2", "pth"), ("rg3", "safetensors")])
def test_trimkv(trimkv, run, tmp_path, make, suffix):
    source, gates = trimkv(make, suffix)
    assert run(source) is None
    config, layers = read_scorer(tmp_path / "out")
    assert (config.scorer, config.sinks, config.window, config.topk) == ("trimkv", 0, 1, 127)
    assert (config.reads, config.gated) == (MAKES[make].get("reads", "hidden"), MAKES[make].get("gated", False))
    for layer, expected in zip(layers, gates, strict=True):
        assert layer.keys() == expected.keys() and all(torch.equal(layer[n], expected[n]) for n in layer)
    assert "holds a scorer already" in run(source)


class Evil:
    """An object whose unpickling creates a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_executed(trimkv, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, _ = trimkv()
    torch.save({"model.layers.0.self_attn.retention_gate.bias": Evil()}, source / "trimkv_weights.pth")
    assert "trimkv_weights.pth cannot be read as tensors alone" in run(source)
    assert not (tmp_path / "executed").exists() and not (tmp_path / "out").exists()


def test_wrong_trimkv_folders(trimkv, run):
    source, _ = trimkv()
    weights = torch.load(source / "trimkv_weights.pth", weights_only=True)

    def refused(change):
        torch.save(change, source / "trimkv_weights.pth")
        return run(source)

    bias = "model.layers.1.self_attn.retention_gate.bias"
    assert "layers.1.bias is missing" in refused({n: t for n, t in weights.items() if n != bias})
    assert "layers.1.bias has shape (3,), expected (2,)" in refused(weights | {bias: torch.zeros(3)})
    moved = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}
    assert "holds model.layers.0.self_attn.q_proj.weight, which is no retention gate's" in refused(weights | moved)
    assert "layers.7" in refused(weights | {bias.replace("1", "7"): torch.zeros(2)})
    assert "something else than named tensors" in refused([torch.zeros(2)])
    (source / "trimkv_weights.pth").write_bytes(b"no pickle")
    assert "cannot be read as tensors alone" in run(source)
    (source / "trimkv_weights.pth").unlink()
    assert "has neither trimkv_weights.safetensors nor trimkv_weights.pth" in run(source)
    edit(source, memory_size=0.25)
    assert "memory_size is 0.25, which is no number of tokens: give --topk" in run(source)
    edit(source, retention_gate="rg7")
    assert "retention_gate is 'rg7', and only rg, rg2, rg3, rg10 are TRIM-KV's" in run(source)
    edit(source, retention_gate=...)
    assert "neither retention_gate (TRIM-KV) nor dms_alpha_scale (DMS)" in run(source)


def test_dbtrimkv(tmp_path, capsys):
    """Its gates are taken over, tied layers too; its one budget for all heads is not, and the import says so."""
    gates, out = write_dbtrimkv(tmp_path / "published"), tmp_path / "out"
    assert main(["import", str(tmp_path / "published"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "the folder has gates alone: serve them with the weights of Qwen/Qwen3-4B\n" in printed
    assert (
        "one budget for all heads of all layers, memory_size 128 in the mean; here each KV head has 128 tokens\n"
        in printed
    )
    unread = printed.split("not read in config.json: ")[1].split("\n")[0].split(", ")
    assert "tie_retention_gate_layers" in unread and "base_loss" in unread
    assert not {"hidden_size", "retention_gate", "memory_size", "model_type"} & set(unread)
    config, layers = read_scorer(out)
    assert (config.sinks, config.window, config.topk, config.reads) == (0, 1, 127, "hidden")
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    scores = [from_tensors(config, layer)(Signals(hidden)) for layer in layers]
    for score, gate in zip(scores, gates, strict=True):
        torch.testing.assert_close(score, gate(hidden), rtol=1e-5, atol=1e-6)
    assert (scores[0] - scores[1]).abs().max() > 0.01
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "base", "qwen3")).eval()
    prompts = [random_prompt(90)]
    evicting = generate(model, KVpopCache(model, "trimkv", scorer=out, budget=48), prompts)
    assert evicting != generate(model, None, prompts)


def test_wrong_dbtrimkv_folders(tmp_path, run):
    source = tmp_path / "published"
    write_dbtrimkv(source)
    edit(source, retention_gate="rg")
    assert "retention_gate is 'rg', and layer 0 has linear3: one of the two is wrong" in run(source)
    edit(source, retention_gate="rg10")
    weights = torch.load(source / "trimkv_weights.pth", weights_only=True)
    torch.save(
        {n: t for n, t in weights.items() if "1.self_attn.retention_gate.linear3" not in n},
        source / "trimkv_weights.pth",
    )
    assert "retention_gate is 'rg10', and layer 1 lacks linear3: one of the two is wrong" in run(source)


def test_fastdms_evicts_what_its_own_rule_hides(tmp_path, capsys):
    """The logits of a cache with the imported gates are those of the authors' rule as masks, at every position.

    What RoPE turns into the borrowed channel is left out, and makes little difference.
    """
    source, out = write_fastdms(tmp_path / "published"), tmp_path / "out"
    assert main(["import", str(source), str(out), "--topk", "150"]) == 0
    printed = capsys.readouterr().out
    assert "the eviction logit of a token decides about the token itself (FastDMS)\n" in printed
    assert "a cache that grows with what gates keep; here each KV head has at most 175 tokens\n" in printed
    assert "not taken over: what RoPE turns into the channel of the logits, which is 0 here\n" in printed
    assert "not read in config.json: dms_cr\n" in printed
    assert "not read in dms_metadata.json: compression_mode, context_len, target_cr\n" in printed
    config, layers = read_scorer(out)
    assert (config.sinks, config.window, config.topk, config.shifted) == (0, 25, 150, False)
    assert (config.reads, config.scale, layers[0]["bias"].tolist()) == ("query", 100.0, [-5.0, -5.0])
    tokens = torch.tensor([random_prompt(160)])
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    expected, eviction_logits = fastdms_logits(model, tokens, rotated=False)
    assert 0.2 < float((eviction_logits > 0).float().mean()) < 0.8
    assert eviction_logits.abs().min() > 1e-3, "a logit so close to 0 may be rounded to either side"
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        logits = model(tokens, **{CACHE_NAME: KVpopCache(model, "dms", scorer=out)}).logits
        dense = model(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    rotated, _ = fastdms_logits(
        AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager"), tokens, rotated=True
    )
    assert (rotated - expected).abs().max() < 0.1 < 1 < (dense - expected).abs().max()


WRONG_FASTDMS = {
    "another window": ({"window_size": 25}, "dms_window_size in config.json is 24, and window_size in dms_metadata.json is 25"),
    "an offset that is no number": ({"alpha_offset": "five"}, "alpha_offset in dms_metadata.json is 'five', which is not a number"),
    "a huge scale": ({"alpha_scale": 10**400}, "which is not a number"),
    "gates of their own": ({"sidecar": {"path": "gates.safetensors"}}, "its gate is not the last channel of the queries, which alone is read"),
    "another channel": ({"borrowed_query_channel": 3}, "its gate is not the last channel of the queries, which alone is read"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG_FASTDMS)
def test_wrong_fastdms_folders(run, tmp_path, mistake):
    source, (changes, message) = write_fastdms(tmp_path / "published"), WRONG_FASTDMS[mistake]
    change_json(source / "dms_metadata.json", changes)
    assert message in run(source, "--topk", 90) and not (tmp_path / "out").exists()


def test_fastdms_needs_one_of_its_files(run, tmp_path):
    """The settings may be in either file; a file that is no object is refused."""
    source = write_fastdms(tmp_path / "published")
    (source / "dms_metadata.json").write_text("[]")
    assert "dms_metadata.json is no JSON object: copy the folder again" in run(source, "--topk", 90)
    (source / "dms_metadata.json").unlink()
    assert run(source, "--topk", 90) is None
    first = read_scorer(tmp_path / "out")
    (tmp_path / "out" / "kvpop_config.json").unlink()
    change_json(source / "config.json", dict.fromkeys(("dms_window_size", "dms_alpha_scale", "dms_alpha_offset"), ...))
    (source / "dms_metadata.json").write_text(json.dumps({"config": FASTDMS_METADATA}))
    assert run(source, "--topk", 90) is None
    second = read_scorer(tmp_path / "out")
    assert first[0] == second[0] and torch.equal(first[1][0]["bias"], second[1][0]["bias"])


def test_indexmem_is_refused_with_the_reason(run, tmp_path):
    folder = write_indexmem(tmp_path / "published")
    for source in (folder, folder / "indexmem.pt"):
        assert "is a scorer of IndexMem, which cannot be served: each of its tokens has a score and a rate" in run(
            source
        )
    assert not (tmp_path / "out").exists()


DMS = {"dms_alpha_scale": 100.0, "dms_initial_alpha_offset": 5.0, "dms_window_size": 512, "dms_cr": 8}


def test_dms_with_a_borrowed_channel(run, tmp_path, capsys):
    source = write_tiny_model(tmp_path / "published", "qwen3")
    edit(
        source, **DMS, architectures=["Qwen3ForCausalLMDMS"], auto_map={"AutoConfig": "configuration_qwen3_dms.Config"}
    )
    assert "give --topk" in run(source)
    assert main(["import", str(source), str(tmp_path / "out"), "--topk", "1000", "--sinks", "4"]) == 0
    printed = capsys.readouterr().out
    assert "the eviction logit of a token decides about the token before it (NVIDIA)\n" in printed
    assert "here each KV head has at most 1517 tokens\n" in printed and "not read in config.json: dms_cr\n" in printed
    assert """--hf-overrides '{"architectures": ["Qwen3ForCausalLM"]}'""" in printed
    config, layers = read_scorer(tmp_path / "out")
    assert (config.reads, config.scale, config.shifted) == ("query", 100.0, True)
    assert (config.sinks, config.window, config.topk) == (4, 513, 1000)
    channel = torch.tensor([[0.04, 0.06]])
    actual = from_tensors(config, layers[1])(Signals(channel=channel))
    torch.testing.assert_close(actual, -(100 * channel - 5))


def test_dms_with_a_separate_projection(run, tmp_path):
    """A separate projection becomes a gate on the attention block's input with the same logits.

    The authors' projection reads the residual stream through its own norm. The import folds that norm into
    the gate's weight.
    """
    source = write_tiny_model(tmp_path / "published", "qwen3")
    edit(source, **DMS, dms_separate_alpha=True)
    weights, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        weights[f"{prefix}.weight"] = torch.randn(2, 64, generator=draw) / 100
        weights[f"{prefix}_norm.weight"] = 1 + 0.3 * torch.randn(64, generator=draw)
    save_file(weights, source / "model.safetensors")
    assert run(source, "--topk", 90) is None
    config, layers = read_scorer(tmp_path / "out")
    stream = torch.randn(9, 64, generator=draw) * 7
    normed = stream / (stream.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        theirs = 100 * (normed * weights[f"{name}_norm.weight"]) @ weights[f"{name}.weight"].T - 5
        hidden = normed * weights[f"model.layers.{layer}.input_layernorm.weight"]
        actual = from_tensors(config, layers[layer])(Signals(hidden))
        torch.testing.assert_close(-actual, theirs, rtol=1e-4, atol=1e-4)
    assert config.reads == "hidden" and config.shifted


def test_wrong_dms_folders(run, tmp_path):
    source = write_tiny_model(tmp_path / "published", "qwen3")
    edit(source, **DMS)
    assert "window must be an integer from 2" in run(source, "--topk", 9, "--window", 1)
    edit(source, dms_separate_alpha=True)
    assert "has no model.layers.0.self_attn.dms_proj_alpha.weight" in run(source, "--topk", 9)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.input_layernorm.weight"][3] = 0
    save_file(weights, source / "model.safetensors")
    assert "input_layernorm.weight has zeros" in run(source, "--topk", 9)
    edit(source, dms_alpha_per="layer")
    assert "dms_alpha_per is 'layer'" in run(source, "--topk", 9)
    edit(source, dms_alpha_per="head", dms_window_size=...)
    assert "has no dms_window_size" in run(source, "--topk", 9)
