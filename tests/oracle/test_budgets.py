"""Error budgets accept correct rounding in any summation order and reject planted faults."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from kernels.factories import poisoned_pages
from kernels.naive import future_mass, kept_sets, masked_attention, recurrence
from kernels.problems import Problem
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import DisturbedSums, ErrorBudget, assert_within_budget, eager_runs

aten = torch.ops.aten
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
HEADROOM = 0.5
"""Largest share of the allowed error that a correct computation may use."""


class OtherOrder(TorchDispatchMode):
    """Dispatch mode that computes sums in blocks of ``width`` terms in random order, gradients included."""

    WHOLE = get_decompositions([aten._softmax, aten._softmax_backward_data, aten.logsumexp, aten.mean, aten.addmm])

    def __init__(self, seed: int, width: int):
        super().__init__()
        self.generator, self.width = torch.Generator().manual_seed(seed), width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.WHOLE:
            with self:
                return self.WHOLE[func](*args, **(kwargs or {}))
        if func in (aten.mm.default, aten.bmm.default):
            a, b = args
            return self.added(a.shape[-1], lambda block: a[..., block] @ b[..., block, :])
        if func is aten.sum.dim_IntList and not kwargs:
            x, axes, keep = (*args, False)[:3]
            axes = sorted(axis % x.ndim for axis in axes)
            terms = x.movedim(axes, [*range(len(axes))]).flatten(0, len(axes) - 1)
            total = self.added(len(terms), lambda block: terms[block].sum(0))
            return total.reshape([1 if i in axes else n for i, n in enumerate(x.shape)]) if keep else total
        return func(*args, **(kwargs or {}))

    def added(self, terms, part):
        first, *others = torch.randperm(terms, generator=self.generator).split(self.width)
        total = part(first)
        for block in others:
            total = total + part(block)
        return total


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention:
    """Sparse attention and its gradients, by definition and as kernels compute them, with optional faults."""

    NAMES = ("out", "lse", "dq", "dk", "dv")
    roles = dict(sinks=2, window=8, topk=9)

    def __init__(self, seed=0, dtype=F32, length=64, size=64, group=2):
        self.scale, self.dtype = size**-0.5, dtype
        self.q, self.grad = (normal(seed + i, 1, 2 * group, length, size).to(dtype) for i in (1, 4))
        self.k, self.v = (normal(seed + i, 1, 2, length, size).to(dtype) for i in (2, 3))
        self.priority = normal(seed, 1, 2, length)
        self.visible = kept_sets(self.priority, *self.roles.values())

    def definition(self, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = masked_attention(*leaves, self.visible, self.scale)
        return tuple(x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, self.grad.to(dtype))))

    def kernel(self, visible=None, scale=None, compute=F32, missing=None, no_delta=None, lost=None):
        """Return output, log-sum-exp and gradients, recomputing weights from the log-sum-exp as kernels do.

        Args:
            visible: mask that replaces the correct one.
            scale: factor that replaces the correct one.
            compute: dtype of everything between inputs and results.
            missing: slice of queries that contribute no gradient to keys.
            no_delta: slice of queries whose gradients lack their second term.
            lost: key whose weight the log-sum-exp lacks.
        """
        q, grad, k, v = (x.to(compute) for x in (self.q, self.grad, self.k, self.v))
        scale, visible = scale or self.scale, self.visible if visible is None else visible
        group = q.shape[1] // k.shape[1]
        k, v, visible = (x.repeat_interleave(group, 1) for x in (k, v, visible))
        logits = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - lse.unsqueeze(-1))
        out = weights @ v
        if lost is not None:
            lse = logits.index_fill(-1, torch.tensor(lost), -torch.inf).logsumexp(-1)
        delta = (grad * out).sum(-1, keepdim=True)
        if no_delta is not None:
            delta[:, :, no_delta] = 0
        d_logits = weights * (grad @ v.mT - delta) * scale
        dq = d_logits @ k
        if missing is not None:
            d_logits[:, :, missing] = 0
        dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (d_logits.mT @ q, weights.mT @ grad))
        return tuple(x.to(y) for x, y in zip((out, lse, dq, dk, dv), (self.dtype, F32, *[self.dtype] * 3), strict=True))

    def kept(self, query=slice(None), **changes):
        """Return the visibility mask, with changed roles for ``query`` (by default for all queries)."""
        visible = self.visible.clone()
        visible[:, :, query] = kept_sets(self.priority, *(self.roles | changes).values())[:, :, query]
        return visible

    def budgets(self):
        runs = zip(self.definition(F64), eager_runs(lambda: self.definition(self.dtype)), strict=True)
        return [ErrorBudget(*pair) for pair in runs]


class Mass:
    """Attention mass that keys receive from later queries."""

    NAMES = ("mass",)
    options = dict(window=9, scale=0.25, lookahead=13)

    def __init__(self, seed=0, length=80):
        self.q, self.k = normal(seed + 1, 1, 4, length, 16), normal(seed + 2, 1, 2, length, 16)
        self.lse = 3 + normal(seed + 5, 1, 4, length)

    def definition(self, dtype=F32, **changes):
        return (future_mass(*(x.to(dtype) for x in (self.q, self.k, self.lse)), **(self.options | changes)),)

    kernel = definition

    def budgets(self):
        (exact,), (eager,) = self.definition(F64), eager_runs(self.definition)
        return [ErrorBudget(exact, eager)]


class MLSTM:
    """Delayed mLSTM: ``definition`` goes token by token, ``kernel`` chunk by chunk."""

    NAMES = ("h", "C", "z")

    def __init__(self, seed=0, length=70, delay=9):
        q, k = (normal(seed + i, 1, 2, length, 16).abs() for i in (1, 2))
        igate, fgate = (2 * normal(seed + i, 1, 2, length) + shift for i, shift in ((3, 0), (4, 2)))
        self.inputs, self.delay = (q, k, normal(seed + 5, 1, 2, length, 16), igate, fgate), delay

    def definition(self, dtype=F32, round_state=None, delay=None, **changes):
        """Return outputs and the last state.

        Args:
            round_state: dtype that the state is rounded to after each token.
            changes: replacements of ``igate`` and ``fgate``.
        """
        *tokens, igate, fgate = self.inputs
        gates = changes.get("igate", igate), changes.get("fgate", fgate)
        inputs = (x.to(dtype) for x in (*tokens, *gates))
        return recurrence(*inputs, self.delay if delay is None else delay, round_state=round_state)

    def kernel(self):
        h, (c, z, m) = ops.delayed_mlstm(*self.inputs, delay=self.delay, chunk=16, impl="reference")
        return h, c * m.exp()[..., None, None], z * m.exp()[..., None]

    def budgets(self):
        """Return budgets from the chunked form.

        It sums logarithms of decays, which costs more precision than multiplying decays token by token.
        """
        return [ErrorBudget(*pair) for pair in zip(self.definition(F64), eager_runs(self.kernel), strict=True)]


class Decode:
    """Last of several decode steps of one head that evicts nothing, so that the newest score is visible."""

    NAMES = ("out", "lse", "scores")
    steps = 30

    def __init__(self, seed=0):
        self.p = p = Problem("mlstm", requests=1, heads=1, size=64, group=3, window=6, topk=40, seed=seed).prepare()
        self.exact, self.pages = p.exact(0, 0), [poisoned_pages(p.layout, p.num_blocks)]
        for t in range(self.steps):
            self.inputs = q, k, v = p.inputs([0])
            self.wide = self.exact.step(t, q[0], k[0, 0], v[0, 0], p.scale)[:2]
            if t < self.steps - 1:
                self.pages.append(self.copied())
                p.run(self.pages[-1], [0], [t], *self.inputs, "reference")

    def copied(self):
        return self.p.layout.view(self.pages[-1].raw.clone())

    def kernel(self, impl="cpp", planted=lambda *_: None):
        """Run the last step on a copy of the pages.

        Args:
            planted: function of the problem, the pages and those of one step before, which first changes
                the pages.
        """
        pages, last = self.copied(), self.steps - 1
        planted(self.p, pages, self.pages[-2])
        out, lse = self.p.run(pages, [0], [last], *self.inputs, impl)
        held = self.p.long_range(pages, 0, 0, last)
        return out[0], lse[0], torch.tensor([held[t] for t in self.exact.long_range(last)])

    def budgets(self):
        scores = torch.tensor([*self.exact.long_range(self.steps - 1).values()], dtype=F64)
        eager = eager_runs(lambda: self.kernel("reference"))
        return [ErrorBudget(*pair) for pair in zip((*self.wide, scores), eager, strict=True)]


def stale_slot(p, pages, before):
    """Restore the previous content of the newest token's ring slot."""
    at = p.table[0, 0, p.layout.state_blocks].long(), 0, p.sinks + (Decode.steps - 2 - p.sinks) % p.window
    pages.k[at], pages.v[at] = before.k[at], before.v[at]


