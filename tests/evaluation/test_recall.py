"""Recall matches its definition, token by token."""

import dataclasses
import math

import pytest
import torch
from kernels.naive import kept_sets
from transformers import AutoModelForCausalLM

from kvpop_vllm.cache.accounting import request_bytes
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.distill.cutoffs import kept_at, running_cutoffs
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.recall import Judge
from kvpop_vllm.evaluation.runner import Setting, evaluate, resolve_all
from kvpop_vllm.evaluation.summaries import summarise_text
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.roles import Retention

S, ROLES, Q0 = 90, Retention(16, 2, 6), [40, 70]


@pytest.fixture(scope="module")
def layer():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, S, 16, generator=g) * 2, torch.randn(1, 2, S, 16, generator=g)
    return q, k, dense_attention(q, k, k, 0.25)[1]


def probabilities(q, k):
    logits = (q.double() @ k.double().repeat_interleave(2, 1).mT * 0.25).masked_fill(
        ~torch.ones(S, S).tril().bool(), -torch.inf
    )
    return logits.softmax(-1)


def recall(judge, score, log_gamma, positions=Q0):
    rank, cutoff = running_cutoffs(score, log_gamma, ROLES)
    return judge.recall_of([kept_at(rank, cutoff, q0, ROLES) for q0 in positions], log_gamma, ROLES, positions)


def test_hindsight_by_definition(layer):
    q, k, lse = layer
    score, log_gamma = torch.randn(1, 2, S, generator=torch.Generator().manual_seed(5)), torch.tensor([-0.05, -0.001])
    got = recall(Judge(q, k, lse, 0.25), score, log_gamma)
    p = probabilities(q, k)[0].view(2, 2, S, S)
    priority = score.double() - torch.arange(S) * log_gamma.double()[:, None]
    visible = kept_sets(priority, 2, 6, 8)[0]
    for h in range(2):
        hits, shares = [], []
        for q0 in Q0:
            eligible = range(2, q0 - 5)
            mass = {t: float(p[h, :, q0 + 1 :, t].sum(-1).max()) for t in eligible}
            best = sorted(eligible, key=lambda t: -mass[t])[:8]
            retained = [t for t in eligible if visible[h, q0, t]]
            hits.append(len(set(best) & set(retained)) / 8)
            shares.append(sum(mass[t] for t in retained) / sum(mass[t] for t in best))
        assert float(got.hindsight[h]) == pytest.approx(sum(hits) / 2)
        assert float(got.mass[h]) == pytest.approx(sum(shares) / 2, rel=1e-4)


def test_the_teacher_recalls_itself_and_shares_the_decay(layer):
    q, k, lse = layer
    judge = Judge(q, k, lse, 0.25)
    strong = torch.full((2,), -5.0)
    assert recall(judge, judge.target(6), torch.zeros(2)).teacher.tolist() == [1.0, 1.0]
    random = torch.rand(1, 2, S, generator=torch.Generator().manual_seed(2))
    assert recall(judge, random, strong).teacher.min() > 0.85  # the decay decides for both
    assert recall(judge, random, torch.zeros(2)).teacher.max() < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("budget", [512, 1000, 1024])
def test_equal_bytes_are_equal_and_k_is_the_largest(dtype, size, budget):
    """MomentKV, whose moments take D x (D + 2) words, gets the largest k of equal bytes."""
    shape, setting = ModelShape("llama", 3, 2, size, 4096), Setting(4096, budget, 4, 64, "bytes")

    def bytes_of(budget, floats):
        layout = PageLayout(2, size, dtype, state_floats=floats)
        return request_bytes(layout, 3, 4096, Retention(budget, 4, 64)).allocated

    moments = size * (size + 2)
    budget_found = setting.resolve(training_free("momentkv"), shape, dtype).roles.budget
    assert bytes_of(budget_found, moments) == bytes_of(budget, 0) < bytes_of(budget_found + 1, moments)
    equal_k = dataclasses.replace(setting, equal="k").resolve(training_free("momentkv"), shape, dtype)
    assert equal_k.roles.topk == budget - 68 == setting.resolve(training_free("h2o"), shape, dtype).roles.topk


@pytest.mark.parametrize("positions", [7, S])
def test_next_token_quality_by_definition(model, monkeypatch, positions):
    """Next-token quality of the dense model; tests/evaluation/test_served.py has that of policies."""
    monkeypatch.setattr("kvpop_vllm.evaluation.replay.POSITIONS", positions)
    loaded, plain = load_model(model, torch.float32), AutoModelForCausalLM.from_pretrained(model)
    rows = [torch.randint(0, 256, (S,), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    pairs = [(training_free("l2norm"), Setting(S, 30, 2, 6))]
    records = list(evaluate(loaded, rows, [S], resolve_all(pairs, ModelShape.of(model, S), torch.float32)))
    assert [(r["row"], r["policy"]) for r in records] == [(i, p) for i in (0, 1) for p in ("dense", "l2norm")]
    for row, record in zip(rows, records[::2], strict=True):
        with torch.no_grad():
            logp = plain(row[None]).logits[0, :-1].log_softmax(-1)
        nll = -logp.gather(-1, row[1:, None]).mean().item()
        assert record["nll"] == pytest.approx(nll, rel=1e-4) and "kl" not in record
        assert record["accuracy"] == pytest.approx((logp.argmax(-1) == row[1:]).float().mean().item())
    lines = {line["policy"]: line for line in summarise_text([{"unit": 0} | record for record in records])}
    nll = sum(r["nll"] for r in records if r["policy"] == "l2norm") / 2
    assert lines["l2norm"]["perplexity"] == pytest.approx(math.exp(nll)) and lines["l2norm"]["rows"] == 2
