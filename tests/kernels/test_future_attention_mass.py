"""Future attention mass against column sums of the attention matrix in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.memory import peak_growth
from kernels.naive import future_mass

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs


def inputs(length, seed=0, batch=2, heads=2, group=3, size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * group, length, size, generator=g, dtype=torch.float64) * 3
    k = torch.randn(batch, heads, length, size, generator=g, dtype=torch.float64)
    lse = torch.randn(batch, heads * group, length, generator=g, dtype=torch.float64) + 4
    return q.to(dtype), k.to(dtype), lse.to(dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length, window, lookahead", [(300, 10, None), (300, 1, 50), (9, 10, None), (140, 139, 0)])
def test_equals_the_definition(length, window, lookahead, dtype):
    q, k, lse = inputs(length, dtype=dtype)
    actual = ops.future_attention_mass(q, k, lse, window=window, scale=0.25, lookahead=lookahead, impl="reference")
    exact = future_mass(q.double(), k.double(), lse.double(), window, 0.25, lookahead)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    eager = eager_runs(lambda: future_mass(q.float(), k.float(), lse.float(), window, 0.25, lookahead))
    assert_within_budget(actual, exact, eager)
    assert (actual[..., max(0, length - window) :] == -torch.inf).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 300), window=st.integers(1, 40), lookahead=st.none() | st.integers(0, 60),
    heads=st.integers(1, 3), group=st.integers(1, 3), seed=st.integers(0, 9999),
)  # fmt: skip
def test_any_shape(length, window, lookahead, heads, group, seed):
    q, k, lse = inputs(length, seed, 1, heads, group, 8)
    actual = ops.future_attention_mass(q, k, lse, window=window, scale=0.3, lookahead=lookahead)
    torch.testing.assert_close(actual, future_mass(q, k, lse, window, 0.3, lookahead), rtol=1e-9, atol=1e-9)


def test_masses_of_dense_attention_add_up():
    """With the exact normaliser and w = 1, masses add up to what queries give to keys before themselves."""
    q, k, _ = inputs(120, batch=1)
    causal = torch.ones(120, 120, dtype=torch.bool).tril()
    logits = (q @ k.repeat_interleave(3, 1).mT * 0.25).masked_fill(~causal, -torch.inf)
    mass = ops.future_attention_mass(q, k, logits.logsumexp(-1), window=1, scale=0.25).exp().sum(-1)
    beyond = logits.softmax(-1).masked_fill(torch.eye(120, dtype=torch.bool), 0.0).sum((-1, -2))
    torch.testing.assert_close(mass, beyond)


def test_carries_no_gradient():
    q, k, lse = (x.requires_grad_() for x in inputs(30))
    assert not ops.future_attention_mass(q, k, lse, window=3, scale=1.0).requires_grad


@pytest.mark.parametrize("options", [{"window": 0}, {"window": 3, "lookahead": -1}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match="window >= 1 and lookahead >= 0"):
        ops.future_attention_mass(*inputs(10), scale=1.0, **options)


def test_memory_is_linear():
    def run(length):
        q, k, lse = torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8), torch.randn(1, 1, length)
        ops.future_attention_mass(q, k, lse, window=64, scale=0.25, impl="reference")

    assert peak_growth(run) < 1.3