def stale_state(p, pages, before):
    """Restore the state that lacks the newest token."""
    at = p.table[0, 0, : p.layout.state_blocks].long()
    pages.state[at] = before.state[at]


def coarse_state(p, pages, before):
    """Round the state to bfloat16 once, before the last step."""
    at = p.table[0, 0, : p.layout.state_blocks].long(), 0
    pages.state[at] = pages.state[at].bfloat16().float()


@functools.cache
def judged(computation, seed, **options):
    made = computation(seed=seed, **options)
    return made, made.budgets()


def shares(budgets, results):
    return [budget.share(result) for budget, result in zip(budgets, results, strict=True)]


@pytest.mark.parametrize("computation", [Attention, Mass, MLSTM])
def test_any_order_of_any_sum_is_allowed(computation):
    """Any order leaves at least half of the allowed error unused.

    A processor, its vector width and a library's blocks amount to such orders.
    """
    largest = 0.0
    for seed in range(8):
        made, budgets = judged(computation, 10 * seed)
        for width in (1, 4, 16):
            with OtherOrder(seed, width):
                largest = max(largest, *shares(budgets, made.definition(F32)), *shares(budgets, made.kernel()))
    print(f"{computation.__name__}: at most {largest:.2f} of what is allowed")
    assert largest <= HEADROOM


