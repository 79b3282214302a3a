"""Prompts that are given as embeddings instead of tokens."""

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
    matrix_case = case("qwen3", "kvpop", **options)
    table = load_file(f"{matrix_case.model}/model.safetensors")["model.embed_tokens.weight"]
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    inputs = (
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [{"prompt_embeds": table[prompt]} for prompt in prompts],
    )
    with watched(matrix_case.model, matrix_case.settings, enable_prompt_embeds=True) as engine:
        runs = []
        for batch in (*inputs, inputs[1]):
            engine.recorder.clear()
            answers = engine.llm.generate(batch, SamplingParams(**TOLD), use_tqdm=False)
            runs.append((answers, [dict(layers) for layers in engine.recorder.retained.values()]))
            assert not engine.leaks()
    tokens, embeds, again = ([answer.outputs[0].token_ids for answer in answers] for answers, _ in runs)
    assert tokens == embeds == again and len({tuple(ids) for ids in tokens}) == len(LENGTHS)
    assert runs[0][1] == runs[1][1]
    largest = max(len(head) for layer in runs[1][1][-1].values() for step in layer for head in step.positions)
    protected = options.get("protect_prompt", 0)
    assert largest == (protected + BUDGET - SINKS if protected else BUDGET), "fewer are held than seen"
    hits = [answer.num_cached_tokens for answer in runs[2][0]]
    assert hits == [max(0, min(protected, length) - 1) // 16 * 16 for length in LENGTHS]
