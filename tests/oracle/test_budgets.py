"""The error-budget helpers accept honest rounding and refuse anything else."""

from __future__ import annotations

import math

import pytest
import torch

from kvpop_vllm.testing import assert_within_budget, error_budget


def attention(q, k):
    logits = q @ k.T
    return logits.softmax(-1) @ k, logits.logsumexp(-1)


@pytest.fixture
def budgets():
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(40, 16, generator=generator) for _ in range(2))
    return error_budget(attention, inputs, torch.bfloat16)


def test_rounded_reference_passes_and_budget_is_derived(budgets):
    for budget in budgets:
        budget.check(budget.reference.bfloat16())
        budget.check(budget.eager_low)
        assert budget.allowed >= 2 * budget.eager_error > 0


def test_wrong_values_fail_with_place_and_name(budgets):
    wrong = budgets[0].reference.clone()
    wrong[3, 5] += 2 * budgets[0].allowed
    with pytest.raises(AssertionError, match=r"out: error .* at \(3, 5\)"):
        budgets[0].check(wrong, "out")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_poison_fails(bad):
    reference = torch.zeros(3, dtype=torch.float64)
    actual = torch.tensor([0.0, bad, 0.0])
    with pytest.raises(AssertionError, match="wrongly NaN or infinite"):
        assert_within_budget(actual, reference, torch.zeros(3))


def test_expected_infinities_pass_and_must_be_there():
    reference = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert_within_budget(reference.float(), reference, reference.float())
    with pytest.raises(AssertionError, match="wrongly finite"):
        assert_within_budget(torch.tensor([-9.0, 1.0]), reference, reference.float())


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(2))
