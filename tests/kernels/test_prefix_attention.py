"""Attention of a chunk to a protected prefix, on every instruction set, against a softmax in float64."""

from __future__ import annotations

import pytest
import torch

from kvpop_vllm import _C
from kvpop_vllm.kernels import prefix_attention
from kvpop_vllm.kernels.cpp.prefill_chunk import _attend
from kvpop_vllm.kernels.pages import PageLayout, Prefix, cdiv

SHAPES = [  # D, N, G, queries, first and last token
    (32, 16, 3, 1, 0, 1),
    (64, 64, 1, 17, 5, 200),
    (80, 48, 4, 33, 64, 65),
    (96, 32, 2, 130, 0, 300),
    (128, 16, 7, 5, 31, 97),
]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


def prefix_of(size, slots, tokens, dtype, make=None):
    """Return random tokens of two heads in randomly ordered blocks; everything else in the pages is NaN."""
    generator = torch.Generator().manual_seed(size + tokens)
    layout, blocks = PageLayout(2, size, dtype, slots), cdiv(tokens, slots)
    raw = torch.full((blocks + 2, 2, layout.region_bytes), 255, dtype=torch.uint8)
    pages = layout.view(raw) if make is None else make(layout, blocks + 2)
    table = torch.randperm(blocks + 2, generator=generator)[:blocks].int()
    k, v = (torch.randn(tokens, 2, size, generator=generator).to(dtype) for _ in range(2))
    prefix, t = Prefix(pages, table.unsqueeze(0), torch.tensor([tokens])), torch.arange(tokens)
    prefix.write(k, v, table[t // slots].long(), t % slots)
    return prefix, k, v, generator


def exact(q, k, v, first, last, causal, scale):
    """Return outputs, log-sum-exps and the values' weighted magnitudes, in float64."""
    group, count = q.shape[1] // k.shape[1], last - first
    keys, values = (x[first:last].double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if causal:
        logits.masked_fill_(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(-1)
    mixed = [torch.einsum("hqk,khd->qhd", weights, x) for x in (values, values.abs())]
    return mixed[0], logits.logsumexp(-1).T, mixed[1]


@pytest.mark.parametrize("isa", _C.isa_levels())
@pytest.mark.parametrize("dtype, q_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_a_softmax_over_these_tokens(shape, dtype, q_dtype, isa, make=None):
    """In bfloat16 products, only weights and outputs are rounded to bfloat16."""
    size, slots, group, queries, first, last = shape
    prefix, k, v, generator = prefix_of(size, slots, last, dtype, make)
    _C.set_isa(isa)
    for causal, count in ((False, queries), (True, last - first)):
        q = torch.randn(count, 2 * group, size, generator=generator).to(q_dtype)
        out, lse = _attend(q, prefix, first, last, size**-0.5, causal)
        expected, expected_lse, magnitude = exact(q, k, v, first, last, causal, size**-0.5)
        rounded = 2.0**-8 if torch.bfloat16 in (q_dtype,) else 0.0
        assert out.dtype == q_dtype and out.shape == q.shape
        assert ((out.double() - expected).abs() <= rounded * (magnitude + expected.abs()) + 4e-6).all()
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)
        if make is None:
            torch_out, torch_lse = prefix_attention._attend(q.to(dtype), prefix, first, last, size**-0.5, causal)
            assert torch_out.shape == out.shape and torch_lse.shape == lse.shape


def test_what_it_would_overrun_is_refused():
    prefix, *_ = prefix_of(32, 16, 40, torch.float32)
    q, raw, table = torch.zeros(4, 4, 32), prefix.pages.raw, prefix.table[0]

    def attend(q=q, raw=raw, table=table, first=0, last=40, causal=False, slots=16):
        return _C.prefix_attention(q, raw, slots, table, first, last, causal, False, 1.0)

    attend()
    for options, error in (
        ({"last": 49}, IndexError),
        ({"first": 40}, ValueError),
        ({"first": -1}, ValueError),
        ({"causal": True}, ValueError),
        ({"table": table + 100}, IndexError),
        ({"table": -table - 1}, IndexError),
        ({"table": table.long()}, TypeError),
        ({"raw": raw[..., :-4]}, ValueError),
        ({"q": q[:, :3]}, ValueError),
        ({"q": q.half()}, TypeError),
        ({"slots": 32}, ValueError),
    ):
        with pytest.raises(error):
            attend(**options)
