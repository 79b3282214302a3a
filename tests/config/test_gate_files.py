"""Scorer folders of gates (TRIM-KV, DMS, KVzap): round trips, and the scores of a gate."""

import math
from contextlib import nullcontext

import pytest
import torch

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers import Signals, checkpoint, from_tensors
from kvpop_vllm.scorers.untrained import init_scorer
from kvpop_vllm.testing import raw_scores, read_scorer, write_random_scorer

KINDS = {
    "rg": ("trimkv", {}),
    "rg2": ("trimkv", {"reads": "kv"}),
    "rg3": ("trimkv", {"reads": "kv", "gated": True}),
    "rg10": ("trimkv", {"hidden_layers": 2}),
    "gated-hidden": ("trimkv", {"gated": True}),
    "dms": ("dms", {}),
    "dms-query": ("dms", {"reads": "query", "shifted": True}),
    "kvzap": ("kvzap", {}),
    "kvzap-linear": ("kvzap", {"linear": True}),
}
SHAPE = ModelShape("qwen3", 2, 2, 32, 256, hidden_size=64)


@pytest.fixture
def written(model, tmp_path):
    return lambda name: write_random_scorer(tmp_path / name, model, KINDS[name][0], **KINDS[name][1])


@pytest.mark.parametrize("name", KINDS)
def test_a_gate_scores_as_the_oracle_does(written, name):
    """A gate scores like the oracle, with bfloat16 as torch's default dtype and bfloat16 inputs.

    vLLM loads weights with the model's dtype as the default.
    """
    folder, draw = written(name), torch.Generator().manual_seed(0)
    config, layers = checkpoint.read_scorer(folder)
    hidden, k, v = torch.randn(20, 64, generator=draw), *torch.randn(2, 20, 2, 32, generator=draw)
    hidden, k, v, channel = (x.bfloat16() for x in (hidden, k, v, k[..., 0]))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        gate = from_tensors(config, layers[1])
        scores = gate(Signals(hidden, k, v, channel))
    finally:
        torch.set_default_dtype(before)
    assert (
        scores.dtype == torch.float32
        and scores.shape == (20, 2)
        and not any(p.requires_grad for p in gate.parameters())
    )
    heads_first = (x.double().transpose(0, 1) for x in (k, v))
    exact = raw_scores(read_scorer(folder), 1, *heads_first, 16, hidden.double(), channel.double().T).T
    shift = int(getattr(config, "shifted", False))
    torch.testing.assert_close(scores[shift:].double(), exact[: len(exact) - shift], rtol=1e-5, atol=1e-5)
    assert scores.std(0).min() > 0.1


@pytest.mark.parametrize("name", KINDS)
def test_ranks_together_have_every_head_once(written, name):
    """Gates of two ranks together score like the gate of one rank.

    A gate that reads the keys and values of all heads is refused on several ranks. A gate that reads a query
    channel is refused if there are more ranks than KV heads, because a rank then lacks the query with that
    channel.
    """
    kind = KINDS[name][0]
    policy = policies.get(kind)(PolicySettings(kind, scorer=str(written(name))), SHAPE)
    draw = torch.Generator().manual_seed(0)
    signals = Signals(*(torch.randn(*shape, generator=draw) for shape in ((9, 64), (9, 2, 32), (9, 2, 32), (9, 2))))
    all_scores = policy.gate(1, slice(0, 2))(signals)
    policy.check_ranks(1)
    if policy.config.reads == "kv":
        with pytest.raises(ConfigError, match="of all heads: set --tensor-parallel-size 1"):
            policy.check_ranks(2)
        return
    policy.check_ranks(2)
    few = pytest.raises(ConfigError, match="set --tensor-parallel-size to at most 2")
    with few if policy.config.reads == "query" else nullcontext():
        policy.check_ranks(4)
    for head in range(2):
        head_signals = signals._replace(channel=signals.channel[:, head : head + 1])
        torch.testing.assert_close(policy.gate(1, slice(head, head + 1))(head_signals)[:, 0], all_scores[:, head])
    assert not torch.equal(policy.gate(0, slice(0, 2))(signals), all_scores), "layers are the same"


def test_compiled_graphs_differ_by_what_they_compute(written, model, tmp_path):
    graphs = {}
    for name, (kind, _) in KINDS.items():
        graphs[name] = policies.get(kind)(PolicySettings(kind, scorer=str(written(name))), SHAPE).graph
    wider = write_random_scorer(tmp_path / "wider", model, "trimkv", mlp_width=24)
    graphs["wider"] = policies.get("trimkv")(PolicySettings("trimkv", scorer=str(wider)), SHAPE).graph
    assert len(set(graphs.values())) == len(graphs)


UNTRAINED = {"trimkv": -math.log1p(math.exp(-8.0)), "dms": 5.0, "kvzap": 0.0}


@pytest.mark.parametrize("kind", UNTRAINED)
def test_an_untrained_gate_says_the_same_of_every_token(model, tmp_path, kind):
    """An untrained gate gives every token the same score.

    TRIM-KV is then a sliding window with beta close to 1, and KVzap one too. DMS evicts nothing while there is room.
    """
    config = init_scorer(model, tmp_path / kind, scorer=kind)
    _, layers = checkpoint.read_scorer(tmp_path / kind)
    scores = from_tensors(config, layers[0])(Signals(torch.randn(12, 64)))
    assert torch.equal(scores, scores[:1].expand(12, -1))
    torch.testing.assert_close(scores[0], torch.full((2,), UNTRAINED[kind]))
