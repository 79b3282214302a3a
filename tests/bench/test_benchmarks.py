"""What every benchmark rests on: no ratio without equal outputs, and rows that say what they were measured on. No engine."""

from __future__ import annotations

import argparse
import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in ("engines", "record", "prefill")}
    finally:
        sys.path.remove(str(BENCHMARKS))


def told(tokens, *, gaps=None, shift=0.0):
    gaps = gaps or [2.0] * len(tokens)
    return [{"token": t, "logprob": -1.0 + shift, "gap": gap} for t, gap in zip(tokens, gaps, strict=True)]


STOCK = [told([1, 2, 3, 4]), told([5, 6, 7, 8], gaps=[2.0, 0.1, 2.0, 2.0])]


@pytest.mark.parametrize(
    "other, problem",
    [
        (STOCK, None),
        ([STOCK[0], told([5, 9, 9, 9])], None),  # from the near tie on the texts differ
        ([told([1, 2, 9, 4]), STOCK[1]], "x, prompt 0, token 2: 9 instead of 3, gap 2.00"),
        ([STOCK[0], told([5, 6, 7, 8], shift=-0.6)], "x, prompt 1, token 0: log-probability -1.60, stock -1.00"),
    ],
)
def test_outputs_are_compared_up_to_a_near_tie(modules, other, problem):
    assert modules["engines"].differs("x", STOCK, other) == problem


def test_near_ties_everywhere_prove_nothing(modules):
    stock = [told([1, 2, 3, 4], gaps=[0.1] * 4)]
    problem = modules["engines"].differs("x", stock, [told([9, 9, 9, 9])])
    assert problem == "x: near ties left only 1 of 4 tokens to compare"


@pytest.mark.parametrize("problems", [[], ["x, prompt 0, token 2: 9 instead of 3, gap 2.00"]])
@pytest.mark.parametrize("no_csv", [False, True])
def test_nothing_is_called_faster_when_outputs_differ(modules, capsys, problems, no_csv):
    written = []
    options = argparse.Namespace(no_csv=no_csv)
    status = modules["engines"].conclude(problems, lambda: "twice as fast", lambda: written.append(1), options)
    out, err = capsys.readouterr()
    assert status == len(problems) and written == [1] * (not problems and not no_csv)
    assert out == ("" if problems else "twice as fast\n")
    assert [line for line in err.splitlines()] == [f"output check failed, no ratio is given: {p}" for p in problems]


def test_weights_at_random_give_no_ratio(modules, capsys):
    rows = [
        {"context": context, "configuration": name, "tokens_per_s": rate, "over_dense": ratio}
        for name, rate, ratio in (("dense", "100", ""), ("kvpop", "300", ""))
        for context in (4000, 32000)
    ]
    lines = modules["prefill"].report(rows).splitlines()
    assert lines[1:4] == [
        f"{4000:7} {'dense':30}      100",
        f"{32000:7} {'dense':30}      100",
        "        dense: longest / shortest time per token, 4000 to 32000: 1.00",
    ]


def test_rows_carry_machine_date_and_commit(modules, tmp_path):
    record, path = modules["record"], tmp_path / "results" / "some.csv"
    record.append(path, [{"budget": 1, "ms": "2.0"}])
    record.append(path, [{"ms": "3.0", "budget": 4}])
    rows = list(csv.DictReader(path.open()))
    assert [(row["budget"], row["ms"]) for row in rows] == [("1", "2.0"), ("4", "3.0")]
    assert all(row[name] for row in rows for name in ("machine", "cores", "date", "commit"))
    with pytest.raises(ValueError, match="has the columns .*, not .*other: move it away"):
        record.append(path, [{"budget": 1, "other": 2}])


def test_only_what_is_measured_marks_a_commit_as_changed(modules, tmp_path, monkeypatch):
    record = modules["record"]

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for path in (results / "decode.csv", tmp_path / "kernel.cpp"):
        path.write_text("one\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (results / "decode.csv").write_text("two\n")
    clean = record.commit()
    assert clean and not clean.endswith("+")
    (tmp_path / "kernel.cpp").write_text("two\n")
    assert record.commit() == clean + "+"
