"""CSV files that the benchmark scripts write: the newest measurement of each setting, medians over its rounds."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from kvpop_vllm.config import ConfigError

MEASUREMENT = ("machine", "cores", "threads", "date", "commit", "vllm")
"""Columns that tell measurements of one setting apart."""
UNBOUNDED = ("dense", "transformers")
"""Configurations on which the budget of a run has no influence."""


def newest(path: Path, setting: tuple[str, ...], values: tuple[str, ...]) -> list[dict]:
    """One row per setting, of its newest measurement, each of ``values`` a median over that one's rounds.

    Args:
        path: written by a script in ``benchmarks/``; later rows are newer. setting: columns that say what was asked.
        values: number columns. All must be there, ``configuration`` and ``budget`` in any case.

    Returns:
        The columns of the measurement's last row, ``values`` as floats, and ``rounds``, how many rows there were. The
        budget of :data:`UNBOUNDED` configurations is empty.

    Raises:
        ConfigError: there is no such file, it is empty, or a column is missing or holds no numbers.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): run the benchmark that writes it first") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows: run the benchmark that writes it first")
    if missing := sorted({*setting, *values, *MEASUREMENT, "configuration", "budget"} - set(rows[0])):
        raise ConfigError(f"{path} has no column {missing[0]!r}: it was not written by this version's benchmarks")
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["configuration"] in UNBOUNDED:
            row["budget"] = ""
        groups.setdefault(tuple(row[name] for name in setting), []).append(row)
    return [_medians(path, members, values) for members in groups.values()]


def _medians(path: Path, members: list[dict], values: tuple[str, ...]) -> dict:
    last = [members[-1][name] for name in MEASUREMENT]
    mine = [row for row in members if [row[name] for name in MEASUREMENT] == last]
    try:
        medians = {name: statistics.median(float(row[name]) for row in mine) for name in values}
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return mine[-1] | medians | {"rounds": len(mine)}
