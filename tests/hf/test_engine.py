"""``generate()`` with the cache gives the same tokens as vLLM's engine."""

import pytest
from engine.driving import watched
from engine.tiny_engine import PROMPTS, complete
from hf.prompts import generate

from kvpop_vllm.hf import KVpopCache


@pytest.mark.parametrize("kind, policy", [("qwen3", "kvpop"), ("llama", "h2o-pyramid"), ("qwen3", "adakv")])
def test_tokens_are_the_engines(case, kind, policy):
    model, served = case(kind, policy)
    with watched(served.model, served.settings) as engine:
        answers = complete(engine.llm, 24)
    tokens = [[token for token, _ in answer] for answer in answers]
    assert generate(model, KVpopCache(model, **served.settings), PROMPTS, new=24) == tokens
    assert generate(model, None, PROMPTS, new=24) != tokens
