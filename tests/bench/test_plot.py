"""`kvpop bench plot` puts the newest measurement, and no other, into the table, and it and the answers into the figure."""

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvpop_vllm.bench import plot
from kvpop_vllm.cli import main

NAMES = "machine cores threads date commit vllm mode requests context budget configuration round step_ms dense_over_it kv_bytes".split()


def row(configuration, step_ms, ratio, **changes):
    first = ("m", 2, 1, "2026-01-01", "a", "0", "compiled", 8, 7500, 1024, configuration, 1, step_ms, ratio, 2**21)
    return dict(zip(NAMES, first, strict=True)) | changes


def write(path, rows, names=NAMES):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
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


def answer(policy, compression, exact, equal="k"):
    return dict(zip(ANSWER_NAMES, (policy, equal, compression, exact, exact / 2, exact), strict=True))


ANSWER_NAMES = ["policy", "equal", "compression", "exact", "low", "high"]
ANSWERS = [
    answer("dense", 1, 0.9, equal=""),
    *(answer("kvpop-frozen-base", c, share) for c, share in ((4, 0.7), (2, 0.8))),
    answer("kvpop-frozen-base", 2, 0.1, equal="bytes"),
    answer("kvpop", 2, 0.85),
    answer("tova", 2, 0.2),
]


def write_answers(folder, rows=ANSWERS):
    write(folder / plot.ANSWERS, rows, ANSWER_NAMES)


def test_the_table_and_the_figure(tmp_path, capsys):
    write(tmp_path / "decode.csv", ROWS)
    write_answers(tmp_path)
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


def test_the_panels():
    """Runs at the most requests and the smallest budget are on the left, answers at equal k on the right."""
    _, rows = plot.newest(Path(plot.__file__).parents[2] / "benchmarks/results/decode.csv", "9202969")
    drawing = Figure()
    rows = [row for row in rows if row["requests"] < 8]
    plot.draw(drawing, rows, {"dense": {1: (0.9, 0.8, 1)}, "kvpop": {4: (0.7, 0.6, 0.8), 2: (0.8, 0.7, 0.9)}})
    left, right = drawing.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.get_lines()}
    assert lines["kvpop"] == [[1000, 30.48], [3000, 30.92], [7500, 39.3]] and set(lines) <= set(plot.CURVES)
    (curve,) = (line for line in right.get_lines() if line.get_label() == "kvpop")
    assert curve.get_xydata().tolist() == [[2, 0.8], [4, 0.7]]
    assert [text.get_text() for text in drawing.legends[0].get_texts()] == ["dense", "kvpop", "streaming-llm"]


def test_no_panel_has_more_than_five_curves_besides_dense_and_no_two_look_alike():
    assert "dense" in plot.CURVES and len(plot.CURVES) <= 1 + 5
    assert all(len(set(column)) == len(plot.CURVES) for column in list(zip(*plot.CURVES.values(), strict=True))[::2])


def test_the_best_of_rows_of_a_name_counts(tmp_path):
    """That is the better of equal shares and those that were found, for each compression."""
    shared = answer("kvpop-frozen-base, shares", 4, 0.9)
    trained = answer("kvpop-frozen-base, trained with shares of 12 times", 4, 0.5)
    for rows, at_4 in (([*ANSWERS, shared], 0.9), ([shared, *ANSWERS], 0.9), ([trained, *ANSWERS], 0.7)):
        write_answers(tmp_path, rows)
        curve = plot.read_answers(tmp_path / plot.ANSWERS)["kvpop"]
        assert curve == {2: (0.8, 0.4, 0.8), 4: (at_4, at_4 / 2, at_4)}


def test_answers(tmp_path):
    write_answers(tmp_path)
    assert plot.read_answers(tmp_path / plot.ANSWERS) == {
        "dense": {1: (0.9, 0.45, 0.9)},
        "kvpop": {2: (0.8, 0.4, 0.8), 4: (0.7, 0.35, 0.7)},
        "kvpop, model trained too": {2: (0.85, 0.425, 0.85)},
        "tova": {2: (0.2, 0.1, 0.2)},
    }


@pytest.mark.parametrize(
    "rows, problem",
    [
        (None, "cannot be read (No such file or directory): write it with examples/reasoner/compare.py"),
        (ANSWERS[1:], "holds no answers of the dense model"),
        ([*ANSWERS, answer("h2o", 2, -1)], "line 8, exact: '-1' is not a number of at least 0"),
        ([*ANSWERS, answer("h2o", 0, 1)], "line 8, compression: '0' is not a number above 0"),
    ],
)
def test_answers_that_cannot_be_read_are_one_line(tmp_path, capsys, rows, problem):
    write(tmp_path / "decode.csv", ROWS)
    if rows is not None:
        write_answers(tmp_path, rows)
    assert main(["bench", "plot", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvpop: {tmp_path / plot.ANSWERS}") and error.count("\n") == 1 and problem in error
    assert not (tmp_path / "figure.png").exists()


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
    write_answers(tmp_path)
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
