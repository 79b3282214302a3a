"""`kvpop bench plot` puts the newest measurement, and no other, into the table and the figure."""

from __future__ import annotations

import csv

import pytest

from kvpop_vllm.bench.plot import draw
from kvpop_vllm.cli import main

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
    row("kvpop", 7, 9.9, machine="another", context=9000),
    *(row("dense", ms, 1, round=i) for i, ms in enumerate((200, 260, 210))),
    *(row("kvpop", ms, ratio, round=i) for i, (ms, ratio) in enumerate(((50, 4.0), (40, 6.5), (42, 5.0)))),
    row("dense", 212, 1, budget=2048),
    row("kvpop", 60, 3.5, budget=2048),
    row("kvpress", 300, 0.7, mode="eager"),
    row("dense", 400, 1, mode="eager"),
    row("dense", 30, 1, context=1000, requests=2),
    row("kvpop", 35, 0.86, context=1000, requests=2),
]


def test_the_table_and_the_figure(tmp_path, capsys):
    write(tmp_path / "decode.csv", ROWS)
    assert main(["bench", "plot", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert lines[2:] == [
        "| 8 x 7,500 | 1,024 | kvpress (eager) | 300.0 | 0.70 | 2 |",
        "| 8 x 7,500 | 1,024 | dense | 210.0 | 1.00 | 2 |",
        "| 8 x 7,500 | 1,024 | kvpop | 42.0 | 5.00 (4.00 to 6.50) | 2 |",
        "| 8 x 7,500 | 2,048 | dense | 212.0 | 1.00 | 2 |",
        "| 8 x 7,500 | 2,048 | kvpop | 60.0 | 3.50 | 2 |",
        "| 2 x 1,000 | 1,024 | kvpop | 35.0 | 0.86 | 2 |",
        "| 2 x 1,000 | 1,024 | dense | 30.0 | 1.00 | 2 |",
        "",
        "m, 1 thread(s), vLLM 0, 2026-01-01, commit a",
    ]
    assert (tmp_path / "out/figure.png").stat().st_size > 5000
    assert "7 settings of m, 1 thread(s)" in capsys.readouterr().out


def test_another_measurement_than_the_newest(tmp_path, capsys):
    write(tmp_path / "decode.csv", [*ROWS, row("dense", 90, 1, machine="Intel X", commit="b", context=2000)])

    def last(*options):
        assert main(["bench", "plot", "--results", str(tmp_path), *options]) == 0
        return (tmp_path / "table.md").read_text().splitlines()[-1]

    assert (
        last()
        == last("--machine", "intel")
        == last("--commit", "b")
        == "Intel X, 1 thread(s), vLLM 0, 2026-01-01, commit b"
    )
    assert last("--commit", "old").startswith("m,") and last("--commit", "old").endswith("commit old")
    assert last("--commit", "a").endswith("commit a")
    capsys.readouterr()
    assert main(["bench", "plot", "--results", str(tmp_path), "--commit", "old", "--machine", "intel"]) == 2
    assert "holds no rows of commit 'old' and machine 'intel'" in capsys.readouterr().err


def test_the_curves():
    """Dense runs beside several budgets form one curve; throughput is in tokens per second."""
    from matplotlib.figure import Figure

    numbers = [
        r | {"least step_ms": 0.9 * r["step_ms"], "largest step_ms": 2 * r["step_ms"]}
        for r in ROWS
        if r["commit"] == "a" and r["machine"] == "m"
    ]
    drawing = Figure()
    draw(drawing, [r for r in numbers if r["mode"] == "compiled"], "title")
    left, right = ({line.get_label(): line.get_xydata().tolist() for line in axis.lines} for axis in drawing.axes)
    assert left["stock vLLM, dense"] == [[7500, 211]] and left["kvpop, B = 2,048"] == [[7500, 60]]
    assert right["stock vLLM, dense"] == [[8, pytest.approx((8000 / 210 + 8000 / 212) / 2)]]
    bars = [path.vertices.tolist() for path in drawing.axes[1].collections[0].get_paths()]
    assert bars == [[[8, pytest.approx(8000 / 520)], [8, pytest.approx(8000 / 180)]]]


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    path = tmp_path / "decode.csv"

    def refusal(rows=None):
        if rows is not None:
            write(path, rows)
        assert main(["bench", "plot", "--results", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"kvpop: {path}") and error.count("\n") == 1
        assert sorted(p.name for p in tmp_path.iterdir()) in ([], ["decode.csv"])
        return error

    assert "run the benchmark" in refusal()
    assert "no rows" in refusal([])
    assert "line 3, step_ms: 'fast'" in refusal([row("dense", 1, 1), row("kvpop", "fast", 1)])
    assert "budget: ''" in refusal([row("dense", 1, 1, budget="")])
    assert "kv_bytes: 'nan'" in refusal([row("dense", 1, 1, kv_bytes="nan")])
    assert "no compiled run" in refusal([row("dense", 200, 1, mode="eager")])
    path.write_text("machine,configuration\nm,dense\n")
    assert "no column" in refusal()
    path.write_text(",".join(NAMES) + "\nm,2\n")
    assert "line 2" in refusal()
