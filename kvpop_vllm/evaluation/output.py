"""Output of evaluations: a table on the screen, and records in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvpop_vllm.config import ConfigError


@contextmanager
def records_file(path: str) -> Iterator:
    """Open a file that replaces ``path`` once everything is written.

    Until then, or if an error occurs, ``path`` keeps its content and the records are in ``path.draft``.
    Devices and pipes are written to directly.

    Raises:
        ConfigError: ``path`` is a folder.
    """
    if os.path.isdir(path):
        raise ConfigError(f"--out {path} is a folder: name a file")
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    path = os.path.realpath(path)
    draft = f"{path}.draft"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        if os.path.exists(draft) and os.path.getsize(draft) == 0:
            os.remove(draft)
        raise
    os.replace(draft, path)


def cells(table: list[dict], columns: tuple[str, ...]) -> list[list[str]]:
    """Return the heading and a row of text for each line.

    Floats have four decimals; a missing value is an empty cell.
    """
    rows = [list(columns)]
    for line in table:
        values = (line.get(name) for name in columns)
        rows.append(["" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in values])
    return rows


def format_table(table: list[dict], columns: tuple[str, ...]) -> str:
    """Return the table as text with right-aligned columns."""
    rows = cells(table, columns)
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def markdown_table(table: list[dict], columns: tuple[str, ...]) -> str:
    """Return the table in Markdown."""
    heading, *rows = ("| " + " | ".join(row) + " |" for row in cells(table, columns))
    return "\n".join([heading, "|" + "---|" * len(columns), *rows]) + "\n"
