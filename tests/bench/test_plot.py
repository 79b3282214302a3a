"""`kvpop bench plot` puts the newest measurement, and no other, into the table and the figure."""

from __future__ import annotations

import csv

import pytest

from kvpop_vllm.cli import main

NAMES = "machine cores threads date commit vllm mode requests context budget configuration round step_ms dense_over_it kv_bytes".split()


def row(configuration, step_ms, ratio, **changes):
    first = ("m", 2, 1, "2026-01-01", "a", "0", "compiled", 8, 7500, 1024, configuration, 1, step_ms, ratio, 2**21)
    return dict(zip(NAMES, first, strict=True)) | changes


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(rows)


ROWS = [
    row("dense", 900, 1, commit="old"),
    row("kvpop", 800, 1.1, commit="old"),
    row("kvpop", 7, 9.9, machine="another", context=9000),
    *(row("dense", ms, 1, round=i) for i, ms in enumerate((200, 260, 210))),
    *(row("kvpop", ms, ratio, round=i) for i, (ms, ratio) in enumerate(((50, 4.0), (40, 6.5), (42, 5.0)))),
    row("kvpress", 300, 0.7, mode="eager"),
    row("dense", 400, 1, mode="eager"),
    row("dense", 30, 1, context=1000, requests=2),
    row("kvpop", 35, 0.86, context=1000, requests=2, budget=2048),
]


def test_the_table_and_the_figure(tmp_path, capsys):
    write(tmp_path / "decode.csv", ROWS)
    assert main(["bench", "plot", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/table.md").read_text().splitlines()[2:] == [
        "| 8 x 7,500 | 1,024 | kvpress (eager) | 300.0 | 0.70 | 2 |",
        "| 8 x 7,500 | 1,024 | dense | 210.0 | 1.00 | 2 |",
        "| 8 x 7,500 | 1,024 | kvpop | 42.0 | 5.00 (4.00 to 6.50) | 2 |",
        "| 2 x 1,000 | 1,024 | dense | 30.0 | 1.00 | 2 |",
        "| 2 x 1,000 | 2,048 | kvpop | 35.0 | 0.86 | 2 |",
        "",
        "m, 1 thread(s), vLLM 0, 2026-01-01, commit a",
    ]
    assert (tmp_path / "out/figure.png").stat().st_size > 5000
    assert "5 settings of m, 1 thread(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, last",
    [
        ((), "Intel X, 1 thread(s), vLLM 0, 2026-01-01, commit b"),
        (("--machine", "intel"), "Intel X, 1 thread(s), vLLM 0, 2026-01-01, commit b"),
        (("--commit", "old"), "m, 1 thread(s), vLLM 0, 2026-01-01, commit old"),
        (("--commit", "old", "--machine", "intel"), "holds no rows of commit 'old' and machine 'intel'"),
    ],
)
def test_another_measurement_than_the_newest(tmp_path, capsys, options, last):
    write(tmp_path / "decode.csv", [*ROWS, row("dense", 90, 1, machine="Intel X", commit="b", context=2000)])
    status = main(["bench", "plot", "--results", str(tmp_path), *options])
    assert last in (capsys.readouterr().err if status else (tmp_path / "table.md").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    "rows, problem",
    [
        (None, "run the benchmark"),
        ([], "no rows"),
        ([row("dense", 1, 1), row("kvpop", "fast", 1)], "line 3, step_ms: 'fast'"),
        ([row("dense", 1, 1, kv_bytes="nan")], "kv_bytes: 'nan'"),
        ([row("dense", 200, 1, mode="eager")], "no compiled run"),
        ("machine,configuration\nm,dense\n", "no column"),
        (",".join(NAMES) + "\nm,2\n", "line 2"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, rows, problem):
    path = tmp_path / "decode.csv"
    if isinstance(rows, str):
        path.write_text(rows)
    elif rows is not None:
        write(path, rows)
    assert main(["bench", "plot", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvpop: {path}") and error.count("\n") == 1 and problem in error
    assert {p.name for p in tmp_path.iterdir()} <= {"decode.csv"}
