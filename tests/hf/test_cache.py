"""``generate()`` with a fixed-size cache equals the naive oracle, with rows padded on the left.

Retained sets, log-probabilities and greedy tokens of every policy are compared.
"""

from types import SimpleNamespace

import pytest
import torch
from engine.judge import Held
from engine.matrix import MATRIX
from hf.prompts import distinct, padded
from policies.matrix import MILD_SHARES, SHARES
from transformers import StoppingCriteria

from kvpop_vllm.hf import KVpopCache

LENGTHS, NEW, TOP = (75, 50), 8, 3
"""Prompt lengths, new tokens, log-probabilities per step. The second row outgrows the budget in decoding."""
OPTIONS = {
    "corrected": ("llama", "kvpop", {"correction": "moment"}),
    "pyramid": ("qwen3", "kvpop-linear", {"allocator": "pyramid"}),
    "heads": ("llama", "kvpop", {"allocator": str(SHARES)}),
    "heads, rounds": ("qwen3", "triattention", {"allocator": str(MILD_SHARES)}),
    "keys and values": ("llama", "trimkv-kv", {}),
    "late": ("qwen3", "dms", {"shifted": True}),
    "borrowed after a norm": ("qwen3", "dms-query", {"shifted": True}),
}
CASES = [(kind, policy, {}) for kind, policy in [*MATRIX, ("llama", "l2norm"), ("llama", "dms")]] + list(
    OPTIONS.values()
)


class Watch(StoppingCriteria):
    """A stopping criterion that records what each row holds after every step, and never stops."""

    def __init__(self, cache):
        self.cache, self.steps = cache, []

    def __call__(self, input_ids, scores, **kwargs):
        self.steps.append([self.cache.held(row) for row in range(len(input_ids))])
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("kind, policy, options", CASES, ids=lambda value: str(value) if value else "")
def test_sets_log_probabilities_and_tokens_are_the_oracles(case, kind, policy, options):
    model, served = case(kind, policy, **options)
    cache = KVpopCache(model, **served.settings)
    watch, prompts = Watch(cache), [distinct(length) for length in LENGTHS]
    inputs = padded(prompts)
    shown = {"stopping_criteria": [watch], "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **shown)
    assert len(watch.steps) == NEW and cache.lengths == [length + NEW - 1 for length in LENGTHS]
    answers, held_by_layer = {}, {}
    for row, prompt in enumerate(prompts):
        tokens = out.sequences[row, inputs["input_ids"].shape[1] :].tolist()
        top = [step[row].double().log_softmax(-1).topk(TOP) for step in out.logits]
        entries = [
            {int(token): SimpleNamespace(logprob=float(value)) for value, token in zip(*step, strict=True)}
            for step in top
        ]
        output = SimpleNamespace(token_ids=tokens, logprobs=entries)
        answer = {"request_id": row, "prompt_token_ids": prompt, "prompt_logprobs": None, "outputs": [output]}
        answers[row] = SimpleNamespace(**answer)
        held_by_layer[row] = {
            layer: [_held(step[row][layer], len(prompt)) for step in watch.steps] for layer in range(2)
        }
    before = served.judge.near_ties
    served.judge.check(answers, held_by_layer)
    assert served.judge.near_ties <= before + 1
    # [NEW, 2, layers, H]
    counts = torch.stack([torch.stack([row.sum(-1) for row in step]) for step in watch.steps])
    policy = served.judge.policy
    topk = policy.topk if isinstance(policy.topk, tuple) else (policy.topk,) * 2
    budgets = [
        [policy.sinks + policy.window + k for k in (row if isinstance(row, tuple) else (row,) * 2)] for row in topk
    ]
    assert bool((counts <= torch.tensor(budgets)).all()), counts  # [layers, H]


def _held(visible, prompt):
    """Return one layer's ``[H, tokens seen]`` booleans as the judge takes them."""
    length = visible.shape[1]
    new = length if length == prompt else 1
    return Held(length, new, [row.nonzero().flatten().tolist() for row in visible])
