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
    "options, better, expected",
    [
        # a window with equal shares loses less than the policy that decides: that is served, and nothing is divided
        ({"policy": None, "scorer": None}, True, ("streaming-llm", None)),
        # shares that were asked for are kept, and so is their policy
        ({"policy": "h2o", "scorer": None}, True, ("h2o", ((1.0, 1.0),))),
        ({"policy": None, "scorer": "folder"}, True, ("h2o", ((1.0, 1.0),))),
        ({"policy": "h2o", "scorer": None}, False, ("streaming-llm", None)),
    ],
)
def test_what_is_recommended(options, better, expected):
    kl = {("h2o", EQUAL): 0.4, ("h2o", "layer-32"): 0.3, ("streaming-llm", EQUAL): 0.2}
    lines = [
        {"policy": name, "shares": shares, "budget": budget, "kl": loss * (1 if budget == 32 else 1e-3)}
        for (name, shares), loss in kl.items()
        for budget in (64, 32)
        if better or shares == EQUAL
    ]
    sizes = {"model_type": "llama", "num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "layers": None, "rope": None}
    plan = SimpleNamespace(budget=32, options=SimpleNamespace(unit="layer", **options), shape=SimpleNamespace(**sizes))
    calibration = recommended(plan, Verdict(lines, better), [[1.0, 1.0]], {"h2o": 0.25})
    assert (calibration.policy, calibration.shares) == expected and calibration.budget == 32
    assert calibration.unit == ("uniform" if expected[1] is None else "layer")
    assert bool(calibration.windows) == bool(calibration.shares)
