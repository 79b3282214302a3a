"""Bootstrap intervals cover what they should, and draw whole documents."""

import numpy as np
import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.statistics import LEAST, bootstrap_ratio, estimate


def test_the_value_is_the_ratio_of_sums_and_the_interval_holds_it():
    ratio = bootstrap_ratio([1.0, 2, 3, 4, 5, 6, 7, 8], [2.0] * 8)
    assert ratio.value == 36 / 16
    assert ratio.low < ratio.value < ratio.high


def test_intervals_of_a_mean_cover_the_truth_in_about_95_of_100_samples():
    draw = np.random.default_rng(0)
    samples = draw.exponential(2.0, (120, 60))
    intervals = [bootstrap_ratio(sample) for sample in samples]
    covered = np.mean([i.low <= 2.0 <= i.high for i in intervals])
    assert 0.88 < covered < 0.99  # percentiles are a little short for a skewed distribution
    width = np.mean([i.high - i.low for i in intervals])
    assert width == pytest.approx(2 * 1.96 * 2.0 / np.sqrt(60), rel=0.1)


def test_rows_of_one_document_are_drawn_together():
    draw = np.random.default_rng(1)
    documents = draw.normal(size=12)
    apart = bootstrap_ratio(documents)
    repeated = bootstrap_ratio(np.repeat(documents, 5), units=np.repeat(np.arange(12), 5))
    assert repeated == pytest.approx(apart)
    naive = bootstrap_ratio(np.repeat(documents, 5))
    assert naive.high - naive.low < 0.6 * (repeated.high - repeated.low)


def test_too_few_documents_are_refused():
    with pytest.raises(ConfigError, match="raise --rows"):
        bootstrap_ratio([1.0] * (LEAST + 8), units=list(range(LEAST - 1)) + [0] * 9)


def test_a_ratio_is_clear_of_one_where_the_difference_is_clear_of_zero():
    """The ends of both intervals are of the same draws, whatever the two policies are."""
    draw, sides = np.random.default_rng(2), set()
    for _ in range(60):
        left, right = draw.exponential(1.0, (2, 12))
        scale = draw.uniform(0.3, 2)
        ratio, difference = bootstrap_ratio(scale * left, right), bootstrap_ratio(scale * left - right)
        assert (ratio.low > 1, ratio.high < 1) == (difference.low > 0, difference.high < 0)
        sides.add((ratio.low > 1, ratio.high < 1))
    assert len(sides) == 3


def test_a_denominator_that_may_be_zero_leaves_the_ratio_unbounded():
    few, many = [4.0] * 11 + [-1.0], [3.0, -1.0] * 6
    assert np.isfinite(bootstrap_ratio([1.0] * 12, few)).all()
    assert bootstrap_ratio([1.0] * 12, many)[1:] == (-np.inf, np.inf)
    assert estimate("x", [1.0] * 12, [-1.0] * 12, units=range(12)) == {}


def test_what_hardly_ever_or_always_happened_has_an_interval_too():
    """The end of an interval is where as many units as there are have one outcome with a probability of 0.025."""
    for count in (8, 64):
        low, high = estimate("x", [0.0] * count, units=range(count), shares=True)["x interval"]
        assert low == 0 and (1 - high) ** count == pytest.approx(0.025)
        assert estimate("x", [1.0] * count, units=range(count), shares=True)["x interval"] == (1 - high, 1)
    values = [0.0] * 5 + [1.0] * 5
    assert estimate("x", values, units=range(10), shares=True) == estimate("x", values, units=range(10))
    assert (
        estimate("x", [0.0] * 63 + [0.2], units=range(64), shares=True)["x interval"][1] == high
    )  # no less than for none
    assert estimate("x", [0.0] * 10, units=range(10))["x interval"] == (0, 0)


def test_fields_of_a_line_have_an_interval_from_eight_units_on():
    values = [float(i) for i in range(9)]
    everything = bootstrap_ratio(values)
    assert estimate("x", values, units=range(9)) == {"x": 4.0, "x interval": (everything.low, everything.high)}
    assert estimate("x", values, units=[0, 1, 2, 3, 4, 5, 6, 6, 6]) == {"x": 4.0}


def test_trainings_are_drawn_apart_from_problems():
    """The variance of a draw's mean is that of the means of trainings, of problems, and of their rest."""
    trainings, problems = 5, 40
    draw = np.random.default_rng(3)
    values = (
        draw.normal(size=(trainings, 1))
        + 0.5 * draw.normal(size=problems)
        + 0.1 * draw.normal(size=(trainings, problems))
    )
    rows = {"units": np.tile(np.arange(problems), trainings), "trainings": np.repeat(np.arange(trainings), problems)}
    of_trainings = bootstrap_ratio(values.ravel(), **rows)
    of_problems = bootstrap_ratio(values.ravel(), units=rows["units"])
    assert of_trainings.value == pytest.approx(values.mean()) and of_problems.value == of_trainings.value
    spread = np.sqrt(values.mean(1).var() / trainings + values.mean(0).var() / problems)
    assert of_trainings.high - of_trainings.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    assert of_trainings.high - of_trainings.low > 3 * (of_problems.high - of_problems.low)
    assert bootstrap_ratio(values[0], trainings=["one"] * problems) == bootstrap_ratio(values[0])
