"""Training objectives by definition: targets token by token, teacher's KL, learning rate, loss weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from distill.dispatched import AllocatedBytes
from distill.rows import Rows, teacher_of
from distill.train_tiny import LENGTH, RECIPE, RECIPES
from kernels.naive import masked_attention

from kvpop_vllm.distill.cutoffs import kept_at, running_cutoffs
from kvpop_vllm.distill.gates import KVzapAttend
from kvpop_vllm.distill.listwise import listwise_loss
from kvpop_vllm.distill.losses import RetentionLoss, top_kl
from kvpop_vllm.distill.recipes import KVZAP, PAPER
from kvpop_vllm.distill.sparse_attention import Sparse, dense_attention
from kvpop_vllm.distill.targets import retention_target
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.reference import future_attention_mass
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.roles import Retention
from kvpop_vllm.testing import write_tiny_model

S, WINDOW, SCALE = 40, 5, 0.4


@pytest.fixture(scope="module")
def layer():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, S, 8, generator=g) * 3, torch.randn(1, 2, S, 8, generator=g) * 2
    return q, k, dense_attention(q, k, k, SCALE)[1]


@pytest.mark.parametrize("lookahead", [None, 0, 7])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("groups", ["max", "mean"])
def test_targets_token_by_token(layer, lookahead, normalise, groups):
    """The target is KVpop's equations 13 to 17: queries t + w to S - 1, with look-ahead L the first L + 1."""
    q, k, lse = layer
    target = retention_target(
        q, k, lse, window=WINDOW, scale=SCALE, lookahead=lookahead, normalise=normalise, groups=groups
    )
    for h in range(2):
        for t in range(S):
            last = S if lookahead is None else min(S, t + WINDOW + lookahead + 1)
            masses = []
            for query_head in (2 * h, 2 * h + 1):
                logits = [float(q[0, query_head, i] @ k[0, h, t]) * SCALE for i in range(t + WINDOW, last)]
                norms = [float(lse[0, query_head, i]) for i in range(t + WINDOW, last)]
                masses.append(sum(math.exp(x - z) for x, z in zip(logits, norms, strict=True)))
            mass = max(masses) if groups == "max" else sum(masses) / 2
            if normalise:  # by the number of queries within L + 1 in a row of any length
                count = max(1, S - WINDOW - t)
                mass /= count if lookahead is None else min(count, lookahead + 1)
            assert float(target[0, h, t]) == pytest.approx(math.log(mass + 1e-8), abs=2e-4)


