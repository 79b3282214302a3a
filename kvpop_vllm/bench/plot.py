"""``kvpop bench plot``: one figure and one table of recorded results.

The figure has two panels: the newest measurement of ``benchmarks/decode.py``, and the answers that
``examples/reasoner/compare.py`` has recorded. The table lists all settings of the former.
"""

import csv
import math
import statistics
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import write_figure, write_whole

TABLE = "table.md"
FIGURE = "figure.png"
DECODE = "decode.csv"
ANSWERS = "reasoning/answers.csv"
SETTING = ("mode", "configuration", "requests", "context", "budget")
"""Columns that identify a setting."""
VALUES = ("step_ms", "dense_over_it", "kv_bytes", "requests", "context", "budget")
"""Columns with numbers."""
MEASUREMENT = ("machine", "cores", "threads", "vllm", "date", "commit")
"""Columns that identify a measurement; only rows that agree in all of them are compared."""
SHARES = ("exact", "low", "high")
"""Columns of the share of exact answers and of its interval."""
CURVES = {
    "dense": ("#000000", ":", ""),
    "kvpop": ("#0072B2", "-", "o"),
    "kvpop, model trained too": ("#56B4E9", "--", "s"),
    "h2o": ("#009E73", "-.", "^"),
    "triattention": ("#CC79A7", "--", "D"),
    "streaming-llm": ("#D55E00", "-", "v"),
}
"""Colour, line style and marker of each curve. Colours are of the palette of Okabe and Ito."""
NAMES = {"kvpop": "kvpop, model trained too", "kvpop-frozen-base": "kvpop"}
"""Curves of policies of the comparison; the others have their own names. Decoding was measured with a frozen model."""


def bench_plot(options) -> None:
    """Run ``kvpop bench plot``: write the figure and the table, and print where.

    Raises:
        ConfigError: there are no measurements or answers, or matplotlib is not installed.
    """
    try:
        # not pyplot, which chooses a display and keeps figures
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("kvpop bench plot needs matplotlib: pip install 'kvpop_vllm[distill]'") from None
    results = Path(options.results)
    path, out = results / DECODE, Path(options.out or options.results)
    measurement, rows = newest(path, options.commit, options.machine)
    # stock vLLM in its default, compiled mode alone
    rows = [row for row in rows if row["mode"] == "compiled" or row["configuration"] != "dense"]
    if not any(row["configuration"] == "dense" for row in rows):
        selected = f"measurement of commit {measurement['commit']}"
        chosen = selected if options.commit or options.machine else "newest measurement"
        raise ConfigError(f"{path}: the {chosen} has no compiled run of stock vLLM: run `make bench`")
    answers = read_answers(results / ANSWERS)
    source = "{machine}, {threads} thread(s), vLLM {vllm}, {date}, commit {commit}".format(**measurement)
    out.mkdir(parents=True, exist_ok=True)
    drawing = Figure(figsize=(8, 3.9), layout="constrained", facecolor="white")
    draw(drawing, rows, answers)
    write_figure(out / FIGURE, drawing)
    write_whole(out / TABLE, f"{table(rows)}\n{source}\n")
    print(f"{out / TABLE} and {out / FIGURE} show {len(rows)} settings of {source}")


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


def draw(drawing, rows: list[dict], answers: dict[str, dict[float, tuple[float, ...]]]) -> None:
    """Draw step time against context, and exact answers against compression.

    The first is drawn at the most requests measured and the smallest budget, compiled runs alone. Points are medians
    over rounds, or means over problems; bars extend over all rounds, or over the interval. Only :data:`CURVES` are
    drawn.

    Args:
        drawing: figure of matplotlib.
        rows: rows of :func:`newest`.
        answers: curves of :func:`read_answers`.
    """
    left, right = drawing.subplots(1, 2)
    requests, budget = max(row["requests"] for row in rows), min(row["budget"] for row in rows)
    steps: dict[str, dict[float, tuple[float, ...]]] = {}
    for row in rows:
        if (row["mode"], row["requests"], row["budget"]) == ("compiled", requests, budget):
            reach = row["step_ms"], row["least step_ms"], row["largest step_ms"]
            # a configuration may name its scorer after a comma, as in "kvpop, smollm2-135m-kvpop"
            steps.setdefault(row["configuration"].partition(",")[0], {})[row["context"]] = reach
    for axis, curves in ((left, steps), (right, answers)):
        for name in (name for name in CURVES if name in curves):
            color, style, marker = CURVES[name]
            # dense has one point, at compression 1, which is drawn as a line across
            if axis is right and name == "dense":
                axis.axhline(curves[name][1][0], color=color, linestyle=style, linewidth=2)
                continue
            x = sorted(curves[name])
            y, low, high = zip(*(curves[name][point] for point in x), strict=True)
            axis.plot(x, y, color=color, linestyle=style, marker=marker, linewidth=2, label=name)
            axis.vlines(x, low, high, color=color, alpha=0.5, linewidth=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=12)
    # from 0, since a cut axis would enlarge differences
    left.set_ylim(bottom=0)
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.set_title(f"Cost stays flat\n{requests:.0f} requests, B = {budget:,.0f}", fontsize=13)
    left.set_xlabel("context, tokens", fontsize=13)
    left.set_ylabel("decode step, ms", fontsize=13)
    right.set_ylim(-0.03, 1.03)
    right.set_title("Long answers\nshare of problems solved", fontsize=13)
    right.set_xlabel("tokens of a solution over the budget", fontsize=13)
    right.set_xticks(sorted({c for name in CURVES for c in answers.get(name, ())} - {1}))
    # by label, so that a curve of both panels has one entry
    entries = {line.get_label(): line for axis in (left, right) for line in axis.get_lines()}
    labels = [name for name in CURVES if name in entries]
    drawing.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=3, fontsize=12)


