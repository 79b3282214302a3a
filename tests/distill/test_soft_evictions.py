"""Training of gates (TRIM-KV, DMS): the papers' formulas written out in float64, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from kvpop_vllm.distill import soft_evictions
from kvpop_vllm.distill.gates import DMSAttend, TrimKVAttend, capacity_loss, eviction_target
from kvpop_vllm.distill.soft_evictions import after, by_age, soft_attention, soft_sizes
from kvpop_vllm.roles import Retention

HEADS, GROUP, LENGTH, SIZE = 2, 3, 37, 8
SCALE = SIZE**-0.5


@pytest.fixture(autouse=True)
def blocks_of_ten(monkeypatch):
    """Make a sequence span several blocks of rows, the last of them not full."""
    monkeypatch.setattr(soft_evictions, "ROWS", 10)


def drawn(length=LENGTH, batch=2, seed=0):
    """Return q, k, v and beta in float64, with beta within (0, 1)."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, length, SIZE, generator=draw, dtype=torch.float64) for n in (HEADS * GROUP, HEADS, HEADS)
    )
    beta = torch.rand(batch, HEADS, length, generator=draw, dtype=torch.float64) * 0.95 + 0.04
    return q, k, v, beta


def decayed(q, k, v, beta):
    """Return TRIM-KV eq. 3, query by query and token by token, without logarithms.

    The weights are ``beta_i^(t-i) exp(q k)``.
    """
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            for t in range(q.shape[2]):
                kv = head // GROUP
                weights = torch.stack(
                    [beta[b, kv, i] ** (t - i) * torch.exp(SCALE * (q[b, head, t] @ k[b, kv, i])) for i in range(t + 1)]
                )
                out[b, head, t] = (weights.unsqueeze(-1) * v[b, kv, : t + 1]).sum(0) / weights.sum()
    return out


def test_attention_decays_as_the_paper_writes_it():
    q, k, v, beta = drawn(batch=1)
    torch.testing.assert_close(soft_attention(q, k, v, beta.log(), by_age, SCALE), decayed(q, k, v, beta))


@pytest.mark.parametrize("weigh", [by_age, after(5)], ids=["trimkv", "dms"])
def test_attention_sinks_are_keys_without_a_value(weigh):
    """They equal a first key that every query sees, of value 0 and weight 1, and get no gradient."""
    q, k, v, beta = drawn(batch=1)
    sinks = torch.randn(HEADS * GROUP, dtype=torch.float64, requires_grad=True)
    out = soft_attention(q, k, v, beta.log(), weigh, SCALE, sinks)
    for head in range(HEADS * GROUP):
        kv = head // GROUP
        ages = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        weights = torch.exp(SCALE * q[0, head] @ k[0, kv].T) * beta[0, kv] ** weigh(ages.clamp_min(0)) * (ages >= 0)
        exact = weights @ v[0, kv] / (weights.sum(-1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(out[0, head], exact.detach())
    assert not out.requires_grad


@pytest.mark.parametrize("capacity", [0, 2, 4])
def test_the_capacity_loss_is_the_papers_double_sum(capacity):
    beta = drawn()[3]
    total = 0.0
    for b in range(beta.shape[0]):
        for h in range(HEADS):
            for t in range(1, LENGTH + 1):
                occupancy = sum(float(beta[b, h, i - 1]) ** (t - i) for i in range(1, t + 1))
                total += max(0.0, occupancy - capacity) / t / LENGTH
    assert float(capacity_loss(beta.log(), capacity)) == pytest.approx(total / beta.shape[0] / HEADS, rel=1e-12)
    assert float(capacity_loss(beta.log(), capacity)) > 0


@pytest.mark.parametrize("weigh", [by_age, after(5)], ids=["trimkv", "dms"])
def test_gradients(weigh):
    q, k, v, beta = (x[:1, :, :13].requires_grad_() for x in drawn())
    terms = beta.detach().log().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: soft_attention(*x, weigh, SCALE), (q, k, v, terms), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: soft_sizes(x, weigh), (terms,))
    assert torch.autograd.gradcheck(lambda x: capacity_loss(x, 2), (terms,))


def test_low_precision_is_computed_in_float32():
    q, k, v, beta = drawn()
    low = soft_attention(*(x.bfloat16() for x in (q, k, v)), beta.log().float(), by_age, SCALE)
    exact = soft_attention(*(x.bfloat16().double() for x in (q, k, v)), beta.log(), by_age, SCALE)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=2**-8, atol=1e-6)


def given(scores):
    """Return a gate that gives every sequence the same scores, ``[B, S, H]``."""
    return lambda layer, signals: scores.transpose(1, 2)


