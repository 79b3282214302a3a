"""Shares are kept where rows of other documents are better, and at no budget notably worse."""

import pytest

from kvpop_vllm.calibrate.stages import is_better

ROWS = [0.9, 1.0, 1.1, 0.95, 1.05, 1.0, 0.9, 1.1]


def budgets(*pairs):
    """Return losses of rows at each budget, for the means with equal shares and with the table."""
    return [[[mean * row for row in ROWS] for mean in pair] for pair in pairs]


@pytest.mark.parametrize(
    "losses, better",
    [
        (budgets((0.01, 0.008), (0.04, 0.03), (0.1, 0.08)), True),
        (budgets((0.01, 0.01), (0.04, 0.04), (0.1, 0.1)), False),
        (budgets((0.01, 0.011), (0.04, 0.044), (0.1, 0.11)), False),
        (budgets((0.01, 0.02), (0.04, 0.03), (0.1, 0.08)), False),
        (budgets((1e-5, 2e-5), (4e-4, 6e-4), (0.02, 0.01)), True),  # nothing is lost at the first budgets
    ],
)
def test_what_is_kept(losses, better):
    assert is_better(losses, list(range(8))) is better


def test_what_few_rows_say_is_not_kept():
    losses = budgets((0.01, 0.0), (0.04, 0.0), (0.1, 0.0))
    for _, shared in losses:
        shared[3] = 1.0
    assert not is_better(losses, list(range(8)))
