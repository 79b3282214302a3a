"""CSV files of results; each row has the machine, the date and the commit of the measurement."""

import argparse
import csv
import datetime
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser that shows the first line of a script's docstring, and defaults."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    return argparse.ArgumentParser(
        description=description.splitlines()[0], formatter_class=formatter, allow_abbrev=False
    )


def append(path: Path, rows: list[dict]) -> None:
    """Append rows of the same columns to a file, which is created with a heading if it does not exist.

    Raises:
        ValueError: the file has other columns; the rows are then in another file of this folder.
    """
    keyed = [KEY | row for row in rows]
    names = list(keyed[0])
    path.parent.mkdir(exist_ok=True)
    new = not path.exists() or not path.stat().st_size
    if not new:
        with path.open(newline="") as file:
            columns = next(csv.reader(file))
        if set(columns) != set(names):
            other_file = path.with_name(f"{path.stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}{path.suffix}")
            append(other_file, rows)
            raise ValueError(
                f"{path} has the columns {', '.join(columns)}, not {', '.join(names)}: move it away; these rows are in {other_file}"
            )
        names = columns
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(keyed)


def cpu_model() -> str:
    """Return the CPU's name with family and model, which distinguish models of the same name."""
    about = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split("\t", 1) for line in about.splitlines() if "\t" in line)
    name, family, model = (fields.get(key, "").strip("\t: ") for key in ("model name", "cpu family", "model"))
    return f"{name} family {family} model {model}" if name else platform.machine()


def commit() -> str:
    """Return the short hash of the commit.

    It ends with a + if tracked files other than results differ from the commit, and is "none" outside a
    repository or without git.
    """

    def git(*arguments):
        try:
            return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if changed else "")


KEY = {
    "machine": cpu_model(),
    "cores": len(os.sched_getaffinity(0)),
    "date": datetime.date.today().isoformat(),
    "commit": commit(),
}
"""Columns that identify a measurement, taken when a program starts."""
