"""``kvpop bench plot``: figure and table of the newest measurement of ``benchmarks/decode.py``."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import write_figure, write_whole

TABLE = "table.md"
FIGURE = "figure.png"
SETTING = ("mode", "configuration", "requests", "context", "budget")
"""Columns that identify a setting."""
VALUES = ("step_ms", "dense_over_it", "kv_bytes", "requests", "context", "budget")
"""Columns with numbers."""
MEASUREMENT = ("machine", "cores", "threads", "vllm", "date", "commit")
"""Columns that identify a measurement; only rows that agree in all of them are compared."""


def bench_plot(options) -> None:
    """Run ``kvpop bench plot``: write the figure and the table, and print where.

    Raises:
        ConfigError: there are no measurements, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("kvpop bench plot needs matplotlib: pip install 'kvpop_vllm[distill]'") from None
    path, out = Path(options.results) / "decode.csv", Path(options.out or options.results)
    of, rows = newest(path, options.commit, options.machine)
    rows = [row for row in rows if row["mode"] == "compiled" or row["configuration"] != "dense"]
    if not any(row["configuration"] == "dense" for row in rows):
        which = (
            "newest measurement" if not (options.commit or options.machine) else f"measurement of commit {of['commit']}"
        )
        raise ConfigError(f"{path}: the {which} has no compiled run of stock vLLM: run `make bench`")
    where = f"{of['machine']}, {of['threads']} thread(s), vLLM {of['vllm']}, {of['date']}, commit {of['commit']}"
    out.mkdir(parents=True, exist_ok=True)
    drawing = Figure(figsize=(10, 3.8), layout="constrained")
    draw(drawing, rows, where)
    write_figure(out / FIGURE, drawing)
    write_whole(out / TABLE, f"{table(rows)}\n{where}\n")
    print(f"{out / TABLE} and {out / FIGURE} show {len(rows)} settings of {where}")


def table(rows: list[dict]) -> str:
    """Return a Markdown table with one row per setting.

    Columns include milliseconds per step, the speed-up over stock in the same run, and the bytes of the
    cache.
    """
    lines = [
        "| requests x context | B | cache | ms per step | dense / it (least to largest) | KV MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: (-r["requests"], -r["context"], r["budget"], -r["step_ms"])):
        ratio = f"{row['dense_over_it']:.2f}"
        if row["least dense_over_it"] != row["largest dense_over_it"]:
            ratio += f" ({row['least dense_over_it']:.2f} to {row['largest dense_over_it']:.2f})"
        lines.append(
            f"| {row['requests']:.0f} x {row['context']:,.0f} | {row['budget']:,.0f} | {_name(row)} | {row['step_ms']:.1f} "
            f"| {ratio} | {row['kv_bytes'] / 2**20:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def draw(drawing, rows: list[dict], title: str) -> None:
    """Draw step time against context, and throughput against number of requests.

    The first is drawn at the most requests measured, the second at the longest context. Points are medians,
    bars extend from the least to the largest value of the rounds.
    """
    left, right = drawing.subplots(1, 2)
    most, longest = max(r["requests"] for r in rows), max(r["context"] for r in rows)
    for axis, along, fixed, at in ((left, "context", "requests", most), (right, "requests", "context", longest)):
        curves: dict[str, dict[float, list[tuple[float, ...]]]] = {}
        for row in (r for r in rows if r[fixed] == at):
            values = [row[name] for name in ("step_ms", "least step_ms", "largest step_ms")]
            if axis is right:
                values = [1e3 * row["requests"] / ms for ms in values]
            curves.setdefault(_label(row), {}).setdefault(row[along], []).append((values[0], min(values), max(values)))
        for name, points in curves.items():
            x = sorted(points)
            (line,) = axis.plot(x, [statistics.median(v[0] for v in points[p]) for p in x], marker="o", label=name)
            least, largest = ([of(v[i] for v in points[p]) for p in x] for i, of in ((1, min), (2, max)))
            axis.vlines(x, least, largest, color=line.get_color(), alpha=0.5)
        axis.legend(fontsize=8)
        axis.set_ylim(bottom=0)
    left.set(title=f"{most:.0f} requests", xlabel="context, tokens", ylabel="ms per decode step")
    right.set(title=f"context {longest:,.0f}", xlabel="requests decoded together", ylabel="tokens per second")
    drawing.suptitle(title, fontsize=8)


def _name(row: dict) -> str:
    return row["configuration"] if row["mode"] == "compiled" else f"{row['configuration']} ({row['mode']})"


def _label(row: dict) -> str:
    """Return the legend entry of a row. Runs of stock beside several budgets share one."""
    return "stock vLLM, dense" if row["configuration"] == "dense" else f"{_name(row)}, B = {row['budget']:,.0f}"


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
