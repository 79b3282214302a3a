"""Tiny models and the command line run in their folder."""

import json
from pathlib import Path

import pytest
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from safetensors.torch import load_file, save_file

from kvpop_vllm.testing import write_tiny_model

KINDS = {"qwen3": 2, "llama": 4}
"""KV heads of each model."""
WORDS = "--data text.jsonl --length 128 --rows 8 --policies l2norm --threads 1".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models whose first layer's attention has no effect, so that all slots belong to the second."""
    root = tmp_path_factory.mktemp("calibrate")
    for kind, heads in KINDS.items():
        write_byte_tokenizer(write_tiny_model(root / kind, kind, vocab=VOCABULARY, kv_heads=heads))
        weights = load_file(root / kind / "model.safetensors")
        weights["model.layers.0.self_attn.o_proj.weight"].zero_()
        save_file(weights, root / kind / "model.safetensors", metadata={"format": "pt"})
    write_text(root / "text.jsonl")
    return root


@pytest.fixture
def calibrated(folder, kvpop):
    """Function that returns the report of a model and the output."""

    def run(kind, unit="layer", *options):
        out = f"{kind}-{unit}"
        status, output, errors = kvpop("calibrate", kind, "--out", out, "--shares", unit, *WORDS, *options)
        assert status == 0, errors
        return json.loads(Path(out, "report.json").read_text()), output, errors

    return run
