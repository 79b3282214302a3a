"""The bound of scores that are read again: its masks and readings, against the op and the rule of training."""

from __future__ import annotations

import pytest
import torch
from kernels.naive import visible_keys

from benchmarks.read_again import ReadAgain
from kvpop_vllm.distill.cutoffs import running_cutoffs
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import build, make_config

PROMPT, WINDOW, TOPK, LENGTH = 5, 6, [4, 11], 60
SHAPE = {"model_type": "llama", "num_layers": 1, "num_kv_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def layer():
    """A scorer that ranks tokens at random, keys and values."""
    torch.manual_seed(0)
    scorer = build(make_config(SHAPE, "mlstm", source="the test", sinks=0, window=WINDOW, topk=4, skip=True))
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return scorer, *torch.randn(2, 1, 2, LENGTH, 8)


@torch.no_grad()
def test_tokens_read_once_are_kept_as_in_training(layer):
    scorer, k, v = layer
    mask = ReadAgain([scorer], PROMPT, WINDOW, [TOPK], None, False).visible(0, k, v)
    roles = Retention(PROMPT + WINDOW + 4, PROMPT, WINDOW)
    order = running_cutoffs(scorer(k, v, window=WINDOW), scorer.log_gamma(), roles, TOPK)
    assert torch.equal(mask, visible_keys(*order, PROMPT, WINDOW)[0])


@torch.no_grad()
def test_a_token_that_leaves_the_window_is_read_as_the_scorer_reads_it(layer):
    """Later readings differ, and change what is kept but not how much."""
    scorer, k, v = layer
    once = scorer(k, v, window=WINDOW)[0].double()
    reader = ReadAgain([scorer], PROMPT, WINDOW, [TOPK], 7, False)
    readings = list(reader.readings(scorer.weights(), torch.cat([k, v], -1)))
    assert [q for q, _ in readings] == [11, 18, 25, 32, 39, 46, 53]
    for q, score in readings:
        torch.testing.assert_close(score[:, q - WINDOW], once[:, q - WINDOW], rtol=1e-4, atol=1e-4)
        assert (score[:, : q - WINDOW] - once[:, : q - WINDOW]).abs().max() > 0.01
    again = reader.visible(0, k, v)
    unread = ReadAgain([scorer], PROMPT, WINDOW, [TOPK], None, False).visible(0, k, v)
    assert torch.equal(again.sum(-1), unread.sum(-1)) and not torch.equal(again, unread)
