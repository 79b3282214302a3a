"""The command that serves Qwen3-8B with NVIDIA's published gates, with small folders under these names."""

from pathlib import Path

import httpx
import pytest
from distill.tiny_text import VOCABULARY, write_byte_tokenizer
from hf.prompts import distinct, generate
from scorers.hub_server import lay_out
from serving import Server
from transformers import AutoModelForCausalLM

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import write_tiny_model

DATA = Path(__file__).parents[1] / "data" / "kvzap"
COMMAND = "Qwen/Qwen3-8B --kv-policy kvzap --kv-scorer nvidia/KVzap-mlp-Qwen3-8B".split()
OPTIONS = "--dtype float32 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 16777216".split()


@pytest.mark.slow
def test_the_command_serves_gates_of_the_hub(tmp_path):
    """With a budget and a threshold the tokens are those of a KVpopCache with the folder. The log says what is kept."""
    model = write_tiny_model(tmp_path / "model", "qwen3", vocab=VOCABULARY)
    write_byte_tokenizer(model)
    lay_out(tmp_path / "hub", "Qwen/Qwen3-8B", {"main": model})
    lay_out(tmp_path / "hub", "nvidia/KVzap-mlp-Qwen3-8B", {"main": DATA / "mlp"})
    settings = {"budget": 56, "window": 16, "threshold": -1.0}
    flags = [f"--kv-{name}={value}" for name, value in settings.items()]
    prompt, new = distinct(200), 16
    with Server(*COMMAND, *OPTIONS, *flags, env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}) as server:
        body = {"model": "Qwen/Qwen3-8B", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        log = server.log()
    roles = "56 tokens per KV head (4 sinks, window 16, 36 long-range), scores below -1 evicted with the window"
    assert f"--kv-policy kvzap: {roles}" in log
    loaded = AutoModelForCausalLM.from_pretrained(model)
    cache = KVpopCache(loaded, "kvzap", scorer=DATA / "mlp", **settings)
    assert [answer.json()["choices"][0]["token_ids"]] == generate(loaded, cache, [prompt], new=new)
