"""Future attention mass against column sums of the attention matrix in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.naive import future_mass
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs


def inputs(length, seed=0, batch=2, heads=2, group=3, size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * group, length, size, generator=g, dtype=torch.float64) * 3
    k = torch.randn(batch, heads, length, size, generator=g, dtype=torch.float64)
    lse = torch.randn(batch, heads * group, length, generator=g, dtype=torch.float64) + 4
    return q.to(dtype), k.to(dtype), lse.to(dtype if dtype == torch.float64 else torch.float32)


F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
if INTERPRETED:
    IMPL, DTYPES = "triton", [F32, F16]
    SHAPES = [(90, 9, 16, 2), (20, 50, 16, 1), (64, 64, 16, 1), (70, 1, 80, 3)]
    SHAPES += [(50, 7, 256, 2)]
    LOOKAHEADS = [None, 0, 13, 500]
else:
    IMPL, DTYPES = "reference", [F64, F32, BF16]
    SHAPES = [(300, 10, 16, 3), (300, 1, 16, 3), (9, 10, 16, 3), (140, 139, 16, 3)]
    LOOKAHEADS = [None, 0, 50]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("length, window, size, group", SHAPES)
def test_equals_the_definition(length, window, size, group, lookahead, dtype):
    q, k, lse = inputs(length, batch=1, group=group, size=size, dtype=dtype)
    options = dict(window=window, scale=0.25, lookahead=lookahead)
    leaves = (x.clone().requires_grad_() for x in (q, k, lse))
    actual = ops.future_attention_mass(*leaves, **options, impl=IMPL)
    exact = future_mass(q.double(), k.double(), lse.double(), *options.values())
    assert actual.dtype == (F64 if dtype == F64 else F32) and not actual.requires_grad
    low = F16 if dtype == F16 else F32
    eager = eager_runs(lambda: future_mass(*(x.to(low) for x in (q, k, lse)), *options.values()))
    assert_within_budget(actual, exact, eager)
    assert (actual[..., max(0, length - window) :] == -torch.inf).all()


PARTS = [
    (40, 30, 200, 10, None),
    (5, 300, 0, 9, None),
    (129, 128, 130, 1, None),
    (60, 200, 90, 10, 20),
    (9, 4, 3, 50, 0),
]
"""Numbers of queries and keys, position of the first query, window and look-ahead."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries, keys, first, window, lookahead", PARTS)
def test_some_queries_and_other_keys(queries, keys, first, window, lookahead, dtype):
    """As for a part of a row: queries from a position on, in slices of longer tensors."""
    q, _, lse = inputs(queries + 7, batch=2, dtype=dtype)
    _, k, _ = inputs(keys + 5, seed=1, batch=2, dtype=dtype)
    q, k, lse = q[:, :, 3 : 3 + queries], k[:, :, 2 : 2 + keys], lse[:, :, 3 : 3 + queries]
    options = dict(window=window, scale=0.25, lookahead=lookahead, first=first)
    actual = ops.future_attention_mass(q, k, lse, **options, impl=IMPL)
    exact = future_mass(q.double(), k.double(), lse.double(), *options.values())
    low = F16 if dtype == F16 else F32
    eager = eager_runs(lambda: future_mass(*(x.to(low) for x in (q, k, lse)), *options.values()))
    assert actual.shape == exact.shape == (2, 6, keys)
    assert_within_budget(actual, exact, eager)


def test_float64_is_refused_by_triton():
    q, k, lse = inputs(8)
    with pytest.raises(ValueError, match="float64: use impl='reference'|needs a GPU"):
        ops.future_attention_mass(q, k, lse, window=2, scale=1.0, impl="triton")


@settings(max_examples=5 if INTERPRETED else 40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 300), window=st.integers(1, 40), lookahead=st.none() | st.integers(0, 60),
    heads=st.integers(1, 3), group=st.integers(1, 3), seed=st.integers(0, 9999), first=st.integers(0, 300),
)  # fmt: skip
def test_any_shape(length, window, lookahead, heads, group, seed, first):
    q, k, lse = inputs(length, seed, 1, heads, group, 8)
    q, lse = q[:, :, first:], lse[:, :, first:]
    options = dict(window=window, scale=0.3, lookahead=lookahead, first=first)
    actual = ops.future_attention_mass(q, k, lse, **options)
    torch.testing.assert_close(actual, future_mass(q, k, lse, *options.values()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 3, "lookahead": -1}, {"window": 3, "first": -1}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match="window >= 1, lookahead >= 0 and first >= 0"):
        ops.future_attention_mass(*inputs(10), scale=1.0, **options)
