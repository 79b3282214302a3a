"""A calibration is served: by the engine as by the cache of transformers, and by the command as printed."""

import json
import shlex
import urllib.request

import pytest
from engine.tiny_engine import PROMPTS, backend, complete, running
from hf.prompts import generate
from serving import Server
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache

NEW = 24


@pytest.mark.parametrize("unit", ["layer", "head"])
def test_the_engine_serves_shares_and_windows(calibrated, unit):
    report, _, _ = calibrated("llama", unit)
    settings = {"policy": "auto", "calibration": f"llama-{unit}"}
    with running("llama", settings) as llm:
        answers = complete(llm, NEW)
        policy = backend(llm).policy
    assert policy.settings.policy in ("streaming-llm", "l2norm") and (policy.shares() != policy.retention.budget).any()
    network = AutoModelForCausalLM.from_pretrained("llama").eval()
    tokens = [[token for token, _ in answer] for answer in answers]
    assert tokens == generate(network, KVpopCache(network, **settings), PROMPTS, new=NEW)
    assert tokens != generate(network, KVpopCache(network, **settings, allocator="uniform"), PROMPTS, new=NEW)


def test_another_rotation_is_refused_by_the_engine(calibrated):
    from engine.tiny_engine import configure

    calibrated("llama")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    with pytest.raises(
        ConfigError,
        match="--kv-calibration llama-layer was made for rotary embeddings with rope_theta = 10000.0, this one has 5000.0",
    ):
        configure("llama", {"policy": "auto", "calibration": "llama-layer"}, hf_overrides=rope)


@pytest.mark.slow
def test_the_printed_command_serves(calibrated):
    report, output, _ = calibrated("llama")
    words = shlex.split(output.splitlines()[-1])
    assert words[:3] == ["vllm", "serve", "llama"]
    with Server(*words[2:], "--dtype", "float32") as server:
        body = {"model": "llama", "prompt": PROMPTS[-1], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "vllm_xargs": {"kv_report": 1}}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        answer = json.load(urllib.request.urlopen(request, timeout=300))
    network = AutoModelForCausalLM.from_pretrained("llama").eval()
    cache = KVpopCache(network, "auto", calibration="llama-layer")
    assert [answer["choices"][0]["token_ids"]] == generate(network, cache, PROMPTS[-1:], new=NEW)
    assert answer["kv_transfer_params"]["kv_report"]["prompt_tokens"] == len(PROMPTS[-1])
