"""Shapes that are read from config files are those that an engine counts with."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine.own_backend import OwnBackendForCausalLM
from engine.published_configs import CONFIGS
from engine.tiny_configs import REFUSED, SERVED, text
from engine.tiny_engine import configure, generate
from imports.test_cold_imports import BLOCK, ROOT
from vllm import ModelRegistry

from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape

LENGTHS = dict.fromkeys(CONFIGS, 256) | {"gemma-4-31b": 2048}
"""Tokens of the longest text by model. Those of Gemma 4 are longer than its windows, whose layers have another shape."""


def write(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {name: write(root / name, config | {"dtype": "bfloat16"}) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def shapes(folders) -> dict[str, ModelShape]:
    """Shapes that a process without vLLM reads, because vLLM adds model types to those of transformers."""
    code = f"""
import dataclasses, json
from kvpop_vllm.model_shape import ModelShape
folders, lengths = {dict(zip(folders, map(str, folders.values()), strict=True))!r}, {LENGTHS!r}
print(json.dumps({{name: dataclasses.asdict(ModelShape.of(folders[name], lengths[name])) for name in folders}}))
"""
    process = subprocess.run([sys.executable, "-c", BLOCK + code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    read = json.loads(process.stdout)
    lists = {name: {key: tuple(shape[key]) for key in ("kinds", "layers")} for name, shape in read.items()}
    return {name: ModelShape(**shape | lists[name]) for name, shape in read.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engines_shape(folders, shapes, name):
    engine = ModelShape.of_engine(configure(folders[name], None, max_model_len=LENGTHS[name]).model_config)
    if name == "step3p5":  # vLLM's config has one rotation, and its layers another list of them
        assert shapes[name].rope is None
        engine = dataclasses.replace(engine, rope=None)
    assert shapes[name] == engine


KV_HEADS = {
    "falcon-7b": 1,
    "falcon-40b": 8,
    "falcon-old": 32,
    "refined-web-7b": 1,
    "refined-web-40b": 8,
    "starcoder": 1,
    "bigcode-mha": 12,
    "mpt-7b": 32,
    "dbrx": 8,
    "chatglm3": 2,
    "step3p5": 4,
    "gemma3-4b": 4,
    "llava": 32,
}
"""KV heads of published models whose configs have no ``num_key_value_heads`` at the top."""


def test_the_numbers_of_the_models_papers(shapes):
    assert {name: shapes[name].num_kv_heads for name in KV_HEADS} == KV_HEADS


def test_plan_of_a_model_with_one_kv_head(folders, capsys):
    """Falcon-7B's cache is 71 times smaller than with a KV head for each query head."""
    assert main(["plan", "--model", str(folders["falcon-7b"]), "--kv-memory", "8GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("32 layers, 1 KV heads of 64, bfloat16; requests of 2048 tokens")
    assert lines[2].split() == "dense, stock vLLM 2048 16.0 MiB 16.0 MiB 512.0 1.00".split()


ENGINES_ONLY = {"bert", "fp8-cache", "fp8-modelopt", "float16", "paligemma"}
"""Models that `kvpop plan` does not refuse, because of dtypes of a cache or of what a config does not say."""
PLANNED = {name: config for name, (_, config) in REFUSED.items() if name not in ENGINES_ONLY}
PLANNED |= {"mpt-7b": CONFIGS["mpt-7b"], "falcon-alibi": CONFIGS["falcon-old"] | {"alibi": True}}


@pytest.mark.parametrize("name", PLANNED)
def test_plan_refuses_what_an_engine_refuses(tmp_path, capsys, name):
    folder = write(tmp_path / name, PLANNED[name])
    assert main(["plan", "--model", str(folder), "--kv-memory", "1GiB", "--budget", "64"]) == 2
    error = capsys.readouterr().err
    assert "which no policy serves: choose another model" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", SERVED)
def test_plan_counts_what_an_engine_serves(tmp_path, name):
    folder = write(tmp_path / name, SERVED[name])
    assert (
        main(["plan", "--model", str(folder), "--kv-memory", "1GiB", "--budget", "64", "--max-model-len", "256"]) == 0
    )


@pytest.fixture
def other_layers(tiny_model, tmp_path, monkeypatch):
    """Return ``start(policy, first)``, which runs an engine whose layers from ``first`` on bring vLLM's own backend."""
    ModelRegistry.register_model("OwnBackendForCausalLM", OwnBackendForCausalLM)
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    write(folder, config | {"architectures": ["OwnBackendForCausalLM"]})

    def start(policy: dict | None, first: int):
        monkeypatch.setattr(OwnBackendForCausalLM, "first", first, raising=False)
        return generate(folder, policy, tokens=2)

    return start


@pytest.mark.parametrize(
    "first, named", [(1, "(model.layers.1.self_attn.attn)"), (0, "0.self_attn.attn and 1 others)")]
)
def test_layers_with_a_backend_of_their_own_are_refused(other_layers, first, named):
    """A policy does not serve some layers, or all, densely; without a policy they are served."""
    with pytest.raises(ConfigError, match=f"layers that bring an attention backend of their own .*{re.escape(named)}"):
        other_layers({"policy": "streaming-llm", "budget": 64}, first)
    assert other_layers(None, first) == other_layers(None, 2)


def test_a_layer_of_another_shape_than_the_config_says_is_refused(tmp_path):
    """The engine counts ChatGLM's groups also where its layers have a KV head for each query head."""
    config = text("ChatGLMModel", "chatglm", num_layers=1, ffn_hidden_size=128, padded_vocab_size=256, seq_length=512)
    config |= {
        "multi_query_attention": False,
        "multi_query_group_num": 1,
        "original_rope": True,
        "tie_word_embeddings": False,
    }
    with pytest.raises(ConfigError, match="a layer with 2 KV heads of size 32 where the model's config says 1 of 32"):
        generate(
            write(tmp_path / "chatglm", config),
            {"policy": "h2o", "budget": 64},
            load_format="dummy",
            max_model_len=256,
        )
