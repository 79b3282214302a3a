"""Scorers before training: projections near the identity, zero output, hence a sliding window."""

import pytest
import torch

from kvpop_vllm.distill.sparse_attention import recency, running_cutoffs
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import build, make_config

SIZE, HEADS, LENGTH = 32, 2, 90
KINDS = {
    "mlstm": {"scorer": "mlstm"},
    "softmax": {"scorer": "mlstm", "norm": True, "skip": True, "gate_softcap": 3.0, "feature_map": "softmax"},
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
    cutoffs = running_cutoffs(score, decay, Retention(17, 2, 6))
    expected = running_cutoffs(*recency(0, k, v, 6), Retention(17, 2, 6))
    t, q = torch.arange(LENGTH), torch.arange(LENGTH).unsqueeze(1)
    eligible = (t >= 2) & (t <= q - 6)
    retained, newest = (
        ((rank.unsqueeze(-2) <= cutoff.unsqueeze(-1)) & eligible) for rank, cutoff in (cutoffs, expected)
    )
    assert torch.equal(retained, newest)
    assert torch.equal(retained[0, 0], eligible & (t > q - 6 - 9))
