"""The chunkwise mLSTM against its recurrence in float64, its delay, its continuation and its gradients."""

from __future__ import annotations

import pytest
import torch

from kvpop_vllm.kernels import ops

EPS = 1e-6


def inputs(length, *, features=6, width=5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.rand(2, 3, length, features, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(2, 3, length, width, generator=g, dtype=dtype)
    igate, fgate = (2 * torch.randn(2, 3, length, generator=g, dtype=dtype) + c for c in (0, 2))
    return q, k, v, igate, fgate


def recurrence(q, k, v, igate, fgate, delay):
    """Unstabilised, token by token: readout of u at u + delay, zero beyond the end; and the last C and z."""
    c, z = torch.zeros(2, 3, k.shape[-1], v.shape[-1], dtype=k.dtype), torch.zeros(2, 3, k.shape[-1], dtype=k.dtype)
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
