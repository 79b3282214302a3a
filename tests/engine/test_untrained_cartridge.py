"""A cartridge of a prompt's first tokens, untrained, gives what a cached prefix of these tokens gives."""

import pytest
import torch
from engine.driving import BLOCK, Job, watched

from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import CartridgeConfig, write_cartridge
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.testing import random_prompt

SLOTS, OWN, NEW = 64, 70, 40
CASES = {"kvpop-linear": "qwen3", "kvpop": "qwen3", "streaming-llm": "llama", "h2o": "llama", "momentkv": "llama"}
"""Policy -> kind of model."""
READS_ATTENTION = "h2o", "momentkv"
"""Policies whose rankings come from sums that are rounded, so that a near-tie may be decided otherwise."""
CLOSE = 1e-4
"""Log-probabilities of two computations in float32 of one thing, in nats."""


def served(model: str, settings: dict, job: Job, times: int = 1) -> tuple[list[int], list[dict], list, int]:
    """Return tokens, log-probabilities, held positions of each step and cached tokens of a request's last run."""
    with watched(model, settings, None, num_gpu_blocks_override=65) as engine:
        engine.recorder.slots = {"first": SLOTS}
        for _ in range(times):
            ((name, answer),) = engine.serve([job]).items()
        (out,), retained = answer.outputs, engine.recorder.retained[name]
        logp = [{token: entry.logprob for token, entry in step.items()} for step in out.logprobs]
        steps = [
            step.positions for layer in sorted(retained) for step in retained[layer] if step.tokens_seen > SLOTS + OWN
        ]
        return list(out.token_ids), logp, steps, answer.num_cached_tokens


@pytest.mark.parametrize(
    "policy", [pytest.param(c, marks=[] if c == "kvpop-linear" else pytest.mark.slow) for c in CASES]
)
def test_it_equals_a_cached_prefix(case, tmp_path, policy):
    """They are equal but for an mLSTM, which has not read what is in a cartridge: its difference is printed."""
    matrix_case = case(CASES[policy], policy)
    text = random_prompt(SLOTS + OWN, seed=8)
    base = base_of(matrix_case.model)
    layers = [(k, v, None) for k, v in read_corpus(load_model(matrix_case.model, torch.float32), text[:SLOTS])]
    fields = {"slots": SLOTS, "next_position": SLOTS, "method": "first", "provenance": {}}
    write_cartridge(tmp_path / "first", CartridgeConfig(**(base | fields)), layers)

    named = Job(prompt=text[SLOTS:], new=NEW, scored=False, asks={"kv_cartridges": ["first"]})
    loaded = served(matrix_case.model, matrix_case.settings | {"cartridge": [f"first={tmp_path / 'first'}"]}, named)
    uncut = Job(prompt=text, new=NEW, scored=False)
    cached = served(matrix_case.model, matrix_case.settings | {"protect_prompt": SLOTS}, uncut, times=2)
    assert loaded[3] == SLOTS and cached[3] >= SLOTS - BLOCK, "the prefix comes from the cache"
    common = [
        set(loaded_answer) & set(cached_answer)
        for steps in zip(loaded[2], cached[2], strict=True)
        for loaded_answer, cached_answer in zip(*steps, strict=True)
    ]
    same = sum(map(len, common)) / sum(len(loaded_answer) for step in cached[2] for loaded_answer in step)
    if policy == "kvpop":
        differences = [abs(a[t] - b[t]) for a, b in zip(loaded[1], cached[1], strict=True) for t in a.keys() & b.keys()]
        print(
            f"{policy}: {same:.3f} of the held tokens are the same, "
            f"log-probabilities differ by {max(differences):.1e} at most"
        )
        assert 0.5 < same < 1, "an empty state decides otherwise, but not at random"
        return
    if policy in READS_ATTENTION and same < 1:
        assert same > 0.98
        return
    assert same == 1 and loaded[0] == cached[0]
    for loaded_answer, cached_answer in zip(loaded[1], cached[1], strict=True):
        assert loaded_answer == pytest.approx(cached_answer, abs=CLOSE)
