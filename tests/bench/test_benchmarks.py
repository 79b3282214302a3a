"""Rules that every benchmark follows, tested without an engine.

No ratio is given without equal outputs, and rows name the machine and commit they were measured on.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from contextlib import nullcontext

import capacity
import chat
import decode
import engines
import load
import prefill
import pytest
import record


class Stub:
    """Engine stand-in that answers some commands; ``prompt`` maps contexts to seconds."""

    def __init__(self, **answers):
        self.answers = answers

    def send(self, command, **arguments):
        self.asked = command, arguments

    def receive(self):
        command, arguments = self.asked
        if command == "start":
            return {"seconds": 1.0, "pool_bytes": 2**20}
        if command == "prompt":
            return {"seconds": self.answers["prompt"][arguments["context"]]}
        return self.answers[command]

    def ask(self, command, **arguments):
        self.send(command, **arguments)
        return self.receive()


def tokens_of(tokens, *, gaps=None, shift=0.0):
    gaps = gaps or [2.0] * len(tokens)
    return [{"token": t, "logprob": -1.0 + shift, "gap": gap} for t, gap in zip(tokens, gaps, strict=True)]


STOCK = [tokens_of([1, 2, 3, 4]), tokens_of([5, 6, 7, 8], gaps=[2.0, 0.1, 2.0, 2.0])]


@pytest.mark.parametrize(
    "other, problem",
    [
        (STOCK, None),
        ([STOCK[0], tokens_of([5, 9, 9, 9])], None),  # the texts differ from the near tie on
        ([tokens_of([1, 2, 9, 4]), STOCK[1]], "x, prompt 0, token 2: 9 instead of 3, gap 2.00"),
        ([STOCK[0], tokens_of([5, 6, 7, 8], shift=-0.6)], "x, prompt 1, token 0: log-probability -1.60, stock -1.00"),
    ],
)
def test_outputs_are_compared_up_to_a_near_tie(other, problem):
    assert engines.differs("x", STOCK, other) == problem


def test_near_ties_everywhere_prove_nothing():
    stock = [tokens_of([1, 2, 3, 4], gaps=[0.1] * 4)]
    problem = engines.differs("x", stock, [tokens_of([9, 9, 9, 9])])
    assert problem == "x: near ties left only 1 of 4 tokens to compare"


@pytest.mark.parametrize("problems", [[], ["x, prompt 0, token 2: 9 instead of 3, gap 2.00"]])
@pytest.mark.parametrize("no_csv", [False, True])
def test_nothing_is_called_faster_when_outputs_differ(capsys, tmp_path, problems, no_csv):
    file, options = tmp_path / "rows.csv", argparse.Namespace(no_csv=no_csv)
    status = engines.conclude(problems, [{"ms": 1}], lambda rows: "twice as fast", file, options)
    out, err = capsys.readouterr()
    assert status == len(problems) and file.exists() == (not problems and not no_csv)
    assert out == ("" if problems else "twice as fast\n")
    assert [line for line in err.splitlines()] == [f"output check failed, no ratio is given: {p}" for p in problems]


def test_weights_at_random_give_no_ratio(capsys):
    options = argparse.Namespace(threads=1, eager=False, load_format="dummy", budget=1024)
    started = {
        "dense": Stub(prompt={4000: 40, 8000: 100, 16000: 200}),
        "kvpop": Stub(prompt={4000: 10, 8000: 16, 16000: 40}),
    }
    rows = [row for context in (4000, 8000, 16000) for row in prefill.one_turn(started, 1, context, options)]
    assert {row["over_dense"] for row in rows} == {""}
    capsys.readouterr()
    assert [line.split() for line in prefill.report(rows).splitlines()[1:]] == [
        ["4000", "dense", "100"],
        ["8000", "dense", "80"],
        ["16000", "dense", "80"],
        "dense: longest / shortest time per token, 4000 to 16000: 1.25".split(),
        ["4000", "kvpop", "400"],
        ["8000", "kvpop", "500"],
        ["16000", "kvpop", "400"],
        "kvpop: longest / shortest time per token, 4000 to 16000: 1.25".split(),
    ]
    options.load_format = "auto"
    assert [row["over_dense"] for row in prefill.one_turn(started, 1, 4000, options)] == ["1.000", "4.000"]


@pytest.mark.parametrize("module", [decode, prefill, capacity, chat])
def test_every_benchmark_stops_when_outputs_differ(capsys, monkeypatch, module):
    """Each benchmark stops before anything is timed, because the stubs answer nothing else."""
    options = argparse.Namespace(no_csv=False, load_format="auto", context=[7500], rounds=1)
    started = {"dense": Stub(start={}, short=STOCK), "kvpop": Stub(start={}, short=[tokens_of([9, 2, 3, 4]), STOCK[1]])}
    monkeypatch.setattr(engines, "engines", lambda options: nullcontext(started))
    monkeypatch.setattr(module, "parse_arguments", lambda: options)
    assert module.main() == 1
    out, err = capsys.readouterr()
    assert err == "output check failed, no ratio is given: kvpop, prompt 0, token 0: 9 instead of 1, gap 2.00\n"
    assert " / it" not in out and "tokens/s" not in out


@pytest.mark.parametrize("number, first, last", [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15)])
def test_interval_of_a_median(number, first, last):
    """Ranks agree with tables of the sign test; below six values the interval is the whole range."""
    assert decode.median_interval([float(number - i) for i in range(number)]) == (first, last)


def test_load_stops_when_outputs_differ(capsys, monkeypatch, tmp_path):
    """Measurements of stub servers with different outputs are neither printed nor written."""
    options = argparse.Namespace(no_csv=False, load_format="auto", rounds=1)
    answers = {"dense": STOCK, "kvpop": [tokens_of([9, 2, 3, 4]), STOCK[1]]}
    measured = dict.fromkeys(load.MEASURES, 1.0)
    monkeypatch.setattr(load, "RESULTS", tmp_path / "load.csv")
    monkeypatch.setattr(load, "parse_arguments", lambda: options)
    monkeypatch.setattr(load, "check_model", lambda options: None)
    monkeypatch.setattr(load, "configurations", lambda options, folder: {name: {"policy": None} for name in answers})
    monkeypatch.setattr(load, "one_server", lambda name, *asked: (answers[name], measured))
    monkeypatch.setattr(load, "row", lambda *asked: {})
    assert load.main() == 1
    out, err = capsys.readouterr()
    assert err.endswith("output check failed, no ratio is given: kvpop, prompt 0, token 0: 9 instead of 1, gap 2.00\n")
    assert "kvpop" not in out and not (tmp_path / "load.csv").exists()


def test_rows_carry_machine_date_and_commit(tmp_path):
    path = tmp_path / "results" / "some.csv"
    record.append(path, [{"budget": 1, "ms": "2.0"}])
    record.append(path, [{"ms": "3.0", "budget": 4}])
    rows = list(csv.DictReader(path.open()))
    assert [(row["budget"], row["ms"]) for row in rows] == [("1", "2.0"), ("4", "3.0")]
    assert all(row[name] for row in rows for name in ("machine", "cores", "date", "commit"))
    with pytest.raises(ValueError, match="has the columns .*, not .*other: move it away; these rows are in") as error:
        record.append(path, [{"budget": 1, "other": 2}])
    (kept,) = csv.DictReader(open(str(error.value).split()[-1]))
    assert (kept["budget"], kept["other"]) == ("1", "2") and len(path.read_text().splitlines()) == 3


def test_only_what_is_measured_marks_a_commit_as_changed(tmp_path, monkeypatch):

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
