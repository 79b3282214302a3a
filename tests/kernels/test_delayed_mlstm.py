"""The chunkwise mLSTM and its gradients against its recurrence in float64, by the reference or by Triton."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.naive import recurrence
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

NAMES = ("h", "C", "z", "dq", "dk", "dv", "di", "df")
IMPL, DTYPE = ("triton", torch.float32) if INTERPRETED else ("reference", torch.float64)


def inputs(length, *, batch=1, heads=2, features=16, width=16, seed=0, dtype=DTYPE):
    g, lead = torch.Generator().manual_seed(seed), (batch, heads, length)
    q, k = (torch.rand(*lead, features, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(*lead, width, generator=g, dtype=dtype)
    igate, fgate = (2 * torch.randn(*lead, generator=g, dtype=dtype) + c for c in (0, 2))
    return q, k, v, igate, fgate


def gradient(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def complete(run, inputs):
    """Return outputs, the last state and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    h, c, z = run(*leaves)
    return [x.detach() for x in (h, c, z, *torch.autograd.grad(h, leaves, gradient(h.shape).to(h.dtype)))]


def check(inputs, *, delay, chunk=64, start=None):
    """Compare with the recurrence: in float64 up to rounding, else within the error of eager chunks."""

    def chunks(impl):
        def run(*x):
            h, (c, z, m) = ops.delayed_mlstm(*x, delay=delay, chunk=chunk, state=start, impl=impl)
            assert not (impl == "triton" and (c + z.sum() + m.sum()).requires_grad)
            return h, c * m.exp()[..., None, None], z * m.exp()[..., None]

        return run

    actual = complete(chunks(IMPL), inputs)
    exact = complete(lambda *x: recurrence(*x, delay, start), [x.double() for x in inputs])
    if inputs[0].dtype == torch.float64:
        for name, a, e in zip(NAMES, actual, exact, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12 if name in ("C", "z") else 1e-9)
        return
    eager = eager_runs(lambda: complete(chunks("reference"), inputs))
    for name, a, e, low in zip(NAMES, actual, exact, eager, strict=True):
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
def test_equals_the_recurrence(length, delay, features, width, chunk):
    check(inputs(length, features=features, width=width), delay=delay, chunk=chunk)


@settings(max_examples=2 if INTERPRETED else 60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    length=st.integers(2 if INTERPRETED else 1, 90),
    features=st.integers(1, 9),
    width=st.integers(1, 7),
    delay=st.integers(0, 100),
    chunk=st.sampled_from([16, 32, 64]) if INTERPRETED else st.integers(1, 70),
    seed=st.integers(0, 2**30),
)
def test_any_shape(delay, chunk, **shape):
    """In float32 the reference's error is within that of the recurrence."""
    args = inputs(**shape)
    check(args, delay=delay, chunk=chunk)
    single = [x.float() for x in args]
    exact = recurrence(*(x.double() for x in single), delay)[0]
    h, _ = ops.delayed_mlstm(*single, delay=delay, chunk=chunk, impl="reference")
    assert_within_budget(h, exact, eager_runs(lambda: recurrence(*single, delay)[0]))


def test_continues_from_a_state():
    sequence = inputs(90, width=20)
    _, state = ops.delayed_mlstm(*(t[:, :, :37] for t in sequence), delay=0, chunk=16, impl=IMPL)
    check([t[:, :, 37:] for t in sequence], delay=0, chunk=32, start=state)


def test_large_gates_stay_finite():
    *projections, igate, fgate = inputs(50, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (*projections, 40 * igate, 40 * fgate)]
    h, state = ops.delayed_mlstm(*leaves, delay=3, chunk=16, impl=IMPL)
    assert all(t.isfinite().all() for t in (h, *state, *torch.autograd.grad(h.sum(), leaves)))


def test_features_that_underflow():
    q, k, v, igate, fgate = inputs(40)
    q[:, :, 10:20] = 0
    k[:, :, :30] = 0
    check((q, k, v, igate, fgate), delay=2, chunk=16)


def state_of(c=(2, 3, 6, 5), z=(2, 3, 6), m=(2, 3)):
    return {"state": tuple(map(torch.zeros, (c, z, m)))}


