"""Attention under the running top-k mask, and its gradients, against a masked softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.naive import kept_sets, masked_attention, visible_keys
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
IMPL, DTYPE = ("triton", F32) if INTERPRETED else ("reference", F64)
SHAPES = {
    "plain": dict(length=77, sinks=3, window=9, topk=11, group=2, batch=2),
    "shorter-than-the-window": dict(length=7, sinks=2, window=10, topk=3),
    "fewer-eligible-than-k": dict(length=40, sinks=2, window=8, topk=100),
    "no-long-range": dict(length=60, sinks=2, window=8, topk=0),
    "no-sinks, window-of-one": dict(length=65, sinks=0, window=1, topk=9, group=3),
    "blocks": dict(length=140 if INTERPRETED else 600, sinks=4, window=24, topk=30, group=2),
} | {str(size): dict(length=50, sinks=2, window=8, topk=9, size=size) for size in (64, 80, 96, 128, 256, 512)}
IN_FLOAT32 = [name for name in SHAPES if name != "512"]  # by Triton in float32
BY_DTYPE = {F32: IN_FLOAT32, F16: ["plain", "80", "512"]} if INTERPRETED else dict.fromkeys((F64, F32, BF16), SHAPES)


def inputs(length, seed=0, batch=1, heads=2, group=1, size=16, coarse=False, dtype=DTYPE, **_):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * group, length, size, generator=g, dtype=F64) * 2
    k, v = (torch.randn(batch, heads, length, size, generator=g, dtype=F64) for _ in range(2))
    priority = torch.randn(batch, heads, length, generator=g)
    return *(x.to(dtype).requires_grad_() for x in (q, k, v)), priority.round() if coarse else priority


def check(q, k, v, priority, *, sinks, window, topk, rtol=1e-11, **_):
    """Compare (out, lse, dq, dk, dv) of the op with those of the definition in float64.

    The error may be that of eager runs in the dtype of the inputs.
    """
    scale, visible, dtype = q.shape[-1] ** -0.5, kept_sets(priority, sinks, window, topk), q.dtype
    rank, cutoff = ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl="reference")
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)

    def complete(run, *args):
        out, lse = run(*args)
        return [out, lse, *torch.autograd.grad(out, args, grad.to(out.dtype))]

    def op(*args):
        return ops.sparse_attention(*args, rank, cutoff, sinks=sinks, window=window, scale=scale, impl=IMPL)

    def definition(*args):
        return masked_attention(*args, visible, scale)

    actual = complete(op, q, k, v)
    exact = complete(definition, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    assert actual[0].dtype == dtype and actual[1].dtype == (F64 if dtype == F64 else F32)
    assert not actual[1].requires_grad
    if dtype == F64:
        for a, e in zip(actual, exact, strict=True):
            torch.testing.assert_close(a, e, rtol=rtol, atol=rtol / 10)
        return
    eager = eager_runs(lambda: complete(definition, q, k, v))
    for name, a, e, low in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, eager, strict=True):
        assert_within_budget(a, e.detach(), low, name=name)


@pytest.mark.parametrize("dtype, shape", [(dtype, shape) for dtype, shapes in BY_DTYPE.items() for shape in shapes])
def test_equals_the_definition(shape, dtype):
    check(*inputs(**SHAPES[shape], dtype=dtype), **SHAPES[shape])


if not INTERPRETED:  # of the reference

    @pytest.mark.parametrize("shape", ["plain", "blocks"])
    def test_devices_without_the_fused_kernel_of_cpus(shape, monkeypatch):
        monkeypatch.setattr("kvpop_vllm.kernels.reference.masked_attention._on_cpu", lambda q: False)
        check(*inputs(**SHAPES[shape]), **SHAPES[shape])


def test_positions_before_heads_in_memory():
    options = SHAPES["plain"] | {"batch": 1}
    *tokens, priority = inputs(**options, coarse=True, dtype=F32)
    turned = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tokens)
    check(*turned, priority, **options)


def test_rows_that_are_not_contiguous():
    options = SHAPES["plain"]
    *tokens, priority = inputs(**options, coarse=True)
    spread = (torch.stack([x.detach(), x.detach()], -1).flatten(-2)[..., ::2].requires_grad_() for x in tokens)
    check(*spread, priority, **options)


@settings(max_examples=5 if INTERPRETED else 40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 60), sinks=st.integers(0, 4), window=st.integers(1, 12), topk=st.integers(0, 20),
    heads=st.integers(1, 3), group=st.integers(1, 3), coarse=st.booleans(), seed=st.integers(0, 9999),
)  # fmt: skip
def test_any_shape(length, sinks, window, topk, heads, group, coarse, seed):
    check(*inputs(length, seed, 1, heads, group, 8, coarse), sinks=sinks, window=window, topk=topk, rtol=1e-9)


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


@pytest.mark.parametrize("length, topk", [(70, 0), (1, 1)])
def test_queries_that_see_themselves_alone(length, topk):
    """With k = 0, w = 1, s = 0, dq and dk are zero up to the rounding of two equal sums of D products."""
    *tokens, priority = inputs(length, batch=1, group=2, dtype=F32)
    q, k, v = tokens
    rank, cutoff = ops.running_topk(priority, sinks=0, window=1, topk=topk, impl=IMPL)
    out, lse = ops.sparse_attention(q, k, v, rank, cutoff, sinks=0, window=1, scale=0.25, impl=IMPL)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(4))
    dq, dk, dv = torch.autograd.grad(out, tokens, grad)
    keys, values = (x.detach().repeat_interleave(2, 1) for x in (k, v))
    q = q.detach()
    logits = (0.25 * q.double() * keys.double()).sum(-1)
    assert_within_budget(lse, logits, eager_runs(lambda: (0.25 * q * keys).sum(-1)), name="lse")
    assert_within_budget(out, values.double(), values, name="out")
    exact = grad.double().unflatten(1, (2, 2)).sum(2)
    assert_within_budget(dv, exact, exact.float(), name="dv")
    rounding = 2 * 16 * torch.finfo(F32).eps * (grad * values).abs().sum(-1).max()
    assert dq.abs().max() <= rounding * 0.25 * k.abs().max()
    assert dk.abs().max() <= 2 * rounding * 0.25 * q.abs().max()


def _inside(value):
    return value if isinstance(value, tuple) else ()


class TestTriton:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("best", ["oldest", "any"])
    def test_little_is_computed_that_nobody_sees(self, best, monkeypatch):
        """Lists name the keys that some query of a block sees; ranges of queries are few times what sees their keys."""
        from kvpop_vllm.kernels.triton import sparse_attention as module

        listings, keys = [], []
        lists, run = module.key_lists, module._backward_keys.run
        monkeypatch.setattr(module, "key_lists", lambda *args: (listings.append(got[1]) or got for got in lists(*args)))
        monkeypatch.setattr(
            module._backward_keys, "run", lambda *args, **named: keys.append(args) or run(*args, **named)
        )
        length, options = 512, dict(sinks=4, window=80, topk=30)
        *tokens, priority = inputs(length, dtype=F32)
        if best == "oldest":  # the first k stay and later ones are seen in the window only
            priority = -torch.arange(float(length)).expand(1, 2, -1)
        check(*tokens, priority, **options)
        visible = visible_keys(*ops.running_topk(priority, **options, impl="reference"), 4, 80)[0]
        ((_, listed, counts, *_),) = listings
        for head in range(2):
            for block, query_block in enumerate(visible[head].split(32)):
                expected = query_block.any(0).nonzero().flatten().tolist()
                assert listed[head, block, 0, : counts[head, block, 1]].tolist() == expected
        ((_, _, _, order, gone, *_),) = keys
        ends = gone.gather(1, order[:, 0].long()).clamp_max(length).split(32, 1)
        ranges = sum(
            (end.amax(1) - born.amin(1)).sum() for born, end in zip(order[:, 0].split(32, 1), ends, strict=True)
        )
        assert visible.sum() < 32 * ranges <= 2.5 * visible.sum(), (ranges, visible.sum())

    def test_checkpointing_may_free_what_backward_needs(self):
        """Nothing but saved tensors, which checkpointing and offloading take over, keeps keys and values."""
        *tokens, priority = inputs(20, dtype=F32)
        order = ops.running_topk(priority, sinks=1, window=4, topk=5, impl="reference")
        out, _ = ops.sparse_attention(*tokens, *order, sinks=1, window=4, scale=1.0, impl="triton")
        nodes = [out.grad_fn]
        while "sparse_attention" not in type(nodes[-1]).__name__:
            nodes.append(nodes[-1].next_functions[0][0])
        fields = vars(nodes[-1]).values()
        assert nodes[-1].scale == 1.0
        assert not any(isinstance(value, torch.Tensor) for part in fields for value in (part, *_inside(part)))

    def test_what_it_does_not_take_is_refused(self):
        order = torch.zeros(1, 2, 8, dtype=torch.int32)
        for error, (*tokens, _) in (
            ("float64: use impl='reference'", inputs(8, dtype=F64)),
            ("up to 256, got 512", inputs(8, size=512, dtype=F32)),
            ("up to 512, got 528", inputs(8, size=528, dtype=F16)),
        ):
            with pytest.raises(ValueError, match=error):
                ops.sparse_attention(*tokens, order, order, sinks=1, window=2, scale=1.0, impl="triton")
