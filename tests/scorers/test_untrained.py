"""Scorers before training: projections near the identity, zero output, hence a sliding window."""

from __future__ import annotations

import pytest
import torch

from kvpop_vllm.distill.sparse import recency, running_cutoffs
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import build, log_gamma, make_config

SIZE, HEADS, LENGTH = 32, 2, 90
KINDS = {
    "mlstm": {"scorer": "mlstm"},
    "mlstm, all options": {
        "scorer": "mlstm",
        "norm": True,
        "skip": True,
        "gate_softcap": 3.0,
        "feature_map": "softmax",
    },
    "immediate": {"scorer": "mlstm", "delayed": False},
    "mlp": {"scorer": "mlp"},
    "linear": {"scorer": "linear"},
}


def untrained(kind, **sizes):
    torch.manual_seed(0)
    shape = {"model_type": "llama", "num_layers": 1, "num_kv_heads": HEADS, "head_dim": SIZE}
    return build(make_config(shape, source="test", sinks=2, window=6, topk=9, **KINDS[kind]), **sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_scorer_is_the_sliding_window(kind):
    scorer, (k, v) = untrained(kind), torch.randn(2, 1, HEADS, LENGTH, SIZE)
    with torch.no_grad():
        score, decay = scorer(k, v, window=6), scorer.log_gamma()
    found = running_cutoffs(score, decay, Retention(17, 2, 6))
    expected = running_cutoffs(*recency(0, k, v, 6), Retention(17, 2, 6))
    t, q = torch.arange(LENGTH), torch.arange(LENGTH).unsqueeze(1)
    eligible = (t >= 2) & (t <= q - 6)
    kept, newest = (((rank.unsqueeze(-2) <= cutoff.unsqueeze(-1)) & eligible) for rank, cutoff in (found, expected))
    assert torch.equal(kept, newest)
    assert torch.equal(kept[0, 0], eligible & (t > q - 6 - 9))


def test_projections_pick_channels_and_the_forget_gate_is_open():
    scorer = untrained("mlstm")
    key, value = torch.zeros(2 * SIZE), torch.zeros(2 * SIZE)
    key[3], value[SIZE + 5] = 1.0, 1.0
    for name, x, channel in (("q_proj", key, 3), ("k_proj", key, 3), ("v_proj", value, 5)):
        picked = x @ getattr(scorer, name).detach()
        assert (picked.argmax(-1) == channel).all() and (picked[:, channel] - 1).abs().max() < 0.06, name
        others = (value if x is key else key) @ getattr(scorer, name).detach()
        assert others.abs().max() < 0.06, name
    assert not scorer.out.weight.any() and not scorer.out.bias.any()
    assert (torch.sigmoid(scorer.fgate.bias) > 0.98).all() and not scorer.fgate.weight.any()
    assert not untrained("mlp").fc2.weight.any() and not untrained("linear").weight.any()


def test_decays_begin_within_their_range():
    scorer = untrained("mlstm")
    gamma = log_gamma(scorer.decay_logit, scorer.config.decay).exp()
    assert ((gamma > scorer.config.decay.min) & (gamma < scorer.config.decay.max)).all()
