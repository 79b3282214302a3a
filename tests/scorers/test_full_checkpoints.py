"""Full checkpoints of other authors: what is read, served and refused, and that none of their code runs."""

from __future__ import annotations

import pytest
import torch
from hf.prompts import generate
from scorers.spellings import SPELLINGS, write_spelling
from transformers import AutoModelForCausalLM

from kvpop_vllm.hf import KVpopCache, load_checkpoint
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(120), random_prompt(90)]


@pytest.fixture(scope="module", params=SPELLINGS)
def spelt(request, tmp_path_factory):
    """Return a spelling, its base model, the scorer in our format, and the full checkpoint."""
    spelling = SPELLINGS[request.param]
    return spelling, *write_spelling(tmp_path_factory.mktemp(request.param), spelling)


def test_the_scorer_is_that_of_our_format(spelt):
    spelling, _, adapter, full = spelt
    (config, layers), (expected, values) = read_scorer(full), read_scorer(adapter)
    names = ("sinks", "window", "topk", "feature_map", "gate_softcap", "norm", "skip", "delayed")
    assert [getattr(config, name) for name in names] == [getattr(expected, name) for name in names]
    assert spelling.exact == (config.decay == expected.decay)
    for layer, value in zip(layers, values, strict=True):
        assert layer.keys() == value.keys()
        for name in value.keys() - ({} if spelling.exact else {"decay_logit"}):
            torch.testing.assert_close(layer[name], value[name], rtol=0, atol=1e-6 if "norm" in name else 0)


def test_it_is_served_as_its_base(spelt):
    _, base, adapter, full = spelt
    model, theirs = AutoModelForCausalLM.from_pretrained(base).eval(), load_checkpoint(full).eval()
    plain = generate(model, None, PROMPTS)
    assert generate(theirs, None, PROMPTS) == plain
    expected = generate(model, KVpopCache(model, "kvpop", scorer=adapter), PROMPTS)
    assert generate(theirs, KVpopCache(theirs, "kvpop"), PROMPTS) == expected != plain
    logits = [
        one(torch.tensor(PROMPTS[:1]), past_key_values=KVpopCache(one, "kvpop", **scorer)).logits
        for one, scorer in ((model, {"scorer": adapter}), (theirs, {}))
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert not (full.parent / "trace").exists()
