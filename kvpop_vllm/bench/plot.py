"""`kvpop bench plot`: one figure and one table of what the benchmark scripts measured."""

from __future__ import annotations

from pathlib import Path

from kvpop_vllm.bench.results import newest
from kvpop_vllm.config import ConfigError

TABLE = "table.md"
FIGURE = "figure.png"
SETTING = ("mode", "requests", "context", "budget", "configuration")


def bench_plot(options) -> None:
    """Runs `kvpop bench plot`: writes both files, and says where."""
    folder, out = Path(options.results), Path(options.out or options.results)
    rows = newest(folder / "decode.csv", SETTING, ("step_ms", "dense_over_it"))
    decode = [row for row in rows if row["mode"] == "compiled"]
    if not decode:
        raise ConfigError(f"{folder / 'decode.csv'} holds no compiled runs: run `make bench`")
    out.mkdir(parents=True, exist_ok=True)
    (out / TABLE).write_text(table(decode))
    figure(decode, out / FIGURE)
    print(f"{out / TABLE} and {out / FIGURE} show {len(decode)} settings")


def table(decode: list[dict]) -> str:
    """Markdown: milliseconds a step and how many times faster than stock, by setting."""
    lines = [
        "| requests x context | B | cache | ms per step | dense / it | KV MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(
        decode, key=lambda r: (-int(r["requests"]), -int(r["context"]), int(r["budget"] or 0), -r["step_ms"])
    ):
        where, budget = (
            f"{row['requests']} x {int(row['context']):,}",
            f"{int(row['budget']):,}" if row["budget"] else "-",
        )
        held = int(row["kv_bytes"]) / 2**20
        lines.append(
            f"| {where} | {budget} | {row['configuration']} | {row['step_ms']:.1f} | {row['dense_over_it']:.2f} | {held:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def figure(decode: list[dict], path: Path) -> None:
    """Step time against context at the most requests measured, and throughput against requests at the longest context.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("kvpop bench plot needs matplotlib: pip install 'kvpop_vllm[distill]'") from None
    drawing = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    most, longest = max(int(r["requests"]) for r in decode), max(int(r["context"]) for r in decode)
    for axis, along, fixed, at, value in (
        (left, "context", "requests", most, lambda r: r["step_ms"]),
        (right, "requests", "context", longest, lambda r: 1e3 * int(r["requests"]) / r["step_ms"]),
    ):
        for name in dict.fromkeys(_label(r) for r in decode):
            mine = sorted((int(r[along]), value(r)) for r in decode if _label(r) == name and int(r[fixed]) == at)
            if mine:
                axis.plot(*zip(*mine, strict=True), marker="o", label=name)
        axis.set(xlabel={"context": "context, tokens", "requests": "requests decoded together"}[along], ylim=(0, None))
        axis.legend(fontsize=8)
    left.set(title=f"{most} requests", ylabel="ms per decode step")
    right.set(title=f"context {longest:,}", ylabel="tokens per second")
    drawing.savefig(path, dpi=120)


def _label(row: dict) -> str:
    name = "stock vLLM, dense" if row["configuration"] == "dense" else row["configuration"]
    return f"{name}, B = {int(row['budget']):,}" if row["budget"] else name
