"""The benchmark of vLLM with the plugin and no policy, and what it refuses to compare."""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import nullcontext

import plain
import pytest


@pytest.mark.slow
def test_one_round_of_real_engines(monkeypatch, capsys, tmp_path):
    """Both engines start, give the same tokens and decode; the rows are one for each, and the table has their ratio."""
    small = "--eager --rounds 1 --requests 2 --context 60 --steps 3".split()
    monkeypatch.setattr(sys, "argv", ["plain.py", *small])
    monkeypatch.setattr(plain, "RESULTS", tmp_path / "plain.csv")
    assert plain.main() == 0
    with (tmp_path / "plain.csv").open() as file:
        rows = {row["configuration"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"without", "with"} and {row["round"] for row in rows.values()} == {"1"}
    table = capsys.readouterr().out
    for measure in plain.MEASURES:
        values = {name: float(row[measure]) for name, row in rows.items()}
        assert min(values.values()) > 0
        assert f"with / without {values['with'] / values['without']:.4f}" in table


def test_ratios_are_those_of_one_round():
    times = {"without": [10, 40, 20, 10, 10, 10], "with": [11, 40, 21, 12, 9, 10]}
    rows = [{"configuration": name, "startup_s": str(value)} for name, each in times.items() for value in each]
    shown = plain.summary(rows, "startup_s")
    assert shown == "startup_s: without 10.00, with 11.50; with / without 1.0250 (95% interval 0.9000 to 1.2000)"


@pytest.mark.parametrize("loaded", [["with"], [], ["without", "with"]])
def test_what_is_not_loaded_as_named_is_not_compared(monkeypatch, loaded):
    class Engine:
        def __init__(self, name):
            self.name = name

        def ask(self, command, **arguments):
            token = {"token": 1, "logprob": -1.0, "gap": 2.0}
            start = {"seconds": 2.0, "plugin": self.name in loaded}
            replies = {"start": start, "short": [[token]], "steps": {"ms": [3.0]}, "prefill": None, "random_tokens": []}
            return replies[command]

    monkeypatch.setattr(
        plain, "engines", lambda options, settings: nullcontext({name: Engine(name) for name in settings})
    )
    values, found = plain.one_round(list(plain.PLUGINS), argparse.Namespace(requests=1, context=1, steps=1))
    if loaded == ["with"]:
        assert found is None and values == dict.fromkeys(plain.PLUGINS, {"startup_s": 2.0, "step_ms": 3.0})
    else:
        assert values == {}
        assert found == f"the plugin is loaded in {loaded}, not in ['with']: install kvpop_vllm beside vLLM"
