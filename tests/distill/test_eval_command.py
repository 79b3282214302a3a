"""The command `kvpop eval`: its table, its windows and its records."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from distill.typed import distill

from kvpop_vllm.scorers.checkpoint import read_scorer, write_scorer


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_eval_compares_policies_with_dense(kvpop):
    distill(kvpop, "scorer", "--steps=2")
    words = "eval --model=qwen3 --data text.jsonl --split=all --scorer=scorer --length 128 96 --share 3 --rows=2"
    status, output, errors = kvpop(*words.split(), "--dtype=float32", "--out=records.jsonl", "--report=text")
    assert status in (0, None), errors
    header, *lines, _ = (line.split() for line in output.splitlines())  # the last one names the report
    assert header[:2] == ["length", "budget"] and len(lines) == 2 * 5  # dense, three training-free, the scorer
    assert [line[-3] for line in lines if "dense" in line], output
    assert "| random |" in Path("text/table.md").read_text() and records("text/retained.jsonl")
    found = records("records.jsonl")
    assert len(found) == 2 * len(lines)
    assert {r["policy"] for r in found} == {"dense", "streaming-llm", "l2norm", "random", "scorer"}
    for record in found:
        assert record["policy"] == "dense" or (record["budget"] == record["length"] // 3 and 0 <= record["mass"] <= 1)


def test_eval_takes_the_windows_that_a_scorer_was_trained_with(kvpop):
    distill(kvpop, "several", "--steps=2", "--window", "8", "16", "--topk", "20", "44")
    words = "eval --model=qwen3 --data text.jsonl --split=all --policies streaming-llm --length 128 --share 2 4 --rows=1 --dtype=float32"
    status, output, errors = kvpop(*words.split(), "--scorer=several", "--out=windows.jsonl")
    assert status in (0, None), errors
    found = records("windows.jsonl")
    settings = {(r["policy"], r["budget"], r["window"], r["topk"]) for r in found if r["policy"] != "dense"}
    assert settings == {(name, *t) for name in ("several", "streaming-llm") for t in ((64, 16, 44), (32, 8, 20))}
    assert output.split()[3] == "window"
    config, layers = read_scorer("several")
    by_hand = {}
    for window in (8, 16):
        write_scorer(f"only{window}", dataclasses.replace(config, window=window, trained=()), layers)
        kvpop(*words.split(), f"--scorer=only{window}", f"--out=only{window}.jsonl")
        for record in records(f"only{window}.jsonl"):
            by_hand[record.get("window"), record.get("budget")] = record["nll"], record.get("hindsight")
    for record in found:
        if record["policy"] == "several":
            assert by_hand[record["window"], record["budget"]] == (record["nll"], record["hindsight"])
    status, _, errors = kvpop(*words.split(), "--scorer=several", "--scorer=only8")
    assert status == 2 and "only8 was trained with window 8 at a budget of 64, several with 16: give --window" in errors
    status, _, errors = kvpop(*words.split(), "--scorer=several", "--window=17")
    assert status == 2 and "--window 17" in errors and "windows from 8 to 16" in errors
    assert kvpop(*words.split(), "--scorer=several", "--scorer=only8", "--window=8")[0] in (0, None)


def test_records_of_before_stay_until_the_new_ones_are_there(kvpop, monkeypatch):
    Path("kept.jsonl").write_text("before\n")
    Path("link.jsonl").symlink_to("kept.jsonl")
    words = "eval --model=qwen3 --data text.jsonl --split=all --policies random --length 512 --out=link.jsonl".split()
    assert kvpop(*words, "--split=test", "--length=513")[0] == 2  # nothing could be read
    assert Path("kept.jsonl").read_text() == "before\n" and not list(Path().glob("*.draft"))

    def fails(*given):
        yield {"row": 0, "policy": "dense"}
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("kvpop_vllm.evaluation.tasks.evaluate", fails)
        assert kvpop(*words)[0] == 2
    (draft,) = Path().glob("*.draft")
    assert Path("kept.jsonl").read_text() == "before\n" and records(draft)[0]["row"] == 0
    assert kvpop(*words)[0] in (0, None)
    assert {record["policy"] for record in records("kept.jsonl")} == {"dense", "random"}
    assert Path("link.jsonl").is_symlink() and not list(Path().glob("*.draft"))
    assert kvpop(*words, "--out=/dev/null")[0] in (0, None) and Path("/dev/null").is_char_device()
    Path("own").mkdir()
    status, _, errors = kvpop(*words, "--out=own")
    assert status == 2 and "--out own is a folder" in errors


def test_allocators_go_with_any_policy_that_can_be_served(kvpop):
    words = (
        "eval --model=qwen3 --data text.jsonl --split=all --length 160 --budget 56 --window 9 --rows=1 --dtype=float32"
    )
    names = ["h2o", "tova", "random"]
    status, output, errors = kvpop(*words.split(), "--policies", *names, "--out=own.jsonl")
    assert status in (0, None), errors
    own = {r["policy"]: r["nll"] for r in records("own.jsonl")}
    options = ["--policies", *names, "--allocator", "uniform", "pyramid", "--out=shared.jsonl"]
    status, output, errors = kvpop(*words.split(), *options)
    assert status in (0, None), errors
    shared = {r["policy"]: r["nll"] for r in records("shared.jsonl")}
    assert shared.keys() == {*own, *(f"{name}+pyramid" for name in names)} and own.keys() == {*names, "dense"}
    assert own == {name: shared[name] for name in own} and len(set(shared.values())) == len(shared)
    status, _, errors = kvpop(*words.split(), "--policies", "h2o", "--allocator=ada")
    assert status == 2 and "ada" in errors


def test_policies_that_follow_attention_and_corrections(kvpop):
    distill(kvpop, "corrected", "--steps=2")
    words = "eval --model=qwen3 --data text.jsonl --split=all --length 128 --share 3 --rows=1 --dtype=float32 --scorer=corrected"
    names = ["streaming-llm", "h2o", "tova", "momentkv"]
    status, output, errors = kvpop(*words.split(), "--policies", *names, "--correction=moment", "--out=moments.jsonl")
    assert status in (0, None), errors
    moments = {r["policy"]: r for r in records("moments.jsonl")}
    corrected = {f"{name}+moment" for name in (*names, "corrected")}
    assert moments.keys() == {"dense", "corrected", *names} | corrected
    for name in ("streaming-llm", "corrected"):  # the same tokens stay, and outputs change
        plain, more = moments[name], moments[f"{name}+moment"]
        assert plain["nll"] != more["nll"]
        assert all(plain[measure] == more[measure] for measure in ("teacher", "hindsight", "mass"))
    status, output, _ = kvpop(
        *words.split(), "--policies", "random", "momentkv", "--correction=none", "--out=none.jsonl"
    )
    found = {r["policy"]: r for r in records("none.jsonl")}
    assert found.keys() == {"dense", "random", "momentkv", "corrected"}
    assert found["momentkv"]["nll"] == moments["momentkv"]["nll"] != moments["momentkv+moment"]["nll"]
    status, output, errors = kvpop(*words.split(), "--correction=moment")  # the default policies
    assert status in (0, None) and "random+moment" in output, errors
