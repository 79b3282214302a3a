"""Counts that the host keeps when a pass is recorded in a CUDA graph.

Recording is pretended: the pass runs at once, as a first replay would.
"""

import copy

import pytest
import torch
from hf.prompts import generate, padded

from kvpop_vllm.hf import KVpopCache, passes
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (70, 63)]
NEW = 8


@pytest.fixture
def recording(monkeypatch):
    """Return a list that is empty at first. While it is not, passes count as recorded."""
    switch = []
    monkeypatch.setattr(passes, "recording", lambda device: bool(switch))
    return switch


def addresses(graph_cache):
    """Yield the addresses of all tensors that a step reads in addition to its inputs."""
    yield from (sequence_lengths.positions.data_ptr() for sequence_lengths in graph_cache._lengths_by_device.values())
    for layer in graph_cache._layers.values():
        rule = layer.attention.rule
        attributes = (
            layer.pages.raw,
            layer.table,
            layer.sequence_lengths.numbers["budget"],
            rule.log_gamma,
            *vars(rule.scorer).values(),
        )
        yield from (tensor.data_ptr() for tensor in attributes if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("policy", ["kvpop", "h2o", "dms"])
def test_a_recorded_pass_counts_when_it_is_replayed(case, recording, policy):
    model, served = case("qwen3", policy)
    plain, graph_cache = (KVpopCache(model, **served.settings) for _ in range(2))
    expected = generate(model, plain, PROMPTS, NEW)
    with torch.no_grad():
        tokens = [model(**padded(PROMPTS), past_key_values=graph_cache).logits[:, -1:].argmax(-1)]
        places = []
        for i in range(NEW - 1):
            recording[:] = [True] * (i in (2, 3))
            tokens.append(model(input_ids=tokens[-1], past_key_values=graph_cache).logits.argmax(-1))
            lengths = [n + i + (not recording) for n in (70, 63)]
            assert graph_cache.lengths == lengths and graph_cache.get_seq_length() == lengths[0]
            if recording:
                graph_cache.replayed()
            places.append(list(addresses(graph_cache)))
    assert torch.cat(tokens, 1).tolist() == expected
    assert all(torch.equal(graph_cache.held(row), plain.held(row)) for row in range(2))
    assert places == places[:1] * len(places), "a graph would read what is not there any more"


def test_what_no_graph_can_hold_is_refused_before_anything_is_held(case, recording):
    model, served = case("qwen3", "kvpop")
    graph_cache = KVpopCache(model, **served.settings)
    recording.append(True)
    for inputs in (padded(PROMPTS), {"input_ids": torch.ones(2, 1, dtype=torch.int64)}):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="hold a pass of one token a row only, and not the first"),
        ):
            model(**inputs, past_key_values=graph_cache)
        assert graph_cache.lengths == []
    recording.clear()
    assert generate(model, graph_cache, PROMPTS, NEW) == generate(
        model, KVpopCache(model, **served.settings), PROMPTS, NEW
    )


def test_replays_that_cannot_be_are_refused(case):
    """Wrong replays are refused and leave the cache unchanged."""
    model, _ = case("qwen3", "kvpop")
    graph_cache = KVpopCache(model, "full", max_length=72)
    with pytest.raises(RuntimeError, match="empty, or broken off in a pass, replays nothing: begin with a prompt"):
        graph_cache.replayed()
    with torch.no_grad():
        model(**padded(PROMPTS), past_key_values=graph_cache)
    graph_cache.replayed(2)
    with pytest.raises(ValueError, match="73 tokens are more than max_length 72"):
        graph_cache.replayed()
    for replays in (-1, 2.0, True):
        with pytest.raises(ValueError, match="passes must be an integer of at least 0"):
            graph_cache.replayed(replays)
    graph_cache.replayed(0)
    assert graph_cache.lengths == [72, 65]


def test_pages_that_a_graph_holds_are_not_given_up(case, recording):
    """Pages in a CUDA graph are kept by a reset, and another number of rows is refused."""
    model, served = case("qwen3", "kvpop")
    graph_cache = KVpopCache(model, **served.settings)
    with torch.no_grad():
        token = model(**padded(PROMPTS), past_key_values=graph_cache).logits[:, -1:].argmax(-1)
        recording.append(True)
        model(input_ids=token, past_key_values=graph_cache)
        recording.clear()
        graph_cache.reset()
        with pytest.raises(ValueError, match="a CUDA graph holds this KVpopCache's pages.*: make another KVpopCache"):
            model(**padded(PROMPTS[:1]), past_key_values=graph_cache)
        places = list(addresses(graph_cache))
        model(**padded(PROMPTS), past_key_values=graph_cache)
        assert list(addresses(graph_cache)) == places and graph_cache.lengths == [70, 63]
        copied = copy.deepcopy(graph_cache)
        copied.reset()
        model(**padded(PROMPTS[:1]), past_key_values=copied)
    assert copied.lengths == [70], "no graph holds a copy's pages"
