"""The oracle of attention-coupled policies, checked against the whole matrix of attention weights."""

import math

import pytest
import torch

from kvpop_vllm.testing import OraclePolicy, corrected_attention, masked_attention, retained_by_attention

HEADS, GROUP, SIZE, LENGTH = 2, 3, 16, 70
SHAPE = dict(sinks=2, window=5, topk=12)
HOW = ["newest mass", "mean mass", "moment residual"]


def random_qkv(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(h, LENGTH, SIZE, generator=draw, dtype=torch.float64) for h in (HEADS * GROUP, HEADS, HEADS)]


def weights(query, key, visible):
    """Return attention weights averaged over the query heads of each KV head, ``[H, S, S]``."""
    logits = query.view(HEADS, GROUP, LENGTH, SIZE) @ key.unsqueeze(1).transpose(-1, -2) / math.sqrt(SIZE)
    return logits.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1).mean(1)


def effective(how, w, key, value, visible, h, q, t):
    if how == "mean mass":
        return float(w[h, t:q, t].mean())
    if how == "newest mass":
        return float(w[h, q - 1, t])
    gone = ~visible[h, q - 1]
    gone[q:] = False
    novelty = value[h, t]
    if gone.any():
        k, v = key[h, gone], value[h, gone]
        covariance = (v - v.mean(0)).T @ (k - k.mean(0)) / len(k)
        novelty = novelty - v.mean(0) - covariance @ key[h, t] / math.sqrt(SIZE)
    return float(w[h, q - 1, t] * novelty.norm())


@pytest.mark.parametrize("how", HOW)
def test_every_decision_evicts_the_lowest(how):
    query, key, value = random_qkv()
    visible, margins, scores, lost = retained_by_attention(query, key, value, how, **SHAPE)
    w, decisions = weights(query, key, visible), 0
    for h in range(HEADS):
        for q in range(1, LENGTH):
            gone = torch.nonzero(visible[h, q - 1] & ~visible[h, q]).flatten().tolist()
            stay = [t for t in range(2, q - 4) if visible[h, q, t]]
            assert not (visible[h, q, :q] & ~visible[h, q - 1, :q]).any(), "a token came back"
            assert visible[h, q, :2].all() and visible[h, q, max(0, q - 4) : q + 1].all()
            assert len(stay) == min(12, max(0, q - 6))
            if not gone:
                assert margins[h, q] == math.inf and lost[h, q] == -1 and scores[h, q].isnan().all()
                continue
            rank = {t: effective(how, w, key, value, visible, h, q, t) for t in gone + stay}
            worst, best = min(rank[t] for t in stay), max(rank[t] for t in gone)
            assert worst > best and lost[h, q] == max(gone, key=rank.get)
            assert float(margins[h, q]) == pytest.approx(worst - best, abs=1e-12)
            assert scores[h, q].tolist() == pytest.approx([best, worst], abs=1e-12)
            decisions += 1
    assert decisions > 15


@pytest.mark.parametrize("how", HOW)
def test_forced_sets_are_judged_and_checked(how):
    query, key, value = random_qkv()
    visible, margins, _, lost = retained_by_attention(query, key, value, how, **SHAPE)
    head, q = (int(i) for i in (margins == margins.min()).nonzero()[0])
    bias = [(head, int(lost[head, q]), 2 * float(margins.min()))]
    nudged, _, _, _ = retained_by_attention(query, key, value, how, **SHAPE, bias=bias)
    assert not torch.equal(nudged[head, q], visible[head, q]) and torch.equal(nudged[:, :q], visible[:, :q])
    forced, judged, _, _ = retained_by_attention(query, key, value, how, **SHAPE, forced=nudged)
    assert torch.equal(forced, nudged)
    assert float(judged[head, q]) == pytest.approx(-float(margins.min()), rel=1e-6)
    nudged[head, q, q] = False
    with pytest.raises(ValueError, match=f"head {head}, query {q}"):
        retained_by_attention(query, key, value, how, **SHAPE, forced=nudged)
    with pytest.raises(ValueError, match="tokens are lost, 1 must be"):
        retained_by_attention(query, key, value, how, **SHAPE, forced=torch.ones_like(nudged).tril())


def test_corrected_attention():
    """Corrected attention is plain attention if nothing is evicted, and dense if evicted keys are equal."""
    query, key, value = random_qkv()
    everything = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool).tril()
    plain = masked_attention(query, key, value, everything)
    torch.testing.assert_close(corrected_attention(query, key, value, everything), plain, rtol=0, atol=1e-12)
    lacking = everything.clone()
    lacking[:, 30:, 10:20] = False
    key[:, 10:20] = key[:, 10:11]
    dense, evicted = masked_attention(query, key, value, everything), masked_attention(query, key, value, lacking)
    torch.testing.assert_close(corrected_attention(query, key, value, lacking), dense, rtol=0, atol=1e-12)
    assert (evicted - dense)[30:].abs().mean() > 0.01
    policy = OraclePolicy("recency", **SHAPE, corrected=True)
    assert torch.equal(policy.attend(query, key, value, lacking), corrected_attention(query, key, value, lacking))