def test_other_orders_are_other_orders():
    """Other orders change results and gradients slightly, and add the same terms."""
    made = Attention()
    plain = made.definition(F32)
    with OtherOrder(0, 1):
        other, wide = made.definition(F32), made.definition(F64)
    for a, b, exact, reference in zip(other, plain, wide, made.definition(F64), strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        torch.testing.assert_close(exact, reference, rtol=0, atol=1e-13)


def test_budgets_do_not_hang_on_seeds():
    """Budgets from other seeds are between 2/3 and 3/2 of these, so no budget depends on a processor."""
    made, other = Attention(), []
    for seed in range(100, 104):
        with DisturbedSums(seed):
            other.append(made.definition(F32))
    for budget, eager in zip(made.budgets(), zip(*other, strict=True), strict=True):
        assert 2 / 3 < ErrorBudget(budget.reference, eager).allowed / budget.allowed < 3 / 2


def one_less(made, name):
    """Return the visibility mask of ``made`` with the role ``name`` one token smaller."""
    return made.kept(**{name: made.roles[name] - 1})


LAST, ONE = slice(48, 64), 40
ATTENTION_FAULTS = {
    "the window's oldest key is not seen": lambda a: a.kernel(one_less(a, "window")),
    "one key beyond the window is seen": lambda a: a.kernel(a.kept(window=9)),
    "by one query the window's oldest key is not seen": lambda a: a.kernel(a.kept(ONE, window=7)),
    "by one query a key beyond the window is seen": lambda a: a.kernel(a.kept(ONE, window=9)),
    "the last of the k best is not seen": lambda a: a.kernel(one_less(a, "topk")),
    "a sink is not seen": lambda a: a.kernel(one_less(a, "sinks")),
    "no scale": lambda a: a.kernel(scale=1.0),
    "the log-sum-exp lacks a key": lambda a: a.kernel(lost=1),
    "queries of a block give no gradient to keys": lambda a: a.kernel(missing=LAST),
    "one query gives no gradient to keys": lambda a: a.kernel(missing=ONE),
    "gradients of a block's queries lack a term": lambda a: a.kernel(no_delta=LAST),
}
PRECISE_FAULTS = {"everything in bfloat16": lambda a: a.kernel(compute=BF16)}
MASS_FAULTS = {
    "a key is counted a query too early": lambda m: m.kernel(window=8),
    "a key is counted a query too late": lambda m: m.kernel(window=10),
    "a query too few is looked ahead": lambda m: m.kernel(lookahead=12),
    "no end of the look-ahead": lambda m: m.kernel(lookahead=None),
    "everything in bfloat16": lambda m: [x.float() for x in m.definition(BF16)],
}
MLSTM_FAULTS = {
    "decays of the token before": lambda m: m.definition(fgate=m.inputs[4].roll(1, -1)),
    "one token does not decay the state": lambda m: m.definition(fgate=at(m.inputs[4], 60, 1e4)),
    "one token is not taken in": lambda m: m.definition(igate=at(m.inputs[3], 5, -1e4)),
    "read a token too early": lambda m: m.definition(delay=8),
    "the state in bfloat16": lambda m: m.definition(round_state=BF16),
}
DECODE_FAULTS = {
    "a stale slot": lambda d: d.kernel(planted=stale_slot),
    "a stale state": lambda d: d.kernel(planted=stale_state),
    "the state in bfloat16": lambda d: d.kernel(planted=coarse_state),
}


def at(x, token, value):
    return x.index_fill(-1, torch.tensor(token), value)


FAULTS = [
    *((Attention, {"dtype": F32}, *fault) for fault in (ATTENTION_FAULTS | PRECISE_FAULTS).items()),
    *((Attention, {"dtype": BF16}, *fault) for fault in ATTENTION_FAULTS.items()),
    *((Mass, {}, *fault) for fault in MASS_FAULTS.items()),
    *((MLSTM, {}, *fault) for fault in MLSTM_FAULTS.items()),
    *((Decode, {}, *fault) for fault in DECODE_FAULTS.items()),
]


@pytest.mark.parametrize("computation, options, name, planted", FAULTS)
def test_planted_faults_are_refused(computation, options, name, planted):
    """Small faults that a kernel may have exceed the budget; a kernel without them stays within it."""
    for seed in range(3):
        made, budgets = judged(computation, 10 * seed, **options)
        assert max(shares(budgets, made.kernel())) <= 1
        wrong = planted(made)
        print(f"{computation.__name__}, {options}, {name}: {max(shares(budgets, wrong)):.1f} times what is allowed")
        with pytest.raises(AssertionError, match="exceeds|wrongly"):
            for budget, result in zip(budgets, wrong, strict=True):
                budget.check(result)


@pytest.fixture
def coarse():
    """Budget of the output of attention in bfloat16."""
    return judged(Attention, 0, dtype=BF16)[1][0]


def test_the_rounded_reference_passes_and_the_budget_is_derived(coarse):
    coarse.check(coarse.reference.bfloat16())
    coarse.check(coarse.runs[0])
    assert coarse.allowed >= 2 * coarse.eager_error > 0


def test_nothing_is_disturbed_twice_for_nothing():
    """Sums of 16-bit and of float64 numbers get one run; float32 sums get four runs, all different."""
    for dtype, count in ((F64, 1), (BF16, 1), (F32, 4)):
        runs = eager_runs(lambda dtype=dtype: normal(0, 5, 30).to(dtype) @ normal(1, 30, 5).to(dtype))
        assert len(runs) == count == len({tuple(run.flatten().tolist()) for run in runs})


def test_wrong_values_fail_with_place_and_name(coarse):
    wrong = coarse.reference.clone()
    wrong[0, 3, 5, 7] += 2 * coarse.allowed
    with pytest.raises(AssertionError, match=r"out: error .* at \(0, 3, 5, 7\)"):
        coarse.check(wrong, "out")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_poison_fails(bad):
    reference = torch.zeros(3, dtype=torch.float64)
    actual = torch.tensor([0.0, bad, 0.0])
    with pytest.raises(AssertionError, match="wrongly NaN or infinite"):
        assert_within_budget(actual, reference, torch.zeros(3))


def test_expected_infinities_pass_and_must_be_there():
    reference = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert_within_budget(reference.float(), reference, reference.float())
    with pytest.raises(AssertionError, match="wrongly finite"):
        assert_within_budget(torch.tensor([-9.0, 1.0]), reference, reference.float())


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(2))
