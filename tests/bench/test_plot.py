"""`kvpop bench plot`: the newest measurement of each setting, and nothing else, in the table and the figure."""

from __future__ import annotations

import csv

import pytest

from kvpop_vllm.bench.results import newest
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError

COLUMNS = "machine cores threads date commit vllm mode requests context budget configuration round step_ms dense_over_it kv_bytes"
NAMES = COLUMNS.split()


def row(configuration, step_ms, ratio, **changes):
    base = dict(machine="m", cores=2, threads=1, date="2026-01-01", commit="a", vllm="0", mode="compiled", requests=8, context=7500)  # fmt: skip
    base |= dict(
        budget=1024, configuration=configuration, round=1, step_ms=step_ms, dense_over_it=ratio, kv_bytes=2**21
    )
    return base | changes


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(rows)


ROWS = [
    row("dense", 900, 1, commit="old"),
    row("kvpop", 800, 1.1, commit="old"),
    *(row("dense", ms, 1, round=i) for i, ms in enumerate((200, 260, 210))),
    *(row("kvpop", ms, ratio, round=i) for i, (ms, ratio) in enumerate(((50, 4.0), (40, 6.5), (42, 5.0)))),
    row("kvpop", 60, 3.5, budget=2048),
    row("dense", 212, 1, budget=2048, commit="b"),
    row("kvpop", 7, 9.9, mode="eager"),
    row("dense", 30, 1, context=1000, requests=2),
    row("kvpop", 35, 0.86, context=1000, requests=2),
]


def test_the_table_and_the_figure(tmp_path, capsys):
    write(tmp_path / "decode.csv", ROWS)
    assert main(["bench", "plot", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/table.md").read_text().splitlines()[2:] == [
        "| 8 x 7,500 | - | dense | 212.0 | 1.00 | 2 |",
        "| 8 x 7,500 | 1,024 | kvpop | 42.0 | 5.00 | 2 |",
        "| 8 x 7,500 | 2,048 | kvpop | 60.0 | 3.50 | 2 |",
        "| 2 x 1,000 | - | dense | 30.0 | 1.00 | 2 |",
        "| 2 x 1,000 | 1,024 | kvpop | 35.0 | 0.86 | 2 |",
    ]
    assert (tmp_path / "out/figure.png").stat().st_size > 5000
    assert "5 settings" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    path = tmp_path / "decode.csv"

    def refusal():
        assert main(["bench", "plot", "--results", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"kvpop: {path}") and error.count("\n") == 1
        return error

    assert "run the benchmark" in refusal()
    write(path, [])
    assert "no rows" in refusal()
    write(path, [row("dense", "fast", 1)])
    assert "'fast'" in refusal()
    write(path, [row("dense", 200, 1, mode="eager")])
    assert "no compiled runs" in refusal()
    path.write_text("machine,configuration\nm,dense\n")
    with pytest.raises(ConfigError, match="no column"):
        newest(path, ("configuration",), ("step_ms",))