def read_answers(path: Path) -> dict[str, dict[float, tuple[float, ...]]]:
    """Return the exact answers of each curve at equal k, and of the dense model, by compression.

    Of several rows with a name, as with equal shares and those that were found, the one with the most answers counts.

    Args:
        path: file written by ``examples/reasoner/compare.py``.

    Returns:
        The :data:`SHARES` of each compression, by the curve's name; the dense model's compression is 1.

    Raises:
        ConfigError: the file cannot be read, has no such rows, or a value is not a share.
    """
    advice = "write it with examples/reasoner/compare.py"
    curves: dict[str, dict[float, tuple[float, ...]]] = {}
    rows = _rows(path, {"policy", "equal", "compression", *SHARES}, advice)
    for line, row in rows:
        if row["equal"] == "k" or row["policy"] == "dense":
            place = f"{path}, line {line}"
            shares = tuple(_number(row[name], f"{place}, {name}", minimum=0) for name in SHARES)
            policy = row["policy"].partition(", ")[0]
            curve = curves.setdefault(NAMES.get(policy, policy), {})
            compression = _number(row["compression"], f"{place}, compression")
            curve[compression] = max(shares, curve.get(compression, shares))
    if 1 not in curves.get("dense", ()):
        raise ConfigError(f"{path} holds no answers of the dense model: {advice}")
    return curves


def _name(row: dict) -> str:
    return row["configuration"] if row["mode"] == "compiled" else f"{row['configuration']} ({row['mode']})"


def newest(path: Path, commit: str | None = None, machine: str | None = None) -> tuple[dict, list[dict]]:
    """Return the measurement of a file's last row, and one row for each of its settings.

    Args:
        path: file written by ``benchmarks/decode.py``; later rows are newer.
        commit: use only rows of this commit.
        machine: use only rows of machines with this text in their name.

    Returns:
        The :data:`MEASUREMENT` columns, and rows. A row has the columns of :data:`SETTING` and, for each of
        :data:`VALUES`, the median over rounds; its least and largest value are ``least NAME`` and ``largest NAME``.

    Raises:
        ConfigError: the file does not exist, is empty or has no such rows, a column is missing, or a value is
            not a number above 0.
    """
    advice = "run the benchmark that writes it"
    rows = [row for _, row in _rows(path, {*SETTING, *VALUES, *MEASUREMENT}, advice)]
    fitting = [
        row for row in rows if commit in (None, row["commit"]) and (machine or "").lower() in row["machine"].lower()
    ]
    if not fitting:
        filters = [f"commit {commit!r}"] * (commit is not None) + [f"machine {machine!r}"] * (machine is not None)
        raise ConfigError(f"{path} holds no rows of {' and '.join(filters)}: ask for others")
    measurement = {name: fitting[-1][name] for name in MEASUREMENT}
    groups: dict[tuple, list[dict]] = {}
    # line 1 is the header
    for line, row in enumerate(rows, start=2):
        if {name: row[name] for name in MEASUREMENT} == measurement:
            numbers = {name: _number(row[name], f"{path}, line {line}, {name}") for name in VALUES}
            groups.setdefault(tuple(row[name] for name in SETTING), []).append(numbers)
    summaries = []
    for setting, members in groups.items():
        row = dict(zip(SETTING, setting, strict=True))
        for name in VALUES:
            column = [member[name] for member in members]
            row |= {name: statistics.median(column), f"least {name}": min(column), f"largest {name}": max(column)}
        summaries.append(row)
    return measurement, summaries


def _rows(path: Path, columns: set[str], advice: str) -> list[tuple[int, dict]]:
    """Return the rows of a CSV file, each with its line.

    Raises:
        ConfigError: the file cannot be read, is empty, or lacks a column; the message ends with ``advice``.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {advice}") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows: {advice}")
    if missing := sorted(columns - set(rows[0])):
        raise ConfigError(f"{path} has no column {missing[0]!r}, so another version wrote it: {advice}")
    return list(enumerate(rows, start=2))


def _number(text: str | None, place: str, minimum: float | None = None) -> float:
    """Return a number above 0, or at least ``minimum`` where that is given."""
    try:
        # an empty cell is None or "", and "nothing" is refused as any other word is
        value = float(text or "nothing")
    except ValueError:
        value = math.nan
    # NaN fails every comparison
    if not (0 < value < math.inf if minimum is None else minimum <= value < math.inf):
        bound = "above 0" if minimum is None else f"of at least {minimum}"
        raise ConfigError(f"{place}: {text!r} is not a number {bound}")
    return value
