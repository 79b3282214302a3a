"""Counts that the host keeps when a pass is recorded in a CUDA graph.

Recording is pretended: the pass runs at once, as a first replay would.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hf.prompts import generate, padded

from kvpop_vllm.hf import KVpopCache, cache
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (70, 63)]
NEW = 8


@pytest.fixture
def recording(monkeypatch):
    """Return a list; while it is not empty, passes count as recorded."""
    told = []
    monkeypatch.setattr(cache, "recording", lambda device: bool(told))
    return told


def addresses(own):
    """Yield the addresses of all tensors that a step reads beside its inputs."""
    yield from (sequence_lengths.positions.data_ptr() for sequence_lengths in own._lengths_by_device.values())
    for layer in own._layers.values():
        rule = layer.attention.rule
        held = (
            layer.pages.raw,
            layer.table,
            layer.sequence_lengths.numbers["budget"],
            rule.log_gamma,
            *vars(rule.scorer).values(),
        )
        yield from (tensor.data_ptr() for tensor in held if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("policy", ["kvpop", "h2o", "dms"])
def test_a_recorded_pass_counts_when_it_is_replayed(case, recording, policy):
    model, found = case("qwen3", policy)
    plain, own = (KVpopCache(model, **found.settings) for _ in range(2))
    expected = generate(model, plain, PROMPTS, NEW)
    with torch.no_grad():
        tokens = [model(**padded(PROMPTS), past_key_values=own).logits[:, -1:].argmax(-1)]
        places = []
        for i in range(NEW - 1):
            recording[:] = [True] * (i in (2, 3))
            tokens.append(model(input_ids=tokens[-1], past_key_values=own).logits.argmax(-1))
            lengths = [n + i + (not recording) for n in (70, 63)]
            assert own.lengths == lengths and own.get_seq_length() == lengths[0]
            if recording:
                own.replayed()
            places.append(list(addresses(own)))
    assert torch.cat(tokens, 1).tolist() == expected
    assert all(torch.equal(own.held(row), plain.held(row)) for row in range(2))
    assert places == places[:1] * len(places), "a graph would read what is not there any more"


def test_what_no_graph_can_hold_is_refused_before_anything_is_held(case, recording):
    model, found = case("qwen3", "kvpop")
    own = KVpopCache(model, **found.settings)
    recording.append(True)
    for inputs in (padded(PROMPTS), {"input_ids": torch.ones(2, 1, dtype=torch.int64)}):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="hold a pass of one token a row only, and not the first"),
        ):
            model(**inputs, past_key_values=own)
        assert own.lengths == []
    recording.clear()
    assert generate(model, own, PROMPTS, NEW) == generate(model, KVpopCache(model, **found.settings), PROMPTS, NEW)


def test_replays_that_cannot_be_are_refused(case):
    """Wrong replays are refused and leave the cache unchanged."""
    model, _ = case("qwen3", "kvpop")
    own = KVpopCache(model, "full", max_length=72)
    with pytest.raises(RuntimeError, match="empty, or broken off in a pass, replays nothing: begin with a prompt"):
        own.replayed()
    with torch.no_grad():
        model(**padded(PROMPTS), past_key_values=own)
    own.replayed(2)
    with pytest.raises(ValueError, match="73 tokens are more than max_length 72"):
        own.replayed()
    for passes in (-1, 2.0, True):
        with pytest.raises(ValueError, match="passes must be an integer of at least 0"):
            own.replayed(passes)
    own.replayed(0)
    assert own.lengths == [72, 65]


def test_pages_that_a_graph_holds_are_not_given_up(case, recording):
    """Pages in a CUDA graph are kept by a reset, and another number of rows is refused."""
    model, found = case("qwen3", "kvpop")
    own = KVpopCache(model, **found.settings)
    with torch.no_grad():
        token = model(**padded(PROMPTS), past_key_values=own).logits[:, -1:].argmax(-1)
        recording.append(True)
        model(input_ids=token, past_key_values=own)
        recording.clear()
        own.reset()
        with pytest.raises(ValueError, match="a CUDA graph holds this KVpopCache's pages.*: make another KVpopCache"):
            model(**padded(PROMPTS[:1]), past_key_values=own)
        places = list(addresses(own))
        model(**padded(PROMPTS), past_key_values=own)
        assert list(addresses(own)) == places and own.lengths == [70, 63]
        copied = copy.deepcopy(own)
        copied.reset()
        model(**padded(PROMPTS[:1]), past_key_values=copied)
    assert copied.lengths == [70], "no graph holds a copy's pages"
