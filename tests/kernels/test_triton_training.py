"""Triton's training kernels under its interpreter, in the process that test_triton_interpreted starts."""

from __future__ import annotations

import os
import types

import pytest
import torch
from kernels.naive import future_mass, kept_sets, masked_attention, visible_keys

from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPS = ["delayed_mlstm", "future_attention_mass", "running_topk", "sparse_attention"]


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def poisoned():
    """Fill tensors of torch.empty with NaN, or with the largest value of an integer type."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
class Interpreted:
    __test__ = INTERPRETED


def test_poison_poisons(poisoned):
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()


class TestRunningTopk(Interpreted):
    @pytest.mark.parametrize(
        "length, sinks, window, topk",
        [
            (77, 3, 9, 11),
            (64, 0, 1, 1),  # a power of two, k = 1
            (65, 0, 1, 7),
            (20, 2, 50, 5),  # shorter than the window
            (40, 2, 8, 100),  # fewer eligible than k
            (41, 2, 8, 31),  # the last query is the first with more than k
            (60, 2, 8, 0),
            (1, 0, 1, 1),
        ],
    )
    @pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
    def test_equals_the_definition(self, length, sinks, window, topk, coarse):
        priority = draw(0, 2, 2, length)
        priority = priority.round() if coarse else priority
        rank, cutoff = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl="triton")
        assert rank.dtype == cutoff.dtype == torch.int32
        assert (visible_keys(rank, cutoff, sinks, window) == kept_sets(priority, sinks, window, topk)).all()
        expected = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl="reference")
        assert torch.equal(rank, expected[0]) and torch.equal(cutoff, expected[1])

    def test_several_blocks_and_differences_below_float32(self):
        fine = torch.arange(2100, dtype=torch.float64) % 977 * 1e-9 + 1e3  # longer than two blocks, with ties
        priority = torch.stack([fine, draw(1, 2100).double()])[None]
        priority[0, 1, ::7] = -torch.inf
        options = dict(sinks=4, window=40, topk=300)
        actual = ops.running_topk(priority, **options, impl="triton")
        expected = ops.running_topk(priority, **options, impl="reference")
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


ATTENTION = {
    "plain": dict(length=77, sinks=3, window=9, topk=11, size=16, group=2, batch=2),
    "blocks": dict(length=140, sinks=4, window=24, topk=30, size=16, group=2),
    "shorter-than-the-window": dict(length=20, sinks=2, window=50, topk=5, size=32),
    "fewer-eligible-than-k": dict(length=40, sinks=2, window=8, topk=100, size=16),
    "no-sinks": dict(length=65, sinks=0, window=1, topk=9, size=16, group=3),
    "64": dict(length=50, sinks=2, window=8, topk=9, size=64),
    "80": dict(length=50, sinks=2, window=8, topk=9, size=80, group=2),
    "96": dict(length=50, sinks=2, window=8, topk=9, size=96),
    "128": dict(length=50, sinks=2, window=8, topk=9, size=128),
}


def attention_inputs(length, size, group=1, batch=1, dtype=torch.float32, **_):
    q = draw(1, batch, 2 * group, length, size, dtype=dtype)
    k, v = (draw(i, batch, 2, length, size, dtype=dtype) for i in (2, 3))
    return q, k, v


class TestSparseAttention(Interpreted):
    def check(self, inputs, priority, *, sinks, window, topk, **_):
        q, k, v = inputs
        scale, visible = q.shape[-1] ** -0.5, kept_sets(priority, sinks, window, topk)
        rank, cutoff = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl="reference")
        grad = draw(4, *q.shape, dtype=q.dtype)

        def complete(run, dtype):
            leaves = [x.to(dtype).requires_grad_() for x in (x.detach().clone() for x in inputs)]
            out, lse = run(*leaves)
            return out, lse, *torch.autograd.grad(out, leaves, grad.to(dtype))

        actual = complete(
            lambda *x: ops.sparse_attention(
                *x, rank, cutoff, sinks=sinks, window=window, scale=scale, impl="triton"
            ), q.dtype,
        )  # fmt: skip
        assert actual[0].dtype == q.dtype and actual[1].dtype == torch.float32 and not actual[1].requires_grad
        exact = complete(lambda *x: masked_attention(*x, visible, scale), torch.float64)
        eager = eager_runs(lambda: complete(lambda *x: masked_attention(*x, visible, scale), q.dtype))
        for name, a, e, low in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, eager, strict=True):
            assert_within_budget(a, e.detach(), low, name=name)

    @pytest.mark.parametrize("shape", ATTENTION)
    def test_equals_the_definition(self, shape):
        options = ATTENTION[shape]
        priority = draw(0, options.get("batch", 1), 2, options["length"])
        self.check(attention_inputs(**options), priority, **options)

    @pytest.mark.parametrize("shape", ["plain", "80"])
    def test_float16(self, shape):
        options = ATTENTION[shape]
        inputs = attention_inputs(**options, dtype=torch.float16)
        self.check(inputs, draw(0, options.get("batch", 1), 2, options["length"]), **options)

    def test_ties(self):
        options = ATTENTION["plain"] | {"batch": 1}
        self.check(attention_inputs(**options), draw(0, 1, 2, 77).round(), **options)

    def test_positions_before_heads_in_memory(self):
        options = ATTENTION["plain"] | {"length": 40}
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in attention_inputs(**options)]
        self.check(inputs, draw(0, 2, 2, 40), **options)

    @pytest.mark.parametrize("length, topk", [(70, 0), (1, 1)])
    def test_queries_that_see_themselves_alone(self, length, topk):
        """With k = 0, w = 1, s = 0, dq and dk are zero up to the rounding of two equal sums of D products."""
        inputs = attention_inputs(length, 16, group=2)
        q, k, v = (x.requires_grad_() for x in inputs)
        rank, cutoff = ops.running_topk(draw(0, 1, 2, length), sinks=0, window=1, topk=topk, impl="triton")
        out, lse = ops.sparse_attention(q, k, v, rank, cutoff, sinks=0, window=1, scale=0.25, impl="triton")
        grad = draw(4, *q.shape)
        dq, dk, dv = torch.autograd.grad(out, inputs, grad)
        keys, values = (x.detach().repeat_interleave(2, 1) for x in (k, v))
        q = q.detach()
        logits = (0.25 * q.double() * keys.double()).sum(-1)
        assert_within_budget(lse, logits, eager_runs(lambda: (0.25 * q * keys).sum(-1)), name="lse")
        assert_within_budget(out, values.double(), values, name="out")
        exact = grad.double().unflatten(1, (2, 2)).sum(2)
        assert_within_budget(dv, exact, exact.float(), name="dv")
        rounding = 2 * 16 * torch.finfo(torch.float32).eps * (grad * values).abs().sum(-1).max()
        assert dq.abs().max() <= rounding * 0.25 * k.abs().max()
        assert dk.abs().max() <= 2 * rounding * 0.25 * q.abs().max()

    def test_blocks_that_nobody_sees_are_not_visited(self):
        """With the oldest tokens best, the first k stay and later ones are seen in the window only."""
        from kvpop_vllm.kernels.triton.sparse_attention import _visits

        length, options = 256, dict(sinks=4, window=24, topk=30)
        priority = -torch.arange(float(length)).expand(1, 2, -1)
        self.check(attention_inputs(length, 16), priority, **options)
        rank, cutoff = ops.running_topk(priority, **options, impl="reference")
        seen = visible_keys(rank, cutoff, 4, 24).unflatten(3, (-1, 16)).unflatten(2, (-1, 32)).any(3).any(-1)[0]
        for of_queries, blocks in ((True, seen), (False, seen.transpose(1, 2))):
            counts, lists = _visits(rank, cutoff, 4, 24, 32, 16, of_queries=of_queries)
            for head, row in torch.cartesian_prod(*map(torch.arange, blocks.shape[:2])).tolist():
                listed = lists[head, row, : counts[head, row]].tolist()
                assert listed == sorted(set(listed)) and set(blocks[head, row].nonzero()[:, 0].tolist()) <= set(listed)
            assert counts.sum() <= 1.2 * blocks.sum() and blocks.sum() < 0.7 * 2 * 72  # 72 pairs are causal

    def test_what_it_does_not_take_is_refused(self):
        q, k, v = attention_inputs(8, 16, dtype=torch.float64)
        order = torch.zeros(1, 2, 8, dtype=torch.int32)
        options = dict(sinks=1, window=2, scale=1.0, impl="triton")
        with pytest.raises(ValueError, match="float64: use impl='reference'"):
            ops.sparse_attention(q, k, v, order, order, **options)
        with pytest.raises(ValueError, match="up to 128, got 256"):
            ops.sparse_attention(*attention_inputs(8, 256), order, order, **options)


class TestFutureAttentionMass(Interpreted):
    @pytest.mark.parametrize("lookahead", [None, 0, 13, 500])
    @pytest.mark.parametrize(
        "length, window, size, group, dtype",
        [
            (90, 9, 16, 2, torch.float32),
            (90, 9, 16, 2, torch.float16),
            (20, 50, 16, 1, torch.float32),
            (64, 64, 16, 1, torch.float32),
            (70, 1, 80, 3, torch.float32),
        ],
    )
    def test_equals_the_definition(self, length, window, size, group, dtype, lookahead):
        q, k, _ = attention_inputs(length, size, group, dtype=dtype)
        lse = 3 + draw(5, *q.shape[:3])
        options = dict(window=window, scale=size**-0.5, lookahead=lookahead)
        actual = ops.future_attention_mass(q, k, lse, **options, impl="triton")
        exact = future_mass(q.double(), k.double(), lse.double(), *options.values())
        eager = eager_runs(lambda: future_mass(q, k, lse.to(dtype), *options.values()))
        assert actual.dtype == torch.float32
        assert (actual[:, :, max(0, length - window) :] == -torch.inf).all()
        assert_within_budget(actual, exact, eager)

    def test_float64_is_refused(self):
        q, k, _ = attention_inputs(8, 16, dtype=torch.float64)
        with pytest.raises(ValueError, match="float64: use impl='reference'"):
            ops.future_attention_mass(q, k, q[..., 0], window=2, scale=1.0, impl="triton")


def mlstm_inputs(length, features, width, seed=0, gates=2.0):
    q, k = (draw(seed + i, 1, 2, length, features).abs() for i in (1, 2))
    igate, fgate = (gates * draw(seed + i, 1, 2, length) + c for i, c in ((3, 0), (4, 2)))
    return q, k, draw(seed + 5, 1, 2, length, width), igate, fgate


def recurrence(q, k, v, igate, fgate, delay, start=None):
    """Return readouts of u at u + delay, zero beyond the end, and the last C and z, unstabilised."""
    c, z, m = (0.0, 0.0, None) if start is None else (x.to(q) for x in start)
    if m is not None:
        c, z = c * m.exp()[..., None, None], z * m.exp()[..., None]
    h = [torch.zeros_like(v[:, :, 0])] * k.shape[2]
    for t in range(k.shape[2]):
        f, i = torch.sigmoid(fgate[..., t, None]), torch.exp(igate[..., t, None])
        c = f[..., None] * c + (i * k[..., t, :])[..., None] * v[..., t, None, :]
        z = f * z + i * k[..., t, :]
        if t >= delay:
            u = q[..., t - delay, :]
            h[t - delay] = torch.einsum("bhf,bhfv->bhv", u, c) / ((u * z).sum(-1, keepdim=True) + 1e-6)
    nothing = 0 * (q.sum() + k.sum() + v.sum() + igate.sum() + fgate.sum())  # a graph even if nothing is read
    return torch.stack(h, 2) + nothing, c, z


class TestDelayedMLSTM(Interpreted):
    """The mLSTM against its recurrence in float64, within the error of the same chunks in eager float32."""

    NAMES = ("h", "C", "z", "dq", "dk", "dv", "di", "df")

    def complete(self, run, inputs, grad):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        h, c, z = run(*leaves)
        return [x.detach() for x in (h, c, z, *torch.autograd.grad(h, leaves, grad.to(h.dtype)))]

    def check(self, inputs, *, delay, chunk=64, start=None):
        def chunks(impl):
            def run(*x):
                h, (c, z, m) = ops.delayed_mlstm(*x, delay=delay, chunk=chunk, state=start, impl=impl)
                assert h.dtype == torch.float32 and not (impl == "triton" and (c + z.sum() + m.sum()).requires_grad)
                return h, c * m.exp()[..., None, None], z * m.exp()[..., None]

            return run

        grad = draw(9, *inputs[2].shape)
        actual = self.complete(chunks("triton"), inputs, grad)
        eager = eager_runs(lambda: self.complete(chunks("reference"), inputs, grad))
        exact = self.complete(lambda *x: recurrence(*x, delay, start), [x.double() for x in inputs], grad)
        for name, a, e, low in zip(self.NAMES, actual, exact, eager, strict=True):
            assert a.dtype == low[0].dtype
            assert_within_budget(a, e, low, name=name)

    @pytest.mark.parametrize(
        "length, delay, features, width, chunk",
        [
            (77, 9, 16, 16, 16),
            (130, 64, 20, 33, 64),
            (20, 0, 70, 100, 16),  # two tiles per axis
            (128, 1, 16, 16, 32),  # the chunks fill the sequence
            (90, 17, 16, 16, 256),  # processed in pieces
            (40, 39, 16, 16, 16),  # one token is read
            (40, 40, 16, 16, 16),  # none is
            (40, 100, 16, 16, 16),
            (2, 0, 5, 3, 16),
        ],
    )
    def test_equals_the_recurrence(self, length, delay, features, width, chunk):
        self.check(mlstm_inputs(length, features, width), delay=delay, chunk=chunk)

    def test_one_token(self):
        """The gates cancel except for epsilon, so their gradients are zero up to rounding of products."""
        inputs = [t.requires_grad_() for t in mlstm_inputs(1, 5, 3)]
        h, _ = ops.delayed_mlstm(*inputs, delay=0, impl="triton")
        grad = draw(9, *h.shape)
        *_, di, df = torch.autograd.grad(h, inputs, grad)
        high = [t.detach().double().requires_grad_() for t in inputs]
        exact, _, _ = recurrence(*high, 0)
        *_, di_exact, df_exact = torch.autograd.grad(exact, high, grad.double())
        assert_within_budget(h, exact.detach(), exact.detach().float())
        rounding = 8 * torch.finfo(torch.float32).eps * (grad * inputs[2]).abs().sum(-1).max()
        assert (di - di_exact).abs().max() <= rounding and (df - df_exact).abs().max() <= rounding

    def test_continues_from_a_state(self):
        whole = mlstm_inputs(90, 16, 20)
        _, state = ops.delayed_mlstm(*(t[:, :, :37] for t in whole), delay=0, chunk=16, impl="triton")
        self.check([t[:, :, 37:] for t in whole], delay=0, chunk=32, start=state)

    def test_float16_inputs_are_computed_in_float32(self):
        self.check([t.half() for t in mlstm_inputs(50, 16, 16)], delay=5)

    def test_stabiliser_beyond_the_clamp_of_epsilon(self):
        """For m > 60 epsilon's share is below 1e-32; for m < -60 the readout is below 1e-20 |v|.

        What is left out for m < -60 is as small.
        """
        q, k, v, igate, fgate = mlstm_inputs(60, 16, 16)
        self.check((q, k, v, igate + 75, fgate), delay=4, chunk=16)
        low = [t.requires_grad_() for t in (q, k, v, igate - 90, fgate)]
        h, state = ops.delayed_mlstm(*low, delay=4, chunk=16, impl="triton")
        assert h.abs().max() < 1e-18
        assert all(g.isfinite().all() and g.abs().max() < 1e-16 for g in torch.autograd.grad(h.sum(), low))

    def test_large_gates_stay_finite(self):
        inputs = [t.requires_grad_() for t in mlstm_inputs(50, 16, 16, gates=80.0)]
        h, state = ops.delayed_mlstm(*inputs, delay=3, chunk=16, impl="triton")
        assert all(t.isfinite().all() for t in (h, *state, *torch.autograd.grad(h.sum(), inputs)))

    def test_features_that_underflow(self):
        q, k, v, igate, fgate = mlstm_inputs(40, 16, 16)
        q[:, :, 10:20] = 0
        k[:, :, :30] = 0
        self.check((q, k, v, igate, fgate), delay=2, chunk=16)

    def test_what_it_does_not_take_is_refused(self):
        inputs = mlstm_inputs(20, 16, 16)
        _, state = ops.delayed_mlstm(*inputs, delay=0, impl="triton")
        for chunk in (8, 24):
            with pytest.raises(ValueError, match=f"power of two of at least 16 as chunk, got {chunk}"):
                ops.delayed_mlstm(*inputs, delay=0, chunk=chunk, impl="triton")
        with pytest.raises(ValueError, match="delay=0"):
            ops.delayed_mlstm(*inputs, delay=1, state=state, impl="triton")
        with pytest.raises(ValueError, match="no gradient for the state"):
            ops.delayed_mlstm(*inputs, delay=0, state=[t.requires_grad_() for t in state], impl="triton")
        with pytest.raises(ValueError, match="float64: use impl='reference'"):
            ops.delayed_mlstm(*(t.double() for t in inputs), delay=0, impl="triton")


@pytest.mark.parametrize("op", OPS)
def test_choice_of_implementation(op):
    def on(device, dtype, size=64):
        return types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 8, size))

    assert dispatch.select(op, on("cuda", torch.bfloat16)) == "triton"
    assert dispatch.select(op, on("cpu", torch.bfloat16)) == "reference"
    assert dispatch.select(op, on("cuda", torch.float64)) == ("triton" if op == "running_topk" else "reference")
    narrow = op in ("sparse_attention", "future_attention_mass")
    assert dispatch.select(op, on("cuda", torch.bfloat16, 256)) == ("reference" if narrow else "triton")


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU and running_topk got CPU tensors: use impl='reference'"):
        ops.running_topk(torch.zeros(1, 1, 8), sinks=0, window=1, topk=1, impl="triton")


def test_ops_without_triton_kernels_say_so():
    with pytest.raises(NotImplementedError, match="op 'boundary_loss' has no 'triton' implementation"):
        dispatch.resolve("boundary_loss", "triton", None)
