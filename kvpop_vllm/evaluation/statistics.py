"""Bootstrap intervals over documents or problems (Efron and Tibshirani 1993, chapter 13: percentiles)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpop_vllm.config import ConfigError

LEAST = 8
"""Minimum number of units (documents, problems); fewer say too little about what others would be like."""
DRAWS = 10_000


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
    seed: int = 0,
) -> Interval:
    """Return ``sum(numerators) / sum(denominators)`` with its interval.

    A mean is the ratio to ones, and a paired difference the mean of differences.

    Args:
        numerators: one value per row, for example summed nats.
        denominators: as many values, for example numbers of tokens; None for ones.
        units: document or problem of each row; rows of one unit are drawn together. None if every row is one.
        seed: seed of the draws.

    Raises:
        ConfigError: there are fewer than :data:`LEAST` units.
    """
    pairs = np.stack([numerators, np.ones(len(numerators)) if denominators is None else denominators], 1).astype(float)
    _, unit = np.unique(np.arange(len(pairs)) if units is None else np.asarray(units), return_inverse=True)
    sums = np.zeros((unit.max(initial=-1) + 1, 2))
    np.add.at(sums, unit, pairs)
    if len(sums) < LEAST:
        raise ConfigError(f"an interval needs at least {LEAST} documents or problems, got {len(sums)}: raise --rows")
    counts = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), DRAWS)
    drawn = counts @ sums
    ratios = drawn[:, 0] / drawn[:, 1]
    return Interval(float(pairs[:, 0].sum() / pairs[:, 1].sum()), *map(float, np.quantile(ratios, (0.025, 0.975))))
