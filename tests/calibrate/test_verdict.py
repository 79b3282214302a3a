"""Shares are kept where rows of other documents are better, and at no budget notably worse. What loses least is recommended."""

from types import SimpleNamespace

import pytest

from kvpop_vllm.calibrate.passes import EQUAL
from kvpop_vllm.calibrate.run import recommended
from kvpop_vllm.calibrate.stages import Verdict, is_better

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


@pytest.mark.parametrize(
    "of_h2o, of_tova, better, policy",
    [
        ((0.4, 0.1), (0.5, 0.3), True, "h2o"),
        ((0.4, 0.3), (0.5, 0.4), True, "streaming-llm"),  # with equal shares, as it has not decided
        ((0.4, 0.3), (0.1, 0.25), True, "streaming-llm"),  # tova would be served with shares too
        ((0.1, 0.3), (0.5, 0.4), False, "h2o"),
    ],
)
def test_what_loses_least_as_it_is_served_is_recommended(of_h2o, of_tova, better, policy):
    """Shares that are better are written whatever is recommended, with the policy that decided about them."""
    kl = {("h2o", EQUAL): of_h2o[0], ("h2o", "layer-32"): of_h2o[1], ("streaming-llm", EQUAL): 0.2}
    kl |= {("tova", EQUAL): of_tova[0], ("tova", "layer-32"): of_tova[1]}
    lines = [
        {"policy": name, "shares": shares, "budget": budget, "kl": loss * (1 if budget == 32 else 1e-3)}
        for (name, shares), loss in kl.items()
        for budget in (64, 32)
        if better or shares == EQUAL
    ]
    sizes = {"model_type": "llama", "num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "layers": None, "rope": None}
    plan = SimpleNamespace(budget=32, options=SimpleNamespace(unit="layer"), shape=SimpleNamespace(**sizes))
    plan.decides, plan.takes_shares = "h2o", lambda name: name != "streaming-llm"
    calibration = recommended(plan, Verdict(lines, better), [[1.0, 1.0]], {"h2o": 0.25})
    assert (calibration.policy, calibration.budget) == (policy, 32)
    assert (calibration.unit, calibration.shares, calibration.decided_by) == (
        ("layer", ((1.0, 1.0),), "h2o") if better else ("uniform", None, None)
    )
    assert calibration.windows == {"h2o": 0.25}
