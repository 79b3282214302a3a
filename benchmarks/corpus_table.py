"""Prints one table of the records of several runs of ``kvpop eval --task corpus``, with intervals over all documents.

Usage: ``python benchmarks/corpus_table.py RECORDS.jsonl... [--against METHOD]``. A document that some method did not finish
is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation import corpus
from kvpop_vllm.evaluation.output import format_table


def table_of(paths: Sequence[str], against: str) -> list[dict]:
    """Return the table of all documents of some files.

    Raises:
        ConfigError: no record is of the method ``against``.
    """
    found = []
    for number, path in enumerate(paths):
        with open(path, encoding="utf-8") as file:
            rows = [row for row in map(json.loads, file) if "method" in row]
        found += [row | {name: f"{number}.{row[name]}" for name in ("document", "unit")} for row in rows]
    methods = sorted({row["method"] for row in found})
    if against not in methods:
        raise ConfigError(f"no record of {against!r}: choose --against from {', '.join(methods)}")
    finished = [{row["document"] for row in found if row["method"] == method and "kl" in row} for method in methods]
    whole = set.intersection(*finished)
    return corpus.summarise([row for row in found if row["document"] in whole], against)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+")
    parser.add_argument("--against", default="truncation", help="method that ratios are over (default truncation)")
    options = parser.parse_args()
    try:
        print(format_table(table_of(options.records, options.against), corpus.COLUMNS))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
