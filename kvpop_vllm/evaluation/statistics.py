"""Bootstrap intervals over documents or problems (Efron and Tibshirani 1993, chapter 13: percentiles).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpop_vllm.config import ConfigError

LEAST = 8
"""Minimum number of units (documents, problems). Fewer say too little about what others would be like."""
DRAWS = 10_000
INTERVAL = " interval"
"""Suffix of the field that holds the interval of a table's value."""


class Interval(NamedTuple):
    """Estimate with its 95% interval."""

    value: float
    low: float
    high: float


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float] | None = None,
    *,
    units: Sequence | None = None,
    trainings: Sequence | None = None,
    seed: int = 0,
) -> Interval:
    """Return ``sum(numerators) / sum(denominators)`` with its interval.

    A mean is the ratio to ones, and a paired difference the mean of differences. With denominators above 0 the
    interval of a ratio is clear of 1 if and only if that of the difference is clear of 0, since both are of the
    same draws. A draw whose denominators sum to 0 or less says nothing, and counts as lower than the low end and
    as higher than the high end: with many of them an end is infinite.

    Args:
        numerators: one value per row, for example summed nats.
        denominators: as many values, for example numbers of tokens, None for ones.
        units: document or problem of each row. Rows of one unit are drawn together. None if every row is one.
        trainings: training of each row, None if all are of one. Trainings are drawn as well, apart from units. A row's
            weight is the draws of its unit times those of its training. Few trainings give ends that are too near: of
            three, intervals of 95% hold the mean in 70% to 85%.
        seed: seed of the draws.
    """
    if denominators is None:
        denominators = np.ones(len(numerators))
    _, unit = np.unique(np.arange(len(numerators)) if units is None else np.asarray(units), return_inverse=True)
    _, training = np.unique(np.zeros(len(unit)) if trainings is None else np.asarray(trainings), return_inverse=True)
    count = unit.max(initial=-1) + 1
    # rows of one unit and training are added first, so that they are drawn together
    sums = np.zeros((training.max(initial=-1) + 1, count, 2))
    np.add.at(sums, (training, unit), np.stack([numerators, denominators], 1).astype(float))
    if count < LEAST:
        raise ConfigError(f"an interval needs at least {LEAST} documents or problems, got {count}: raise --rows")
    # resampling with replacement is drawing how often each occurs
    generator = np.random.default_rng(seed)
    of_units, of_trainings = (generator.multinomial(n, np.full(n, 1 / n), DRAWS) for n in (count, len(sums)))
    above, below = np.einsum("du,dt,tux->xd", of_units, of_trainings, sums, optimize=True)
    says = below > 0
    # a draw without any denominator says nothing and widens both ends
    ratios = above / np.where(says, below, 1)
    # of two neighbouring draws an end is the outer one
    low = np.quantile(np.where(says, ratios, -np.inf), 0.025, method="lower")
    high = np.quantile(np.where(says, ratios, np.inf), 0.975, method="higher")
    return Interval(float(sum(numerators) / sum(denominators)), float(low), float(high))


def estimate(
    name: str,
    numerators: Sequence[float],
    denominators: Sequence[float] | None = None,
    *,
    units: Sequence,
    trainings: Sequence | None = None,
    shares: bool = False,
) -> dict:
    """Return fields of a table's line: the ratio of sums as ``name`` and, from :data:`LEAST` units on, its interval.

    Nothing is returned where the denominators sum to 0 or less. See :func:`bootstrap_ratio`. If ``shares``, the values
    lie between 0 and 1. Near these ends draws of n units say too little. The interval then ends at
    ``1 - 0.025**(1/n)`` at least, where n zeros have a probability of at most 0.025 (Clopper and Pearson 1934), and
    begins at ``0.025**(1/n)`` at most.
    """
    denominators = [1.0] * len(numerators) if denominators is None else denominators
    if sum(denominators) <= 0:
        return {}
    if len(set(units)) < LEAST:
        return {name: sum(numerators) / sum(denominators)}
    value, low, high = bootstrap_ratio(numerators, denominators, units=units, trainings=trainings)
    if shares:
        # exact bounds of n units that all agree, of which every resample is the same
        all_of_n = 0.025 ** (1 / len(set(units)))
        low, high = min(low, all_of_n), max(high, 1 - all_of_n)
    return {name: value, name + INTERVAL: (low, high)}