@pytest.mark.parametrize("groups", ["max", "mean"])
def test_regression_token_by_token(layer, groups):
    """KVzap's loss: squared errors of tokens after the sinks that leave the window in the row, under dense attention.

    Its gradient reaches the scores of these tokens alone.
    """
    q, k, _ = layer
    scores = torch.randn(1, S, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    recipe = dataclasses.replace(KVZAP, length=S, sinks=2, window=[WINDOW], topk=[6], groups=groups)
    shown = []
    attend = KVzapAttend(lambda _, read: shown.append(read) or scores, Retention(2 + WINDOW + 6, 2, WINDOW), recipe)
    attend.see(4, torch.zeros(1, S, 3))
    out = attend(4, q, k, k, SCALE)
    torch.testing.assert_close(out, dense_attention(q, k, k, SCALE)[0])
    assert shown[0].hidden.shape == (1, S, 3) and torch.equal(shown[0].k, k.transpose(1, 2))
    logits = (q.view(2, 2, S, 8) @ k[0, :, None].mT * SCALE).masked_fill(~torch.ones(S, S).tril().bool(), -math.inf)
    weights, errors, targets = logits.softmax(-1), {}, {}
    for h in range(2):
        for t in range(2, S - WINDOW):
            masses = [float(weights[h, g, t + WINDOW :, t].sum()) / (S - WINDOW - t) for g in range(2)]
            targets[h, t] = math.log((max(masses) if groups == "max" else sum(masses) / 2) + 1e-8)
            errors[h, t] = float(scores.detach()[0, t, h]) - targets[h, t]
    loss, measures = attend.loss()
    mean = sum(error**2 for error in errors.values()) / len(errors)
    assert float(loss.detach()) == pytest.approx(mean, rel=1e-3)
    means = [sum(target for (h, _), target in targets.items() if h == head) / (S - WINDOW - 2) for head in range(2)]
    variance = sum((target - means[h]) ** 2 for (h, _), target in targets.items()) / len(errors)
    assert measures == {"explained": pytest.approx(1 - mean / variance, rel=1e-2)}
    (gradient,) = torch.autograd.grad(loss, scores)
    expected = torch.zeros(S, 2)
    for (h, t), error in errors.items():
        expected[t, h] = 2 * error / len(errors)
    torch.testing.assert_close(gradient[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("groups", ["max", "mean"])
def test_listwise_loss_token_by_token(layer, groups, step):
    """At each position: the shares of the attention from there on, against the softmax of effective scores."""
    q, k, lse = layer
    roles, queries = Retention(2 + WINDOW + 6, 2, WINDOW, step=step), [13, 20, 39]
    score = torch.randn(1, 2, S, generator=torch.Generator().manual_seed(1))
    log_gamma = torch.tensor([-0.1, -0.3])
    terms = []
    for h in range(2):
        for query in queries:
            tokens = range(2, query - WINDOW + 1)
            mass = []
            for t in tokens:
                heads = [
                    sum(math.exp(float(q[0, g, j] @ k[0, h, t]) * SCALE - float(lse[0, g, j])) for j in range(query, S))
                    for g in (2 * h, 2 * h + 1)
                ]
                mass.append((max(heads) if groups == "max" else sum(heads) / 2) + 1e-8)
            weight = [math.exp(float(score[0, h, t]) + (query - t) // step * float(log_gamma[h])) for t in tokens]
            shares = [(m / sum(mass), w / sum(weight)) for m, w in zip(mass, weight, strict=True)]
            terms.append(sum(p * math.log(p / q_share) for p, q_share in shares))
    loss = listwise_loss(score, log_gamma, q, k, lse, queries, roles, scale=SCALE, groups=groups)
    assert float(loss) == pytest.approx(sum(terms) / len(terms), rel=1e-4)
    options = {"scale": SCALE, "groups": groups, "begins": [13, 21]}  # the second head has more slots
    late = listwise_loss(score, log_gamma, q, k, lse, queries, roles, **options)
    assert float(late) == pytest.approx((sum(terms[:3]) + terms[5]) / 4, rel=1e-4)


def attention_from(q, k, lse, positions):
    """Return the attention that each token gets from each position on, ``[B, H, G, P, S]``, as one dense array."""
    asking, norms = q.unflatten(1, (k.shape[1], -1)), lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)
    weights = (asking @ k.unsqueeze(2).mT * SCALE - norms).exp().tril()
    return torch.stack([weights[..., position:, :].sum(-2) for position in positions], 3)


@pytest.mark.parametrize("block", [128, 7])
@pytest.mark.parametrize("groups", ["max", "mean"])
@pytest.mark.parametrize("step", [1, 3])
def test_listwise_loss_in_blocks_is_the_dense_one(monkeypatch, block, groups, step):
    """Values and gradients in float64, against autograd through dense arrays."""
    monkeypatch.setattr(future_attention_mass, "BLOCK", block)
    g = torch.Generator().manual_seed(2)
    q, k, score = (torch.randn(2, n, S, 8, generator=g).double() for n in (4, 2, 2))
    score, log_gamma = score[..., 0].requires_grad_(), torch.tensor([-0.1, -0.3]).double().requires_grad_()
    roles, positions = Retention(2 + WINDOW + 6, 2, WINDOW, step=step), torch.tensor([13, 14, 25, 39])
    lse = (q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT * SCALE).flatten(1, 2)
    lse = lse.masked_fill(~torch.ones(S, S).bool().tril(), -torch.inf).logsumexp(-1)
    mass = attention_from(q, k, lse, positions)
    target = ((mass.amax(2) if groups == "max" else mass.mean(2)) + 1e-8).log()
    age = positions.unsqueeze(1) - torch.arange(S)
    ranked = (age >= WINDOW) & (age <= positions.unsqueeze(1) - 2)
    log_p = target.masked_fill(~ranked, -torch.inf).log_softmax(-1)
    log_q = (
        (score.unsqueeze(2) + (age // step) * log_gamma[:, None, None]).masked_fill(~ranked, -torch.inf).log_softmax(-1)
    )
    expected = torch.where(ranked, log_p.exp() * (log_p - log_q), 0.0).sum(-1).mean()
    loss = listwise_loss(score, log_gamma, q, k, lse, positions.tolist(), roles, scale=SCALE, groups=groups)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(3 * value, (score, log_gamma)) for value in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_listwise_loss_takes_memory_for_its_tokens_alone(monkeypatch):
    """Twice as many tokens and positions take at most twice the bytes, less than one array of positions and tokens."""
    monkeypatch.setattr(future_attention_mass, "BLOCK", 64)

    def peak(length):
        q, k, score = (torch.randn(1, n, length, 4) for n in (4, 2, 2))
        lse, score = torch.randn(1, 4, length).abs() + 9, score[..., 0].requires_grad_()
        positions, roles = list(range(16, length, 8)), Retention(2 + WINDOW + 6, 2, WINDOW)
        with AllocatedBytes() as allocated:
            listwise_loss(score, torch.zeros(2), q, k, lse, positions, roles, scale=SCALE).backward()
        return allocated.peak, 4 * score.numel() * len(positions)

    (short, _), (long, dense) = peak(1024), peak(2048)
    assert 1.5 * short < long < 2.2 * short and 5 * long < dense


def test_listwise_loss_teaches_scores_and_decays_what_is_kept_with_hindsight(layer):
    """Scores and decays fitted to it lose less of the coming attention than recency does."""
    q, k, lse = layer
    roles, queries = Retention(2 + WINDOW + 6, 2, WINDOW), list(range(13, S))
    coming = attention_from(q, k, lse, queries).amax(2)
    score, log_gamma = torch.zeros(1, 2, S, requires_grad=True), torch.full((2,), -0.2, requires_grad=True)
    before = listwise_loss(score, log_gamma, q, k, lse, queries, roles, scale=SCALE)
    before.backward()
    assert log_gamma.grad.abs().min() > 0 and not score.grad[..., :2].any() and not score.grad[..., -WINDOW + 1 :].any()
    optimiser = torch.optim.Adam([score, log_gamma], lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss = listwise_loss(score, log_gamma, q, k, lse, queries, roles, scale=SCALE)
        loss.backward()
        optimiser.step()

    def lost(score, log_gamma):
        rank, cutoff = running_cutoffs(score, log_gamma, roles)
        out = 0.0
        for i, query in enumerate(queries):
            retained = kept_at(rank, cutoff, query, roles)
            out += float((coming[:, :, i, 2 : query - WINDOW + 1] * ~retained).sum())
        return out

    assert lost(score, log_gamma) < 0.6 * lost(torch.zeros(1, 2, S), torch.full((2,), -0.2))


def test_teachers_kl_by_definition():
    g = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(3, 50, generator=g), torch.randn(3, 50, generator=g) * 3
    best = teacher.topk(7)
    terms = []
    for row in range(3):
        p = (best.values[row] - best.values[row].max()).exp()
        p /= p.sum()
        q = student[row].softmax(-1)[best.indices[row]]
        terms.append(float((p * (p / q).log()).sum()))
    assert float(top_kl(student, best.values, best.indices)) == pytest.approx(sum(terms) / 3, rel=1e-5)
    assert float(top_kl(teacher, teacher, torch.arange(50).expand(3, 50))) == pytest.approx(0, abs=1e-6)


def test_focus_counts_positions_whose_teacher_is_sure_and_whose_student_is_not():
    """Position by position ``1 + f p (1 - q)`` times the divergence; the weight has no gradient."""
    teacher = torch.tensor([[9.0, 0, 0, 0], [9.0, 0, 0, 0], [0.1, 0, 0, 0]])
    student = torch.tensor([[0.0, 3, 0, 0], [9.0, 1, 0, 0], [0.0, 3, 0, 0]], requires_grad=True)
    best, p, q = teacher.topk(3), teacher.topk(3).values.softmax(-1)[:, 0], student.detach().softmax(-1)[:, 0]
    kl = torch.stack([top_kl(student[i], best.values[i], best.indices[i]) for i in range(3)])
    weight = 1 + 2.5 * p * (1 - q)
    assert weight[0] > 3 > 1.01 > weight[1] and weight[2] < weight[0] - 1
    focused = top_kl(student, best.values, best.indices, 2.5)
    torch.testing.assert_close(focused, (weight * kl).mean())
    (grad,), (expected,) = (torch.autograd.grad(x, student, retain_graph=True) for x in (focused, (weight * kl).mean()))
    torch.testing.assert_close(grad, expected)


RATES = [
    (1, 0, [8e-5]),
    (3, 0, [1e-3, (1e-3 + 8e-5) / 2, 8e-5]),
    (4, 2, [5e-4, 1e-3, 1e-3, 8e-5]),
    (2, 4, [2.5e-4, 5e-4]),
]


@pytest.mark.parametrize("steps, warmup, expected", RATES)
def test_learning_rate_of_every_step(steps, warmup, expected):
    trainer = type("T", (), {"recipe": dataclasses.replace(PAPER, steps=steps, warmup=warmup)})
    peak, end = PAPER.lr_new, PAPER.lr_new_end
    assert [Trainer.rate(trainer, step, peak, end) for step in range(steps)] == pytest.approx(expected)
    assert {Trainer.rate(trainer, step, peak, None) for step in range(steps)} == {peak}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=128)


@pytest.mark.parametrize(
    "retention", [{"boundary": 2.0}, {"boundary": 0.5, "listwise": 3.0}, {"boundary": 0.0, "listwise": 3.0}]
)
def test_weights_of_the_scorers_losses(layer, retention):
    q, k, _ = layer
    roles, recipe = Retention(2 + WINDOW + 6, 2, WINDOW), dataclasses.replace(RECIPE, samples=64, lists=5)
    score, decays = torch.randn(1, 2, S, generator=torch.Generator().manual_seed(2)), torch.full((2,), -0.1)

    def loss(**weights):
        observer = RetentionLoss(roles, dataclasses.replace(recipe, **weights), seed=3)
        Sparse(lambda *a: (score, decays), roles, observer)(0, q, k, k, SCALE)
        return observer.total().item()

    measures = {"boundary": loss(boundary=1.0), "listwise": loss(boundary=0.0, listwise=1.0)}
    expected = sum(weight * measures[name] for name, weight in retention.items())
    assert loss(**retention) == pytest.approx(expected, rel=1e-5) and min(measures.values()) > 0.1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_targets_are_sums_of_a_power_of_the_attention(layer, power, exact):
    """The listwise loss of a layer, by attention weights of the sparse mask or, if exact, of dense attention."""
    q, k, _ = layer
    roles, options = Retention(2 + WINDOW + 6, 2, WINDOW), {"boundary": 0.0, "listwise": 1.0, "lists": 5}
    recipe = dataclasses.replace(RECIPE, **options, groups="mean", target_power=power, exact_targets=exact)
    score, decays = torch.randn(1, 2, S, generator=torch.Generator().manual_seed(2)), torch.full((2,), -0.1)
    passes, observer = [], RetentionLoss(roles, recipe, seed=3)
    Sparse(lambda *a: (score, decays), roles, lambda attention: (passes.append(attention), observer(attention)))(
        0, q, k, k, SCALE
    )
    (attention,) = passes
    lse = dense_attention(q, k, k, SCALE)[1] if exact else attention.lse
    weights = ((q.view(2, 2, S, 8) @ k[0, :, None].mT * SCALE) - lse.view(2, 2, S, 1)).exp() ** power
    drawn = torch.rand(5, generator=torch.Generator().manual_seed(3000))
    begin = roles.first_long + 6
    terms = []
    for part in ((torch.arange(5) + drawn) / 5).tolist():
        position = begin + int(part * (S - begin))
        tokens = range(2, position - WINDOW + 1)
        for h in range(2):
            mass = torch.tensor([float(weights[h, :, position:, t].sum()) / 2 + 1e-8 for t in tokens])
            ranked = torch.tensor([float(score[0, h, t]) - 0.1 * (position - t) for t in tokens])
            p, log_q = mass / mass.sum(), ranked.log_softmax(0)
            terms.append(float((p * (p.log() - log_q)).sum()))
    assert observer.total().item() == pytest.approx(sum(terms) / len(terms), rel=1e-4)


@pytest.mark.parametrize("positions", [7, LENGTH - 1, LENGTH])
def test_the_loss_is_the_weighted_sum_of_its_parts(model, tmp_path, monkeypatch, positions):
    monkeypatch.setattr("kvpop_vllm.distill.student.POSITIONS", positions)
    recipe = dataclasses.replace(RECIPES["base"], kl=0.7, ce=0.3, boundary=2.0)
    teacher = teacher_of(load_model(model, torch.float32))
    trainer = Trainer(model, recipe, tmp_path, Rows(LENGTH), teacher=teacher, quiet=True)
    loss, measures = trainer.student(tokens := Rows(LENGTH)[0].unsqueeze(0), 0, teacher(tokens, 0))
    assert loss.item() == pytest.approx(
        float(0.7 * measures["kl"] + 0.3 * measures["ce"] + measures["retention"]), rel=1e-5
    )
    tokens = Rows(LENGTH)[0].unsqueeze(0)
    roles = trainer.student.roles(0)
    attend = Sparse(lambda i, k, v, w: trainer.student.scorers[i](k, v, window=roles.window), roles)
    with torch.no_grad():
        logits = trainer.student.base(tokens, attend=attend).logits
        dense = trainer.student.base(tokens, attend=Dense()).logits
    ce = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert measures["ce"] == pytest.approx(ce.item(), rel=1e-4)
    best = dense.topk(32)
    assert measures["kl"] == pytest.approx(top_kl(logits, best.values, best.indices).item(), rel=1e-3)


def test_streaming_plus_attends_to_sinks_and_the_newest(model, tmp_path):
    recipe = dataclasses.replace(RECIPES["base"], phase="streaming-plus", window=[8], topk=[20])
    trainer = Trainer(model, recipe, tmp_path, Rows(LENGTH), quiet=True)
    tokens, base = Rows(LENGTH)[0].unsqueeze(0), trainer.student.base
    q, t = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = (t <= q) & ((t < recipe.sinks) | (t > q - 8 - 20))

    def naive(layer, q, k, v, scale):
        return masked_attention(q, k, v, mask.expand(*k.shape[:2], -1, -1), scale)[0]

    logits, ids = base(tokens, attend=Dense()).logits.topk(32)
    _, measures = trainer.student(tokens, 0, (logits, ids))
    expected = top_kl(base(tokens, attend=naive).logits, logits, ids)
    assert measures["kl"] == pytest.approx(expected.item(), rel=1e-4) and measures["kl"] > 0.01


@pytest.mark.parametrize("exact", [False, True])
def test_targets_from_the_sparse_pass_or_from_dense_attention(layer, monkeypatch, exact):
    q, k, dense_lse = layer
    lses = []
    monkeypatch.setattr(
        "kvpop_vllm.distill.losses.retention_target", lambda q, k, lse, **o: lses.append(lse) or lse[:, :2]
    )
    roles = Retention(2 + WINDOW + 6, 2, WINDOW)
    loss = RetentionLoss(roles, dataclasses.replace(RECIPE, exact_targets=exact, samples=4), seed=0)
    score, zeros = torch.randn(1, 2, S, requires_grad=True), torch.zeros(2)
    Sparse(lambda *a: (score, zeros), roles, loss)(0, q, k, k, SCALE)
    assert torch.allclose(lses[0], dense_lse, atol=1e-5) == exact


@pytest.mark.parametrize("step", [1, 3])
def test_nothing_is_made_on_another_device(step):
    """The ops run on torch's meta device, where an operand from the CPU is an error, so no GPU is needed."""
    meta = {"device": "meta"}
    q, k = torch.empty(1, 4, S, 8, **meta), torch.empty(1, 2, S, 8, **meta)
    score, log_gamma = torch.empty(2, S, **meta), torch.empty(2, dtype=torch.float64, **meta)
    order = torch.empty(1, 2, S, dtype=torch.int32, **meta)
    _, lse = ops.sparse_attention(q, k, k, order, order, sinks=1, window=4, scale=1.0, impl="reference")
    ops.future_attention_mass(q, k, lse, window=4, scale=1.0, impl="reference")
    gates = [torch.empty(1, 2, S, **meta) for _ in range(2)]
    ops.delayed_mlstm(q[:, :2], k, k, *gates, delay=4, impl="reference")
    position = torch.empty(2, S, dtype=torch.int64, **meta)
    ops.online_topk(score, position, 0, topk=4, window=4, log_gamma=log_gamma, decay_step=step, impl="reference")
