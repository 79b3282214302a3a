"""The example that compares policies on reasoning: from an untrained reasoner to a table, and what is not made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "reasoner"))
import compare
import train

WORDS = ["--kinds", "programs", "--steps", "2", "--rows", "8", "--size", "4"]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    tokenizer = train.make_tokenizer()
    train.make_model(tokenizer).save_pretrained(tmp_path / "reasoner")
    tokenizer.save_pretrained(tmp_path / "reasoner")
    return tmp_path


@pytest.mark.slow
def test_from_a_reasoner_to_a_table(folder, monkeypatch):
    small = {
        "kvpop": f"--window 8 --topk 12 {compare.LISTWISE} {compare.BASE} --skip",
        "kvpop-frozen-base": f"--window 8 --topk 12 {compare.LISTWISE} --no-train-base --skip",
        "streaming-plus": f"--window 8 --topk 12 {compare.BASE} --phase streaming-plus",
    }
    monkeypatch.setattr(compare, "TRAINED", small)
    monkeypatch.setattr(compare, "FREE", ("h2o", "random"))
    monkeypatch.setattr(compare, "WINDOWS", (8,))
    monkeypatch.setattr(compare, "COMPRESSIONS", (2,))
    monkeypatch.setattr(compare, "COMMON", compare.COMMON.replace("1600", "300"))
    ran, run = [], compare._run
    monkeypatch.setattr(compare, "_run", lambda command: ran.append(command) or run(command))
    compare.main([str(folder), *WORDS])
    assert len(ran) == 1 + 3 + 2 + 2 + 3  # problems, trainings, windows, training-free and trained policies
    heading, _, *lines = (folder / "table.md").read_text().splitlines()
    names = [name.strip() for name in heading.split("|")]
    table = [dict(zip(names, (cell.strip() for cell in line.split("|")), strict=True)) for line in lines]
    own = [f"{name}, nothing evicted" for name in ("kvpop", "streaming-plus")]
    assert {line["policy"] for line in table} == {"dense", "h2o", "random", *small, *own}
    assert {line["problems"] for line in table} == {"8"}
    assert [line["samples"] for line in table if line["policy"] == "random"] == ["5", "5"]
    assert (folder / "figure.png").stat().st_size > 5000
    before = len(ran)
    compare.main([str(folder), *WORDS])
    assert len(ran) == before


def test_windows_are_those_whose_solutions_go_right_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_run", lambda command: pytest.fail(f"ran {command}"))
    comparison = compare.Comparison(tmp_path, ["programs"], 8, 1)
    for name, best in (("h2o", 64), ("tova", 32)):
        for window in compare.WINDOWS:
            lines = [{"run": {}}, {"policy": "dense", "before_error": 1.0}]
            lines += [{"policy": name, "budget": 99, "before_error": x + (window == best) / 4} for x in (0.1, 0.3)]
            path = comparison.records / f"{name}-window-{window}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert comparison.choose_windows(["h2o", "tova"]) == {"h2o": 64, "tova": 32}


def test_a_failed_command_stops_the_comparison(tmp_path, capfd):
    comparison = compare.Comparison(tmp_path, ["programs"], 8, 2)
    with pytest.raises(SystemExit, match="kvpop eval failed"):
        comparison.evaluate([], {"h2o": 32})
    assert "kvpop eval --task reasoning" in capfd.readouterr().out
