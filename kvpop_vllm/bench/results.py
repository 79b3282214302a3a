"""CSV files of the benchmark scripts: the newest measurement, as medians over its rounds."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

from kvpop_vllm.config import ConfigError

SETTING = ("mode", "configuration", "requests", "context", "budget")
"""Columns that identify a setting."""
VALUES = ("step_ms", "dense_over_it", "kv_bytes", "requests", "context", "budget")
"""Columns with numbers."""
MEASUREMENT = ("machine", "cores", "threads", "vllm", "date", "commit")
"""Columns that identify a measurement; only rows that agree in all of them are compared."""


def newest(path: Path, commit: str | None = None, machine: str | None = None) -> tuple[dict, list[dict]]:
    """Return the measurement of a file's last row, and one row for each of its settings.

    Args:
        path: file written by ``benchmarks/decode.py``; later rows are newer.
        commit: use only rows of this commit.
        machine: use only rows of machines with this text in their name.

    Returns:
        The :data:`MEASUREMENT` columns, and rows with the median over rounds of each of :data:`VALUES` beside the
        other columns of :data:`SETTING`, and with its least and largest as ``least NAME`` and ``largest NAME``.

    Raises:
        ConfigError: the file does not exist, is empty or has no such rows, a column is missing, or a value is
            not a number above 0.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): run the benchmark that writes it first") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows: run the benchmark that writes it first")
    if missing := sorted({*SETTING, *VALUES, *MEASUREMENT} - set(rows[0])):
        raise ConfigError(f"{path} has no column {missing[0]!r}: it was not written by this version's benchmarks")
    fitting = [
        row for row in rows if commit in (None, row["commit"]) and (machine or "").lower() in row["machine"].lower()
    ]
    if not fitting:
        asked = [f"commit {commit!r}"] * (commit is not None) + [f"machine {machine!r}"] * (machine is not None)
        raise ConfigError(f"{path} holds no rows of {' and '.join(asked)}: ask for others")
    of = {name: fitting[-1][name] for name in MEASUREMENT}
    groups: dict[tuple, list[dict]] = {}
    for line, row in enumerate(rows, start=2):
        if {name: row[name] for name in MEASUREMENT} == of:
            numbers = {name: _number(row[name], f"{path}, line {line}, {name}") for name in VALUES}
            groups.setdefault(tuple(row[name] for name in SETTING), []).append(numbers)
    found = []
    for asked, members in groups.items():
        row = dict(zip(SETTING, asked, strict=True))
        for name in VALUES:
            column = [member[name] for member in members]
            row |= {name: statistics.median(column), f"least {name}": min(column), f"largest {name}": max(column)}
        found.append(row)
    return of, found


def _number(text: str | None, where: str) -> float:
    try:
        value = float(text or "nothing")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: {text!r} is not a number above 0")
    return value
