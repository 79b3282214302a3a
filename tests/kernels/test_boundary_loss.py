"""The boundary loss equals its definition: a sort for every sampled query, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import serving, training
from kvpop_vllm.kernels.reference.boundary_loss import _positions

S, SINKS, WINDOW, TOPK = 120, 3, 10, 20
FIRST = SINKS + WINDOW + TOPK
OPTIONS = dict(sinks=SINKS, window=WINDOW, topk=TOPK, tau=0.7)


def loss_of(pred, target, log_gamma, **changes):
    """Return the loss with default options, at a few random positions."""
    options = dict(step=1, samples=4, margin=None, balance=None) | OPTIONS | changes
    return ops.boundary_loss(pred, target, log_gamma, **options)


def inputs(seed=0, ties=False, dtype=torch.float64, length=S):
    g = torch.Generator().manual_seed(seed)
    pred, target = (torch.randn(2, 2, length, generator=g, dtype=dtype) * 2 for _ in range(2))
    log_gamma = torch.tensor([-1 / 64, -1 / 1024], dtype=torch.float64)  # dyadic: ties are exact
    return pred.requires_grad_(), (target * 2).round() / 2 if ties else target, log_gamma.requires_grad_()


def test_the_first_decision_compares_with_a_token_that_was_there():
    """At q = s + w + k, where k tokens were retained before, the new token is compared with one of these.

    It is compared with the lowest retained token, or with the evicted one if it is the lowest itself.
    """
    sinks, window, topk = 1, 3, 2
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        pred = torch.zeros(1, 1, 30, requires_grad=True)
        target, q = torch.randn(1, 1, 30, generator=g), torch.tensor([[[sinks + window + topk]]])
        loss = loss_of(pred, target, torch.zeros(1), sinks=sinks, window=window, topk=topk, tau=1.0, samples=q)
        (grad,) = torch.autograd.grad(loss, pred)
        touched = grad[0, 0].nonzero().flatten().tolist()
        scores = {t: float(target[0, 0, t]) for t in (1, 2, 3)}
        worst = min(scores, key=scores.get)
        last_kept = min(set(scores) - {worst}, key=scores.get)
        bound = last_kept if worst == 3 else worst if last_kept == 3 else last_kept
        assert touched == sorted({3, bound}), seed


def held_by_teacher(target, log_gamma, q, step, sinks, window, topk):
    """Return the positions retained at q, worst first, and the one evicted at q; simulated per query."""
    retained, left = [], None

    def effective(t, query):
        return target[t] + (query - t) // step * log_gamma

    for query in range(sinks + window, q + 1):
        retained.append(query - window)
        retained.sort(key=lambda t: (effective(t, query), t))
        left = retained.pop(0) if len(retained) > topk else None
    return retained, left


def naive(pred, target, log_gamma, positions, step, margin, balance, roles=(SINKS, WINDOW, TOPK)):
    window, terms, topk = roles[1], [], [roles[2]] * 2 if isinstance(roles[2], int) else roles[2]
    for b in range(2):
        for h in range(2):
            rows = []
            for q in positions:
                new, gamma = q - window, float(log_gamma[h].detach())
                own_roles = (*roles[:2], topk[h])
                retained, left = held_by_teacher(
                    [float(x) for x in target[b, h].detach().float()], gamma, q, step, *own_roles
                )
                stays, bound = new in retained, retained[0] if retained[0] != new else left

                def gap(score, gamma, new=new, bound=bound, q=q):
                    return score[new] - score[bound] + ((q - new) // step - (q - bound) // step) * gamma

                y = 1.0 if stays else -1.0
                loss = torch.nn.functional.softplus(-y * gap(pred[b, h], log_gamma[h]) / OPTIONS["tau"])
                rows.append((y, y * float(gap(target[b, h].detach(), gamma)), loss))
            terms.append((h, rows))
    weights = []
    for h, rows in terms:
        rho = [y > 0 for g, triples in terms if g == h for y, _, _ in triples]
        keep = sum(rho) / len(rho)
        for y, _, _ in rows:
            share = keep if y > 0 else 1 - keep
            weights.append(1.0 if balance is None else min(max(0.5 / share, balance[0]), balance[1]))
    mean = sum(weights) / len(weights)
    total, i = 0.0, 0
    for _, rows in terms:
        for _, delta, loss in rows:
            w = weights[i] / mean
            assert delta >= 0
            if margin is not None:
                w *= margin[0] + (1 - margin[0]) / (1 + math.exp(-delta / margin[1]))
            total, i = total + w * loss, i + 1
    return total / len(weights)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    length=st.integers(0, 80),
    sinks=st.integers(0, 4),
    window=st.integers(1, 12),
    topk=st.integers(0, 12) | st.lists(st.integers(1, 12), min_size=2, max_size=2),
    step=st.sampled_from([1, 4]),
    ties=st.booleans(),
    margin=st.sampled_from([None, (0.1, 0.5), (0.2, 1.0)]),
    balance=st.sampled_from([None, (0.6, 2.0), (0.2, 5.0)]),
    seed=st.integers(0, 2**30),
)
def test_equals_the_definition(length, sinks, window, topk, step, ties, margin, balance, seed):
    """Sequences that end before the window or the budget is full are included and cost nothing."""
    pred, target, log_gamma = inputs(seed, ties, length=length)
    target.requires_grad_()
    largest = topk if isinstance(topk, int) else max(topk)
    positions = list(range(sinks + window + largest, length)) if topk else []
    samples = torch.tensor(positions) if positions else 5
    options = dict(sinks=sinks, window=window, topk=topk, step=step, samples=samples)
    loss = loss_of(pred, target, log_gamma, margin=margin, balance=balance, **options)
    if positions:
        expected = naive(pred, target, log_gamma, positions, step, margin, balance, (sinks, window, topk))
    else:
        expected = 0 * (pred.sum() + log_gamma.sum())
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(x, (pred, log_gamma), retain_graph=True) for x in (loss, expected))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)
    assert loss.requires_grad and torch.autograd.grad(loss, target, allow_unused=True)[0] is None


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("topk", [[TOPK, 0], [TOPK, S], [0, 5], [3, TOPK], [0, S]])
def test_heads_that_never_evict_do_not_count(topk, step):
    """Positions of a head are drawn where its slots are full; the loss is that of the heads which have some."""
    pred, target, log_gamma = inputs(1)
    options = dict(step=step, samples=6, balance=(0.2, 5.0), margin=(0.1, 1.0))
    first = SINKS + WINDOW + torch.tensor(topk)
    q = _positions(6, pred.shape, first, torch.Generator().manual_seed(4), torch.device("cpu"))
    chosen = [h for h, k in enumerate(topk) if k and SINKS + WINDOW + k < S]
    assert all(int(q[:, h].min()) >= first[h] and int(q[:, h].max()) < S for h in chosen)
    if len(chosen) == 2:
        assert int(q[:, 0].min()) < first[1], "each head has positions of its own"
    loss = loss_of(pred, target, log_gamma, topk=topk, **options, generator=torch.Generator().manual_seed(4))
    options |= {"samples": q[:, chosen], "topk": [topk[h] for h in chosen]}
    nothing = pred.new_zeros(())
    expected = loss_of(pred[:, chosen], target[:, chosen], log_gamma[chosen], **options) if chosen else nothing
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, pred)
    assert sorted(h for h in range(2) if grad[:, h].any()) == chosen


def test_the_reference_runs_references(monkeypatch):
    """The reference orders tokens by a reference op, and "auto" by the fastest op for the order it needs."""
    resolved = []
    find = training.resolve

    def resolve(op, impl, tensor):
        resolved.append((op, impl))
        return find(op, impl, tensor)

    for module in (training, serving):
        monkeypatch.setattr(module, "resolve", resolve)
    for step, op in ((1, "running_topk"), (5, "online_topk")):
        for impl in ("reference", "auto"):
            resolved.clear()
            loss_of(*inputs(), step=step, impl=impl)
            assert resolved == [("boundary_loss", impl), (op, impl)]


@pytest.mark.parametrize(
    "change, options, message",
    [
        (lambda p, t, g: (p[:, :, :9], t, g), {}, r"pred and target must have one shape, got \[2, 2, 9\] and \[2, 2, 120\]"),
        (lambda p, t, g: (p[0], t[0], g), {}, r"needs pred \[B, H, S\], got \[2, 120\]"),
        (lambda p, t, g: (p, t, g[:1]), {}, r"log_gamma and the heads of pred must have one shape, got \[1\] and \[2\]"),
        *(
            (lambda *all_: all_, option, "boundary_loss needs")
            for option in ({"step": 0}, {"tau": 0.0}, {"tau": math.nan}, {"samples": -1}, {"window": 0}, {"sinks": -1}, {"topk": -1})
        ),
        (lambda *all_: all_, {"samples": torch.tensor([FIRST - 1])}, rf"samples must lie in \[{FIRST}, {S - 1}\]"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        loss_of(*change(*inputs()), **options)


def test_positions_are_drawn_where_the_budget_is_full_and_biased_late():
    q = _positions(4000, (2, 2, S), torch.tensor([FIRST] * 2), torch.Generator().manual_seed(0), torch.device("cpu"))
    assert q.shape == (2, 2, 4000) and int(q.min()) == FIRST and int(q.max()) == S - 1
    middle, uniform, late = (FIRST + S) / 2, q[..., :2000].double(), q[..., 2000:].double()
    assert abs((uniform > middle).double().mean() - 0.5) < 0.03 and abs((late > middle).double().mean() - 0.75) < 0.03
    assert not torch.equal(q[0, 0], q[0, 1])


def test_the_draw_follows_the_generator():
    args, draws = inputs(), (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    a, b, c = (loss_of(*args, samples=16, generator=generator).item() for generator in draws)
    assert a == b != c