@pytest.mark.parametrize(
    "change, options, message",
    [
        (lambda q, k, v, i, f: (q[..., :2], k, v, i, f), {}, "q and k must have one shape"),
        (lambda q, k, v, i, f: (q, k, v[:, :, :4], i, f), {}, "v and k, but for the last axis, must have one shape"),
        (lambda q, k, v, i, f: (q, k, v, i[:, :1], f), {}, "igate and k, but for the last axis, must have one shape"),
        (lambda q, k, v, i, f: (q, k, v, i, f[:, :1]), {}, "fgate and igate must have one shape"),
        (lambda *all_: [x[0] for x in all_], {}, r"needs k \[B, H, S, F\], got \[3, 10, 6\]"),
        (lambda *all_: [x[:, :, :0] for x in all_], {}, "chunk >= 1 and tokens, got 0, 64 and 0 tokens"),
        (lambda *all_: all_, state_of(c=(1, 1, 6, 5)), r"C and what k and v ask for must .*, got \[1, 1, 6, 5\]"),
        (lambda *all_: all_, state_of(c=(2, 3, 6, 1)), "the state's C "),
        (lambda *all_: all_, state_of(z=(2, 3, 1)), "the state's z "),
        (lambda *all_: all_, state_of(m=(2, 1)), "the state's m "),
        (lambda *all_: all_, state_of() | {"delay": 2}, "delay=0"),
        (lambda *all_: all_, {"delay": -1}, "needs delay >= 0, chunk >= 1"),
        (lambda *all_: all_, {"chunk": 0}, "needs delay >= 0, chunk >= 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        ops.delayed_mlstm(*change(*inputs(10, batch=2, heads=3, features=6, width=5)), **{"delay": 0} | options)


class TestTriton:
    __test__ = INTERPRETED

    def test_one_token(self):
        """The gates cancel except for epsilon, so their gradients are zero up to rounding of products."""
        leaves = [t.requires_grad_() for t in inputs(1, features=5, width=3)]
        h, _ = ops.delayed_mlstm(*leaves, delay=0, impl="triton")
        grad = gradient(h.shape)
        *_, di, df = torch.autograd.grad(h, leaves, grad)
        high = [t.detach().double().requires_grad_() for t in leaves]
        exact, _, _ = recurrence(*high, 0)
        *_, di_exact, df_exact = torch.autograd.grad(exact, high, grad.double())
        assert_within_budget(h, exact.detach(), exact.detach().float())
        rounding = 8 * torch.finfo(torch.float32).eps * (grad * leaves[2]).abs().sum(-1).max()
        assert (di - di_exact).abs().max() <= rounding and (df - df_exact).abs().max() <= rounding

    def test_float16_inputs_are_computed_in_float32(self):
        check([t.half() for t in inputs(50)], delay=5)

    def test_stabiliser_beyond_the_clamp_of_epsilon(self):
        """For m > 60 epsilon's share is below 1e-32; for m < -60 the readout is below 1e-20 |v|.

        What is left out for m < -60 is as small.
        """
        q, k, v, igate, fgate = inputs(60)
        check((q, k, v, igate + 75, fgate), delay=4, chunk=16)
        low = [t.requires_grad_() for t in (q, k, v, igate - 90, fgate)]
        h, state = ops.delayed_mlstm(*low, delay=4, chunk=16, impl="triton")
        assert h.abs().max() < 1e-18
        assert all(g.isfinite().all() and g.abs().max() < 1e-16 for g in torch.autograd.grad(h.sum(), low))

    def test_what_it_does_not_take_is_refused(self):
        args = inputs(20)
        _, state = ops.delayed_mlstm(*args, delay=0, impl="triton")
        for chunk in (8, 24):
            with pytest.raises(ValueError, match=f"power of two of at least 16 as chunk, got {chunk}"):
                ops.delayed_mlstm(*args, delay=0, chunk=chunk, impl="triton")
        with pytest.raises(ValueError, match="no gradient for the state"):
            ops.delayed_mlstm(*args, delay=0, state=[t.requires_grad_() for t in state], impl="triton")
        with pytest.raises(ValueError, match="float64: use impl='reference'"):
            ops.delayed_mlstm(*(t.double() for t in args), delay=0, impl="triton")
