"""Attention under the running top-k mask, and its gradients, against a masked softmax in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.memory import peak_growth
from kernels.naive import kept_sets, masked_attention

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.reference import sparse_attention as reference
from kvpop_vllm.testing import assert_within_budget, eager_runs

SHAPES = {
    "plain": dict(length=150, sinks=3, window=10, topk=20),
    "shorter-than-the-window": dict(length=7, sinks=2, window=10, topk=3),
    "fewer-eligible-than-k": dict(length=40, sinks=2, window=8, topk=100),
    "no-long-range": dict(length=60, sinks=2, window=8, topk=0),
    "window-of-one": dict(length=60, sinks=0, window=1, topk=5),
    "no-sinks": dict(length=65, sinks=0, window=16, topk=9),
    "blocks": dict(length=600, sinks=4, window=32, topk=100),
}


def inputs(length, seed=0, batch=2, heads=2, group=3, size=16, coarse=False, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * group, length, size, generator=g, dtype=torch.float64) * 2
    k, v = (torch.randn(batch, heads, length, size, generator=g, dtype=torch.float64) for _ in range(2))
    priority = torch.randn(batch, heads, length, generator=g)
    return *(x.to(dtype).requires_grad_() for x in (q, k, v)), priority.round() if coarse else priority


def both(q, k, v, priority, *, sinks, window, topk, length=None, dtype=torch.float64):
    """Return (out, lse, dq, dk, dv) of the op, of the definition in float64, and of eager runs.

    The op and the eager runs use ``dtype``.
    """
    scale, visible = q.shape[-1] ** -0.5, kept_sets(priority, sinks, window, topk)
    rank, cutoff = ops.running_topk(priority, sinks=sinks, window=window, topk=topk)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    def complete(out, lse, *args):
        return [out, lse, *torch.autograd.grad(out, args, grad.to(out.dtype))]

    out, lse = ops.sparse_attention(q, k, v, rank, cutoff, sinks=sinks, window=window, scale=scale, impl="reference")
    high = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return (
        complete(out, lse, q, k, v),
        complete(*masked_attention(*high, visible, scale), *high),
        eager_runs(lambda: complete(*masked_attention(q, k, v, visible, scale), q, k, v)),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_definition(shape, dtype):
    options = SHAPES[shape]
    actual, exact, eager = both(*inputs(options["length"], dtype=dtype), **options)
    assert actual[0].dtype == dtype and actual[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not actual[1].requires_grad
    for name, a, e, low in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, eager, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)
        else:
            assert_within_budget(a, e.detach(), low, name=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 60), sinks=st.integers(0, 4), window=st.integers(1, 12), topk=st.integers(0, 20),
    heads=st.integers(1, 3), group=st.integers(1, 3), coarse=st.booleans(), seed=st.integers(0, 9999),
)  # fmt: skip
def test_any_shape(length, sinks, window, topk, heads, group, coarse, seed):
    args = inputs(length, seed, 1, heads, group, 8, coarse)
    actual, exact, _ = both(*args, sinks=sinks, window=window, topk=topk)
    for a, e in zip(actual, exact, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


def test_gradcheck():
    q, k, v, priority = inputs(14, batch=1, heads=1, group=2, size=3)
    rank, cutoff = ops.running_topk(priority, sinks=1, window=3, topk=4)

    def out(*args):
        return ops.sparse_attention(*args, rank, cutoff, sinks=1, window=3, scale=0.6, impl="reference")[0]

    assert torch.autograd.gradcheck(out, (q, k, v))


def test_a_mask_from_a_simulation_of_evictions():
    """``rank = S - evicted_at`` and ``cutoff[q] = S - 1 - q`` hide from query q what is evicted at q."""
    q, k, v, _ = inputs(50, batch=1, heads=1)
    gone = torch.randint(12, 80, (50,), generator=torch.Generator().manual_seed(3)).clamp_max(50)
    t = torch.arange(50)
    visible = ((t < 2) | (t > t[:, None] - 10) | (gone > t[:, None])) & (t <= t[:, None])
    rank, cutoff = (50 - gone).int()[None, None], (49 - t).int()[None, None]
    out, _ = ops.sparse_attention(q, k, v, rank, cutoff, sinks=2, window=10, scale=0.25)
    torch.testing.assert_close(out, masked_attention(q, k, v, visible[None, None], 0.25)[0])


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (1, 3, 20, 8)}, r"q \[B, Hq, S, D\] and k \[B, H, S, D\], Hq a multiple of H, got \[1, 3, 20, 8\]"),
        ({"q": (1, 4, 19, 8)}, "Hq a multiple of H"),
        ({"q": (1, 0, 20, 8)}, "Hq a multiple of H"),
        ({"v": (1, 2, 20, 9)}, "k and v must have one shape"),
        ({"rank": (1, 1, 20)}, r"rank and k, but for the last axis, must have one shape, got \[1, 1, 20\]"),
        ({"cutoff": (1, 2, 10)}, "cutoff and rank must have one shape"),
        ({"window": 0}, "window >= 1"),
    ],
)
def test_shapes_that_do_not_match_are_refused(impl, change, message):
    """Shapes are checked before an implementation, which could read beyond the end, is called."""
    shapes = {"q": (1, 4, 20, 8), "k": (1, 2, 20, 8), "v": (1, 2, 20, 8), "rank": (1, 2, 20), "cutoff": (1, 2, 20)}
    tensors = [
        torch.zeros((shapes | change)[name], dtype=torch.int32 if len(shapes[name]) == 3 else None) for name in shapes
    ]
    with pytest.raises(ValueError, match=message):
        ops.sparse_attention(*tensors, sinks=1, window=change.get("window", 4), scale=1.0, impl=impl)


def test_memory_is_linear():
    def run(length):
        q, k, v = (torch.randn(1, n, length, 8, requires_grad=True) for n in (1, 1, 1))
        rank, cutoff = ops.running_topk(torch.randn(1, 1, length), sinks=4, window=64, topk=length // 4)
        out, _ = ops.sparse_attention(q, k, v, rank, cutoff, sinks=4, window=64, scale=0.25, impl="reference")
        out.sum().backward()

    assert peak_growth(run) < 1.3 and reference.BLOCK < 2048