def test_a_layer_sees_what_goes_into_its_attention_once():
    q, k, v, beta = drawn()
    signals_by_layer = {}

    def gate(layer, signals):
        signals_by_layer[layer] = signals
        return beta.log().transpose(1, 2)

    attend, hidden = TrimKVAttend(gate, 4), torch.randn(2, LENGTH, 5)
    attend.see(3, hidden)
    out = attend(3, q, k, v, SCALE)
    torch.testing.assert_close(out, soft_attention(q, k, v, beta.log(), by_age, SCALE))
    assert signals_by_layer[3].hidden is hidden and torch.equal(signals_by_layer[3].k, k.transpose(1, 2))
    loss, parts = attend.loss()
    assert loss == capacity_loss(beta.log(), 4) and parts == {"capacity": loss.item()}
    attend(3, q, k, v, SCALE)
    assert signals_by_layer[3].hidden is None


def dms(keep, target=0.5, tau=0.1, sinks=1, window=6, seed=0):
    attend = DMSAttend(given(keep), Retention(sinks + window + 100, sinks, window), target, tau, seed)
    attend.see(0, None)
    return attend


def masked(q, k, v, visible):
    """Return dense attention over the tokens in the mask ``seen [B, H, S, S]``."""
    logits = q.unflatten(1, (HEADS, GROUP)) @ k.unsqueeze(2).transpose(-1, -2) * SCALE
    weights = logits.masked_fill(~visible.unsqueeze(2), -math.inf).softmax(-1)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


def test_sure_decisions_are_a_mask_delayed_by_the_window():
    """Evicted tokens are visible until they leave the window, sinks and all other tokens for good.

    Logits far from 0 make noise and temperature irrelevant.
    """
    q, k, v, beta = drawn()
    retained = beta > 0.5
    attend = dms(torch.where(retained, 1e3, -1e3).double(), sinks=2)
    out = attend(0, q, k, v, SCALE)
    t, query = torch.arange(LENGTH), torch.arange(LENGTH).unsqueeze(1)
    stays = retained | (t < 2)
    visible = (t <= query) & ((query - t < 6) | stays.unsqueeze(2))
    torch.testing.assert_close(out, masked(q, k, v, visible))
    loss, parts = attend.loss()
    share = float((~retained[..., 2:]).double().mean())
    assert parts["evicted"] == pytest.approx(share) and 0 < share < 1
    assert float(loss) == pytest.approx(max(0.0, 0.5 - share))


def test_noise_is_that_of_a_binary_gumbel_softmax():
    """At tau = 1 the share of alpha > 1/2 is the sigmoid of the logit; equal rows draw equal noise.

    Other rows and layers draw other noise.
    """
    q, k, v, beta = drawn(length=4000, batch=1)
    for logit in (-1.0, 0.0, 2.0):
        attend = dms(torch.full_like(beta, -logit), tau=1.0)
        attend.scores = lambda layer, k, v, logit=logit: torch.full_like(beta, -logit)
        noise = attend._noise(0, beta)
        share = float((noise + logit > 0).double().mean())
        assert share == pytest.approx(1 / (1 + math.exp(-logit)), abs=0.02)
    noise = [dms(beta, seed=seed)._noise(layer, beta) for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert torch.equal(noise[0], noise[1])
    assert all(not torch.equal(noise[0], other) for other in noise[2:])


def test_the_compression_loss_is_one_sided_and_straight_through():
    q, k, v, beta = drawn()
    keep = (beta - 0.5).requires_grad_()
    for target, penalised in ((0.9, True), (0.1, False)):
        attend = dms(keep, target=target, tau=1.0)
        attend(0, q, k, v, SCALE)
        loss, parts = attend.loss()
        assert parts["evicted"] == pytest.approx(0.5, abs=0.1) and (loss.item() > 0) == penalised
        (gradient,) = torch.autograd.grad(loss, keep)
        if not penalised:
            assert not gradient.any()
            continue
        alpha = torch.sigmoid(attend._noise(0, keep) - keep)
        expected = alpha * (1 - alpha) / alpha[..., 1:].numel()
        expected[..., 0] = 0  # the sink
        torch.testing.assert_close(gradient, expected.detach())


def test_the_target_rises_with_the_compression_ratio():
    assert [eviction_target(step, 8, 8.0) for step in (0, 7, 9)] == [0.0, 0.875, 0.875]
    assert [1 / (1 - eviction_target(step, 8, 8.0)) for step in range(8)] == pytest.approx(range(1, 9))
    assert eviction_target(0, 1, 4.0) == 0.0
