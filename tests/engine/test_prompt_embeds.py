"""Prompts that are given as embeddings instead of tokens."""

from __future__ import annotations

import pytest
from engine.driving import watched
from engine.matrix import BUDGET, SINKS
from safetensors.torch import load_file
from vllm import SamplingParams

from kvpop_vllm.testing import random_prompt

LENGTHS = 5, 60, 130
TOLD = dict(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("options", [{}, {"protect_prompt": 40}], ids=str)
def test_embeddings_of_tokens_are_answered_as_the_tokens(case, options):
    """Answers and the tokens held at every step are equal, and a prompt that comes again hits its protected blocks."""
    found = case("qwen3", "kvpop", **options)
    table = load_file(f"{found.model}/model.safetensors")["model.embed_tokens.weight"]
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    given = (
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [{"prompt_embeds": table[prompt]} for prompt in prompts],
    )
    with watched(found.model, found.settings, enable_prompt_embeds=True) as engine:
        seen = []
        for asked in (*given, given[1]):
            engine.recorder.clear()
            answers = engine.llm.generate(asked, SamplingParams(**TOLD), use_tqdm=False)
            seen.append((answers, [dict(layers) for layers in engine.recorder.held.values()]))
            assert not engine.leaks()
    tokens, embeds, again = ([answer.outputs[0].token_ids for answer in answers] for answers, _ in seen)
    assert tokens == embeds == again and len({tuple(each) for each in tokens}) == len(LENGTHS)
    assert seen[0][1] == seen[1][1]
    most = max(len(head) for layer in seen[1][1][-1].values() for step in layer for head in step.positions)
    protected = options.get("protect_prompt", 0)
    assert most == (protected + BUDGET - SINKS if protected else BUDGET), "fewer are held than seen"
    hits = [answer.num_cached_tokens for answer in seen[2][0]]
    assert hits == [max(0, min(protected, length) - 1) // 16 * 16 for length in LENGTHS]
