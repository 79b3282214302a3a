"""Output of evaluations: a table on stdout, notes on stderr, and records in a file.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.statistics import INTERVAL
from kvpop_vllm.files import naming
from kvpop_vllm.kernels.dispatch import load_extension

DECIMALS = {"MiB": 1, "kl ratio": 3, "kl_message ratio": 3, "gap ratio": 3, "written": 0, "build s": 1, "first s": 2}
DECIMALS |= dict.fromkeys(("exact", "partial", "of dense", "difference", "right", "before_error", "answered"), 3)
"""Decimals of a column's floats, if not four."""


def note(line: str) -> None:
    """Print a line about the evaluation to stderr. Stdout holds the table alone."""
    print(line, file=sys.stderr)


def note_kernels() -> None:
    """Print a line if the C++ kernels of the CPU are missing, where some policies run also next to a GPU."""
    try:
        load_extension()
    except ImportError:
        note(
            "policies on the CPU have no C++ kernels and are about ten times slower: install with g++ by pip install --no-build-isolation"
        )


def read_records(path: str) -> tuple[dict, list[dict]]:
    """Return what a file of records says of the whole run (empty if nothing), and its records."""
    with open(path, encoding="utf-8") as file:
        lines = list(map(json.loads, file))
    about = lines.pop(0)["run"] if lines and "run" in lines[0] else {}
    return about, lines


@contextmanager
def records_file(path: str) -> Iterator:
    """Open a file that replaces ``path`` once everything is written.

    Until then, or if an error occurs, ``path`` keeps its content and the records are in ``path.draft``.
    Devices and pipes are written to directly.
    """
    if os.path.isdir(path):
        raise ConfigError(f"--out {path} is a folder: name a file")
    # os.replace() would put a file in the place of a device or a pipe
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    # a link stays, and the file that it names is replaced
    path = os.path.realpath(path)
    draft = f"{path}.draft"
    try:
        with naming(Path(draft)), open(draft, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        # an empty draft says nothing
        if os.path.exists(draft) and os.path.getsize(draft) == 0:
            os.remove(draft)
        raise
    os.replace(draft, path)


def cells(table: list[dict], columns: tuple[str, ...]) -> list[list[str]]:
    """Return the heading and a row of text for each line, without the columns that no line has a value of.

    A value with an interval is followed by the interval's ends in parentheses. A missing value is an empty cell.
    """
    columns = [name for name in columns if any(line.get(name) is not None for line in table)]
    return [columns, *([_cell(line, name) for name in columns] for line in table)]


def _cell(line: dict, name: str) -> str:
    value, interval = line.get(name), line.get(name + INTERVAL)
    if not isinstance(value, float):
        return "" if value is None else str(value)
    value, *ends = (f"{x:.{DECIMALS.get(name, 4)}f}" for x in (value, *(interval or ())))
    return f"{value} ({' to '.join(ends)})" if ends else value


def format_table(table: list[dict], columns: tuple[str, ...]) -> str:
    """Return the table as text with right-aligned columns."""
    rows = cells(table, columns)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def markdown_table(table: list[dict], columns: tuple[str, ...]) -> str:
    """Return the table in Markdown."""
    heading, *rows = cells(table, columns)
    lines = ["| " + " | ".join(row) + " |" for row in (heading, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heading), *lines[1:]]) + "\n"
