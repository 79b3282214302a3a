"""Tests of `examples/hf_generate.py` on the demo model."""

import re

import hf_generate
import needle
import pytest
import torch
from hf.prompts import generate
from transformers import AutoModelForCausalLM

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

pytestmark = pytest.mark.slow


def test_it_answers_from_more_than_it_holds(capsys):
    args = hf_generate.arguments().parse_args(["--notes=14", "--budget=256", "--tokens=32"])
    assert (args.model, args.policy) == (needle.MODEL, "kvpop")
    assert "4719" in hf_generate.run(args)
    printed = capsys.readouterr().out
    tokens, held_tokens = map(int, re.search(r"of (\d+) tokens, (\d+) are held per head", printed).groups())
    assert tokens > 500 and 240 <= held_tokens <= 256, "heads with more slots than others have not filled all of them"
    assert "MiB, however long it gets; dense" in printed


def test_with_room_for_all_the_model_says_what_it_says_densely():
    model = AutoModelForCausalLM.from_pretrained(needle.MODEL, dtype=torch.float32)
    prompts = [random_prompt(n, 4000) for n in (30, 12)]
    cache = KVpopCache(model, "kvpop", scorer=needle.SCORER, budget=256)
    assert generate(model, cache, prompts, new=4) == generate(model, None, prompts, new=4)
    assert cache.held(1).shape == (30, 3, 15) and bool(cache.held(1).all())
