"""The chunkwise mLSTM against its recurrence in float64: delay, continuation and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

EPS = 1e-6


def inputs(length, *, batch=2, heads=3, features=6, width=5, seed=0, dtype=torch.float64):
    g, lead = torch.Generator().manual_seed(seed), (batch, heads, length)
    q, k = (torch.rand(*lead, features, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(*lead, width, generator=g, dtype=dtype)
    igate, fgate = (2 * torch.randn(*lead, generator=g, dtype=dtype) + c for c in (0, 2))
    return q, k, v, igate, fgate


def recurrence(q, k, v, igate, fgate, delay):
    """Return unstabilised readouts of u at u + delay, zero beyond the end, and the last C and z."""
    lead = (*k.shape[:2], k.shape[-1])
    c, z = torch.zeros(*lead, v.shape[-1], dtype=k.dtype), torch.zeros(*lead, dtype=k.dtype)
    h = torch.zeros_like(v)
    for t in range(k.shape[2]):
        f, i = torch.sigmoid(fgate[..., t]), torch.exp(igate[..., t])
        c = f[..., None, None] * c + i[..., None, None] * k[..., t, :, None] * v[..., t, None, :]
        z = f[..., None] * z + i[..., None] * k[..., t, :]
        if t >= delay:
            u = q[..., t - delay, :]
            h[..., t - delay, :] = torch.einsum("bhf,bhfv->bhv", u, c) / ((u * z).sum(-1) + EPS)[..., None]
    return h, c, z


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
