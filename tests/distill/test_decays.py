"""Fitted decays lose least attention, by evictions simulated token by token in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distill.rows import Rows, noisy_student
from distill.train_tiny import LENGTH, RECIPE

from kvpop_vllm.distill.decays import decay_grid, fit_decays, lost_mass
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.kernels import ops
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Decay
from kvpop_vllm.scorers.base import log_gamma


def evicted_mass(q, k, score, log_gamma, roles, positions, scale):
    """Return the attention mass lost by one KV head under one decay, with permanent evictions one by one.

    Args:
        q: ``[G, S, D]``.
        k: ``[S, D]``.
        score: ``[S]``.
    """
    q, k, score = q.double(), k.double(), score.double()
    retained, gone, lost = [], [], {}
    for p in range(len(k)):
        leaves = p - roles.window
        if leaves >= roles.sinks:
            retained.append(leaves)
            if len(retained) > roles.topk:
                worst = min(retained, key=lambda t: (score[t] + (p - t) * log_gamma, t))
                retained.remove(worst)
                gone.append(worst)
        if p in positions:
            weights = torch.softmax(q[:, p] @ k[: p + 1].T * scale, -1)
            lost[p] = weights[:, gone].sum(-1).mean()
    return sum(lost[p] for p in positions) / len(positions)


def brute_force(q, k, scores, log_gammas, budgets, positions, scale):
    heads = k.shape[0]
    q = q.unflatten(0, (heads, -1))
    return torch.tensor(
        [
            [
                [evicted_mass(q[h], k[h], score[h], lg.item(), b, positions, scale) for h in range(heads)]
                for lg in log_gammas
            ]
            for b, score in zip(budgets, scores, strict=True)
        ]
    )


def test_lost_mass_is_what_evicted_tokens_would_have_got():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 50, 8, generator=g), torch.randn(1, 2, 50, 8, generator=g)
    scores = torch.randn(3, 1, 2, 50, generator=g) * 0.2
    budgets, positions, grid = (
        [Retention(13, 2, 5), Retention(20, 2, 5), Retention(15, 2, 9)],
        [15, 20, 21, 37, 49],
        decay_grid(Decay(1, 0.9, 0.999)),
    )
    _, lse = ops.sparse_attention(
        q, k, k, *[torch.zeros(1, 2, 50, dtype=torch.int32)] * 2, sinks=0, window=1, scale=0.7
    )
    actual = lost_mass(q, k, lse, scores, grid, budgets, torch.tensor(positions), 0.7)
    expected = brute_force(q[0], k[0], scores[:, 0], grid, budgets, positions, 0.7)
    assert (actual - expected).abs().max() < 1e-5
    assert expected.amin() > 0.01 and expected.amax(1).sub(expected.amin(1)).min() > 0.02  # decays do matter here


def test_later_keys_do_not_count_however_large_they_are():
    """A key may have a logit far above the log-normaliser of the queries before it."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 30, 8, generator=g), torch.randn(1, 1, 30, 8, generator=g)
    scores, budgets = torch.randn(1, 1, 1, 30, generator=g), [Retention(9, 2, 3)]
    grid, positions = decay_grid(Decay(1, 0.9, 0.999)), [12, 20]
    losses = []
    for later in (1.0, 1e4):
        k[:, :, 21:] *= later
        zeros = torch.zeros(1, 1, 30, dtype=torch.int32)
        _, lse = ops.sparse_attention(q, k, k, zeros, zeros, sinks=0, window=1, scale=1.0)
        losses.append(lost_mass(q, k, lse, scores, grid, budgets, torch.tensor(positions), 1.0))
    assert (q[0, :, 20] @ k[0, 0, 21:].T).max() > 1000 and losses[0].min() > 0
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)


class Recorder:
    """Dense attention that records the inputs of every layer."""

    def __init__(self, student):
        self.student, self.inputs = student, {}

    def __call__(self, layer, q, k, v, scale):
        scores = [self.student.scorers[layer](k, v, window=window)[0][0] for window in (8, 12)]
        self.inputs[layer] = (q[0], k[0], scores, scale)
        rank = torch.zeros(k.shape[:3], dtype=torch.int32)
        return ops.sparse_attention(q, k, v, rank, rank, sinks=0, window=1, scale=scale, impl="reference")[0]


def test_every_head_gets_the_decay_that_loses_least(model):
    recipe, decay = dataclasses.replace(RECIPE, window=[8, 12], topk=[20, 9]), Decay(1, 0.8, 0.999)
    student = noisy_student(model, recipe)
    config = student.scorers[0].scorer.config
    with torch.no_grad():
        for name, p in student.base.named_parameters():
            if name.endswith("q_norm.weight"):
                p.mul_(8)  # a tiny random model attends to all tokens alike, and no decay is better
    rows = Rows(LENGTH)
    rows = [rows[0], rows[1]]
    logits, lowest_loss = fit_decays(student, rows, decay)

    grid, budgets = decay_grid(decay), [student.roles(0), student.roles(1)]
    positions = list(range(budgets[0].budget, LENGTH))
    lost = torch.zeros(2, 2, len(grid), config.num_kv_heads)
    for number, row in enumerate(rows):
        recorder = Recorder(student)
        with torch.no_grad():
            student.read(row.unsqueeze(0), recorder, number)
        for layer, (q, k, scores, scale) in recorder.inputs.items():
            lost[layer] += brute_force(q, k, scores, grid, budgets, positions, scale) / 2
    chosen = torch.stack([log_gamma(layer_logits, decay) for layer_logits in logits])
    index = (chosen.unsqueeze(-1) - grid).abs().argmin(-1)
    assert (chosen - grid[index]).abs().max() < 1e-6
    judged = lost.log().mean(1)
    assert judged.amax(1).sub(judged.amin(1)).min() > 0.01 and len(index.unique()) > 1
    best = judged.amin(1)
    assert (judged.gather(1, index.unsqueeze(1))[:, 0] - best).abs().max() < 1e-5
    chosen_loss = lost.gather(2, index[:, None, None, :].expand(-1, 2, 1, -1))
    assert lowest_loss == pytest.approx(chosen_loss.mean().item(), rel=1e-4)


def test_heads_that_lose_nothing_get_the_slowest_decay(model, tmp_path):
    student, decay = Trainer(model, RECIPE, tmp_path / "out", Rows(LENGTH)).student, Decay(1, 0.8, 0.999)
    q, sink = torch.zeros(2, 1, 2, LENGTH, 32)
    q[..., 0] = 1e4
    sink[:, :, 0, 0] = 1.0  # all attention goes to the first token, which is never evicted
    student.read = lambda tokens, observe, row: [observe(layer, q, sink, sink, 1.0) for layer in range(2)]
    logits, lost = fit_decays(student, [Rows(LENGTH)[0]], decay)
    chosen = torch.stack([log_gamma(layer_logits, decay) for layer_logits in logits])
    assert lost < 1e-6 and (chosen - decay_grid(decay)[-1]).abs().max() < 1e-6
