"""A scorer without a kernel of its own decides as the same scorer with one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from kernels.factories import random_rule, random_scorer

from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.scorers.mlp import MLPWeights

HEADS, GROUP, SIZE, LENGTH, BUDGET = 2, 2, 32, 150, 40


@dataclass(frozen=True)
class WithoutKernel(MLPWeights):
    kernel: ClassVar[None] = None


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("correction", [False, True])
def test_a_scorer_without_a_kernel(monkeypatch, impl, correction):
    draw = torch.Generator().manual_seed(5)
    rule = replace(
        random_rule(random_scorer("mlp", HEADS, SIZE, draw), HEADS, 4, 9, draw), moment_correction=correction
    )
    q, k, v = (torch.randn(n, LENGTH, SIZE, generator=draw) for n in (HEADS * GROUP, HEADS, HEADS))
    monkeypatch.setattr(dispatch, "select", lambda op, tensor: impl)
    scorers = rule.scorer, WithoutKernel(**vars(rule.scorer))
    kernel, plain = (LayerRows(replace(rule, scorer=scorer), BUDGET, k[None], SIZE**-0.5) for scorer in scorers)
    for chunk in (60, 1, 1, 30, *[1] * 58):
        cut = slice(kernel.seen, kernel.seen + chunk)
        outs = [rows.append(*(x[None, :, cut] for x in (q, k, v))) for rows in (kernel, plain)]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        assert torch.equal(kernel.held_by_rows(), plain.held_by_rows())
    assert kernel.held_by_rows().sum() == HEADS * BUDGET
