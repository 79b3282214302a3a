"""The chunkwise mLSTM against its recurrence in float64: delay, continuation and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.naive import recurrence
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs


def inputs(length, *, batch=2, heads=3, features=6, width=5, seed=0, dtype=torch.float64):
    g, lead = torch.Generator().manual_seed(seed), (batch, heads, length)
    q, k = (torch.rand(*lead, features, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(*lead, width, generator=g, dtype=dtype)
    igate, fgate = (2 * torch.randn(*lead, generator=g, dtype=dtype) + c for c in (0, 2))
    return q, k, v, igate, fgate


@pytest.mark.parametrize("delay", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_equals_the_recurrence(delay, chunk):
    args = inputs(130)
    h, (c, z, m) = ops.delayed_mlstm(*args, delay=delay, chunk=chunk, impl="reference")
    expected, c_end, z_end = recurrence(*args, delay)
    torch.testing.assert_close(h, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(c * m.exp()[..., None, None], c_end, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(z * m.exp()[..., None], z_end, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    length=st.integers(1, 90),
    features=st.integers(1, 9),
    width=st.integers(1, 7),
    delay=st.integers(0, 100),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 2**30),
)
def test_any_shape(batch, heads, length, features, width, delay, chunk, seed):
    """The error is rounding in float64, and within that of the float32 recurrence in float32."""
    args = inputs(length, batch=batch, heads=heads, features=features, width=width, seed=seed)
    expected, c_end, z_end = recurrence(*args, delay)
    h, (c, z, m) = ops.delayed_mlstm(*args, delay=delay, chunk=chunk, impl="reference")
    torch.testing.assert_close(h, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(c * m.exp()[..., None, None], c_end, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(z * m.exp()[..., None], z_end, rtol=1e-9, atol=1e-12)
    single = [x.float() for x in args]
    exact = recurrence(*(x.double() for x in single), delay)[0]
    eager = eager_runs(lambda: recurrence(*single, delay)[0])
    h, _ = ops.delayed_mlstm(*single, delay=delay, chunk=chunk, impl="reference")
    assert_within_budget(h, exact, eager)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v, i, f: (q[..., :2], k, v, i, f), "q and k must have one shape"),
        (lambda q, k, v, i, f: (q, k, v[:, :, :4], i, f), "v and k, but for the last axis, must have one shape"),
        (lambda q, k, v, i, f: (q, k, v, i[:, :1], f), "igate and k, but for the last axis, must have one shape"),
        (lambda q, k, v, i, f: (q, k, v, i, f[:, :1]), "fgate and igate must have one shape"),
        (lambda *all_: [x[0] for x in all_], r"needs k \[B, H, S, F\], got \[3, 10, 6\]"),
        (lambda *all_: [x[:, :, :0] for x in all_], "chunk >= 1 and tokens, got 0, 64 and 0 tokens"),
    ],
)
def test_shapes_that_do_not_match_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ops.delayed_mlstm(*change(*inputs(10)), delay=0)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (
            ((1, 1, 6, 5), (1, 1, 6), (1, 1)),
            r"the state's C and what k and v ask for must have one shape, got \[1, 1, 6, 5\]",
        ),
        (((2, 3, 6, 1), (2, 3, 6), (2, 3)), "the state's C "),
        (((2, 3, 6, 5), (2, 3, 1), (2, 3)), "the state's z "),
        (((2, 3, 6, 5), (2, 3, 6), (2, 1)), "the state's m "),
    ],
)
def test_a_state_of_another_shape_is_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        ops.delayed_mlstm(*inputs(10), delay=0, state=tuple(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("option", [{"delay": -1}, {"delay": 0, "chunk": 0}])
def test_options_that_make_no_sense_are_refused(option):
    with pytest.raises(ValueError, match="needs delay >= 0, chunk >= 1"):
        ops.delayed_mlstm(*inputs(10), **option)


def test_continues_from_a_state():
    q, k, v, igate, fgate = inputs(100)
    whole, end = ops.delayed_mlstm(q, k, v, igate, fgate, delay=0, impl="reference")
    head, state = ops.delayed_mlstm(*(t[:, :, :37] for t in (q, k, v, igate, fgate)), delay=0, impl="reference")
    tail, again = ops.delayed_mlstm(
        *(t[:, :, 37:] for t in (q, k, v, igate, fgate)), delay=0, state=state, impl="reference"
    )
    torch.testing.assert_close(torch.cat([head, tail], 2), whole)
    torch.testing.assert_close(again[0] * again[2].exp()[..., None, None], end[0] * end[2].exp()[..., None, None])


def test_a_state_with_a_delay_is_refused():
    args = inputs(10)
    _, state = ops.delayed_mlstm(*args, delay=0, impl="reference")
    with pytest.raises(ValueError, match="delay=0"):
        ops.delayed_mlstm(*args, delay=2, state=state, impl="reference")


def test_large_gates_stay_finite_in_float32():
    q, k, v, igate, fgate = inputs(200, dtype=torch.float32)
    h, state = ops.delayed_mlstm(q, k, v, igate * 40, fgate - 30, delay=3, impl="reference")
    assert h.isfinite().all() and all(t.isfinite().all() for t in state)


def test_gradients():
    args = [t[:1, :1].contiguous().requires_grad_() for t in inputs(12, features=3, width=2)]
    assert torch.autograd.gradcheck(lambda *a: ops.delayed_mlstm(*a, delay=2, chunk=5, impl="reference")[0], args)


def few(length, features=16, width=16):
    """Return inputs of a batch of one in float32."""
    return inputs(length, batch=1, heads=2, features=features, width=width, dtype=torch.float32)


def gradient(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


class TestTriton:
    """Triton's mLSTM against its recurrence in float64, within the error of the same chunks in eager float32."""

    __test__ = INTERPRETED
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

        grad = gradient(inputs[2].shape)
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
        self.check(few(length, features, width), delay=delay, chunk=chunk)

    def test_one_token(self):
        """The gates cancel except for epsilon, so their gradients are zero up to rounding of products."""
        inputs = [t.requires_grad_() for t in few(1, 5, 3)]
        h, _ = ops.delayed_mlstm(*inputs, delay=0, impl="triton")
        grad = gradient(h.shape)
        *_, di, df = torch.autograd.grad(h, inputs, grad)
        high = [t.detach().double().requires_grad_() for t in inputs]
        exact, _, _ = recurrence(*high, 0)
        *_, di_exact, df_exact = torch.autograd.grad(exact, high, grad.double())
        assert_within_budget(h, exact.detach(), exact.detach().float())
        rounding = 8 * torch.finfo(torch.float32).eps * (grad * inputs[2]).abs().sum(-1).max()
        assert (di - di_exact).abs().max() <= rounding and (df - df_exact).abs().max() <= rounding

    def test_continues_from_a_state(self):
        whole = few(90, 16, 20)
        _, state = ops.delayed_mlstm(*(t[:, :, :37] for t in whole), delay=0, chunk=16, impl="triton")
        self.check([t[:, :, 37:] for t in whole], delay=0, chunk=32, start=state)

    def test_float16_inputs_are_computed_in_float32(self):
        self.check([t.half() for t in few(50)], delay=5)

    def test_stabiliser_beyond_the_clamp_of_epsilon(self):
        """For m > 60 epsilon's share is below 1e-32; for m < -60 the readout is below 1e-20 |v|.

        What is left out for m < -60 is as small.
        """
        q, k, v, igate, fgate = few(60)
        self.check((q, k, v, igate + 75, fgate), delay=4, chunk=16)
        low = [t.requires_grad_() for t in (q, k, v, igate - 90, fgate)]
        h, state = ops.delayed_mlstm(*low, delay=4, chunk=16, impl="triton")
        assert h.abs().max() < 1e-18
        assert all(g.isfinite().all() and g.abs().max() < 1e-16 for g in torch.autograd.grad(h.sum(), low))

    def test_large_gates_stay_finite(self):
        *rest, igate, fgate = few(50)
        inputs = [t.requires_grad_() for t in (*rest, 40 * igate, 40 * fgate)]
        h, state = ops.delayed_mlstm(*inputs, delay=3, chunk=16, impl="triton")
        assert all(t.isfinite().all() for t in (h, *state, *torch.autograd.grad(h.sum(), inputs)))

    def test_features_that_underflow(self):
        q, k, v, igate, fgate = few(40)
        q[:, :, 10:20] = 0
        k[:, :, :30] = 0
        self.check((q, k, v, igate, fgate), delay=2, chunk=16)

    def test_what_it_does_not_take_is_refused(self):
        inputs = few(20)
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
