"""The command `kvpop eval`: its table, its windows and its records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from distill.typed import distill, evaluated, records, refused

from kvpop_vllm.scorers.checkpoint import read_scorer, write_scorer


def test_eval_compares_policies_with_dense(kvpop):
    distill(kvpop, "scorer", "--steps=2")
    words = "--data text.jsonl --scorer=scorer --length 128 96 --share 3 --rows=2 --report=text"
    done = evaluated(kvpop, f"{words} --equal k")
    heading, *lines = done.lines
    assert heading[:2] == ["length", "budget"] and len(lines) == 2 * 5  # dense, three training-free, the scorer
    assert "| random |" in Path("text/table.md").read_text() and records("text/retained.jsonl")
    assert len(done.records) == 2 * len(lines)
    assert {r["policy"] for r in done.records} == {"dense", "streaming-llm", "l2norm", "random", "scorer"}
    for record in done.records:
        assert record["policy"] == "dense" or (record["budget"] == record["length"] // 3 and 0 <= record["mass"] <= 1)
    assert "intervals need at least 8 documents or examples, got 2: raise --rows or give more text" in done.notes
    assert "text: 100%" in done.notes and "maps: 100%" in done.notes


def test_budgets_from_half_a_row_to_all_but_its_end(kvpop):
    """Recall is measured where something is evicted. What is given twice is measured once."""
    words = "--data text.jsonl --policies streaming-llm --length 128 --window 8 --rows=1"
    done = evaluated(kvpop, f"{words} --budget 126 64 110 64 --equal k k")
    assert [r["budget"] for r in done.records[1:]] == [126, 64, 110] and all(
        0 <= r["mass"] <= 1 for r in done.records[1:]
    )


def test_eval_takes_the_windows_that_a_scorer_was_trained_with(kvpop):
    distill(kvpop, "several", "--steps=2", "--window", "8", "16", "--topk", "20", "44")
    words = "--data text.jsonl --policies streaming-llm --length 128 --share 2 4 --rows=1 --equal k --scorer="
    done = evaluated(kvpop, f"{words}several")
    records = done.records
    settings = {(r["policy"], r["budget"], r["window"], r["topk"]) for r in records if r["policy"] != "dense"}
    assert settings == {(name, *t) for name in ("several", "streaming-llm") for t in ((64, 16, 44), (32, 8, 20))}
    assert done.lines[0][4] == "window"
    config, layers = read_scorer("several")
    by_hand = {}
    for window in (8, 16):
        write_scorer(f"only{window}", dataclasses.replace(config, window=window, trained=()), layers)
        for record in evaluated(kvpop, f"{words}only{window}").records:
            by_hand[record.get("window"), record.get("budget")] = record["nll"], record.get("hindsight")
    for record in records:
        if record["policy"] == "several":
            assert by_hand[record["window"], record["budget"]] == (record["nll"], record["hindsight"])
    message = "only8 was trained with window 8 at a budget of 64, several with 16: give --window"
    refused(kvpop, f"eval --model=qwen3 --split=all {words}several --scorer=only8", message)
    refused(kvpop, f"eval --model=qwen3 --split=all {words}several --window=17", "windows from 8 to 16")
    evaluated(kvpop, f"{words}several --scorer=only8 --window=8")


def test_records_of_before_stay_until_the_new_ones_are_there(kvpop, monkeypatch):
    Path("kept.jsonl").write_text("before\n")
    Path("link.jsonl").symlink_to("kept.jsonl")
    words = "--data text.jsonl --policies random --length 512 --out=link.jsonl"
    refused(
        kvpop, f"eval --model=qwen3 {words} --split=test --length=4000", "the test split holds no row of 4000 tokens"
    )
    assert Path("kept.jsonl").read_text() == "before\n" and not list(Path().glob("*.draft"))

    def fails(*args, **options):
        yield {"row": 0, "policy": "dense"}
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("kvpop_vllm.evaluation.tasks.evaluate", fails)
        refused(kvpop, f"eval --model=qwen3 --split=all {words}", "gone")
    (draft,) = Path().glob("*.draft")
    assert Path("kept.jsonl").read_text() == "before\n" and records(draft)[1]["row"] == 0
    evaluated(kvpop, words)
    assert {record["policy"] for record in records("kept.jsonl")[1:]} == {"dense", "random"}
    assert Path("link.jsonl").is_symlink() and not list(Path().glob("*.draft"))
    evaluated(kvpop, f"{words} --out=/dev/null")
    assert Path("/dev/null").is_char_device()
    Path("own").mkdir()
    refused(kvpop, f"eval --model=qwen3 --split=all {words} --out=own", "--out own is a folder")


def test_allocators_go_with_any_policy_that_can_be_served(kvpop):
    words, names = (
        "--data text.jsonl --length 160 --budget 56 --window 9 --rows=1 --policies",
        ["h2o", "tova", "random"],
    )
    uniform = {r["policy"]: r["nll"] for r in evaluated(kvpop, f"{words} {' '.join(names)}").records}
    records = evaluated(kvpop, f"{words} {' '.join(names)} --allocator uniform pyramid").records
    shared = {r["policy"]: r["nll"] for r in records}
    assert shared.keys() == {*uniform, *(f"{name}+pyramid" for name in names)} and uniform.keys() == {*names, "dense"}
    assert uniform == {name: shared[name] for name in uniform} and len(set(shared.values())) == len(shared)
    refused(kvpop, f"eval --model=qwen3 --split=all {words} h2o --allocator=ada", "ada")
    nowhere = "--calibration nowhere has neither shares.json nor queries.json"
    refused(kvpop, f"eval --model=qwen3 --split=all {words} h2o --calibration nowhere", nowhere)


def test_policies_that_follow_attention_and_corrections(kvpop):
    distill(kvpop, "corrected", "--steps=2")
    words = "--data text.jsonl --length 128 --share 3 --rows=1 --scorer=corrected"
    names = ["streaming-llm", "h2o", "tova", "momentkv"]
    records = evaluated(kvpop, f"{words} --correction=moment --policies {' '.join(names)}").records
    moments = {r["policy"]: r for r in records}
    assert moments.keys() == {"dense", "corrected", *names, *(f"{name}+moment" for name in (*names, "corrected"))}
    for name in ("streaming-llm", "corrected"):  # the same tokens stay, and outputs change
        plain, corrected = moments[name], moments[f"{name}+moment"]
        assert plain["nll"] != corrected["nll"]
        assert all(plain[measure] == corrected[measure] for measure in ("teacher", "hindsight", "mass"))
    records = evaluated(kvpop, f"{words} --policies random momentkv --correction=none").records
    none = {r["policy"]: r["nll"] for r in records}
    assert none.keys() == {"dense", "random", "momentkv", "corrected"}
    assert none["momentkv"] == moments["momentkv"]["nll"] != moments["momentkv+moment"]["nll"]
    assert "random+moment" in evaluated(kvpop, f"{words} --correction=moment").table, "the default policies"
