"""`kvpop eval`: teachers, documents as units, equal bytes next to equal k, and records that can be repeated."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from distill.typed import distill, evaluated

from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.haystack import replay_rows
from kvpop_vllm.evaluation.output import read_records
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.runner import Setting, resolve_all
from kvpop_vllm.evaluation.tasks import evaluate_task
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import OracleModel, OraclePolicy, write_tiny_model

LENGTH, B, W = 120, 40, 16


@pytest.fixture(autouse=True, scope="module")
def teacher_and_groups(folder):
    """A teacher of another depth, and documents of which two thirds are of two groups."""
    write_byte_tokenizer(write_tiny_model(folder / "teacher", "llama", layers=3, vocab=VOCABULARY, seed=5))
    write_text(folder / "long.jsonl", documents=120)
    lines = [json.loads(line) for line in (folder / "text.jsonl").read_text().splitlines()]
    grouped = [line | ({"group": f"book {i % 3}"} if i % 3 else {}) for i, line in enumerate(lines)]
    (folder / "books.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grouped))


@pytest.mark.parametrize("task", ["text", "replay"])
def test_a_teacher_is_what_policies_are_compared_with(kvpop, task):
    """Divergences and dense records are the teacher's, by the naive oracle; recall stays that of the model alone."""
    words = f"--data long.jsonl --length {LENGTH} --budget {B} --sinks 2 --window {W} --rows 2 --equal k --task {task}"
    words += " --policies h2o"
    alone, taught = evaluated(kvpop, words), evaluated(kvpop, f"{words} --teacher teacher")
    tokenizer = load_tokenizer("qwen3")
    rows = replay_rows(["long.jsonl"], tokenizer, LENGTH, split="all", seed=0, vocab_size=VOCABULARY)
    oracle = OraclePolicy("mean mass", 2, W, B - W - 2)
    models = {"dense": ("teacher", None), "dense (own)": ("qwen3", None), "h2o": ("qwen3", oracle)}
    by_row = {(r["policy"], r["row"]): r for r in taught.records}
    assert by_row.keys() == {(name, row) for name in models for row in (0, 1)}
    for number, row in zip((0, 1), rows, strict=False):
        runs = {name: OracleModel(m).run(row.tokens.tolist(), policy) for name, (m, policy) in models.items()}
        exact = runs["dense"].logprobs[:-1]
        for name, run in runs.items():
            record, logprobs = by_row[name, number], run.logprobs[:-1]
            nll = -float(logprobs.gather(-1, row.tokens[1:, None]).mean())
            assert record["nll"] == pytest.approx(nll, rel=1e-4) and record["tokens"] == LENGTH - 1
            kl = float((exact.exp() * (exact - logprobs)).sum(-1).mean())
            assert record.get("kl", 0) == pytest.approx(kl, rel=1e-3, abs=1e-6), name
    before = {(r["policy"], r["row"]): r for r in alone.records}
    for row in (0, 1):
        assert before["h2o", row]["kl"] != pytest.approx(by_row["h2o", row]["kl"], rel=0.1)
        assert before["h2o", row]["nll"] == by_row["h2o", row]["nll"]
        if task == "text":
            measures = ("hindsight", "mass", "teacher", "error")
            assert all(before["h2o", row][name] == by_row["h2o", row][name] for name in measures)
    assert [line[6] for line in taught.lines] == ["policy", "dense", "dense (own)", "h2o"]


def test_a_teacher_answers_questions_as_the_dense_model(kvpop):
    words = (
        "--task retrieval --data long.jsonl --length 700 --budget 128 --kinds needle --rows 2 --policies h2o --equal k"
    )
    taught = evaluated(kvpop, f"{words} --teacher teacher").records
    answers = {}
    for model in ("qwen3", "teacher"):
        status, _, errors = kvpop(*f"eval --split=all --dtype=float32 --out=a.jsonl {words} --model {model}".split())
        assert status in (0, None), errors
        answers[model] = [r["answer"] for r in read_records("a.jsonl")[1] if r["policy"] == "dense"]
    by_name = {name: [r["answer"] for r in taught if r["policy"] == name] for name in ("dense", "dense (own)")}
    assert by_name == {"dense": answers["teacher"], "dense (own)": answers["qwen3"]} != answers["qwen3"]


def test_a_trained_base_is_judged_against_the_model_it_was_trained_from(kvpop):
    distill(kvpop, "based", "--steps=3", "--train-base", "--lr-base=0.01")
    words = "--data long.jsonl --length 96 --budget 32 --rows 8 --equal k --policies streaming-llm --scorer based"
    taught = evaluated(kvpop, f"{words} --model based/model --teacher qwen3")
    frozen = evaluated(kvpop, f"{words} --model qwen3")
    kl = {name: [r["kl"] for r in taught.records if r["policy"] == name] for name in ("dense (own)", "based")}
    assert min(kl["dense (own)"]) > 1e-4 and len(kl["based"]) == 8
    dense = [[r["nll"] for r in done.records if r["policy"] == "dense"] for done in (taught, frozen)]
    assert dense[0] == pytest.approx(dense[1], rel=1e-5)
    assert [line[6] for line in taught.lines[1:]] == ["dense", "dense (own)", "streaming-llm", "based"]
    assert taught.about["options"]["teacher"] == "qwen3"


@pytest.mark.parametrize("task", ["text", "replay"])
def test_records_say_how_to_repeat_them(kvpop, task):
    words = f"--data books.jsonl --length 96 --budget {B} --window {W} --rows 9 --policies random l2norm --task {task}"
    done = evaluated(kvpop, f"{words} --against random --seed 3")
    about, again = done.about, "again.jsonl"
    assert about["versions"].keys() == {"kvpop_vllm", "python", "torch", "transformers"}
    assert about["data"][0][:2] == ["books.jsonl", Path("books.jsonl").stat().st_size]
    evaluate_task(argparse.Namespace(**about["options"] | {"out": again}), TransformersBackend)
    assert read_records(again)[1] == done.records
    lines = Path("books.jsonl").read_text().splitlines()
    groups = {}
    for row in about["rows"]:
        for place in row["documents"]:
            line = json.loads(lines[int(place.rpartition(":")[2]) - 1])
            assert groups.setdefault(line.get("group", place), row["unit"]) == row["unit"]
    units = [row["unit"] for row in about["rows"]]
    assert len(units) == 9 > len(set(units)) > 1
    assert all(record["unit"] == units[record["row"]] for record in done.records)
    assert f"intervals need at least 8 documents or examples, got {len(set(units))}" in done.notes
    for record in done.records:
        if record["policy"] == "random":
            expected = {"policy": "random", "budget": B, "window": W, "protect_prompt": 0}
            assert expected.items() <= record["settings"].items() and record["sinks"] == 4


def test_a_table_with_intervals(kvpop):
    words = f"--data long.jsonl --length 100 --budget {B} --window {W} --rows 8 --policies streaming-llm h2o --equal k"
    done = evaluated(kvpop, words)
    heading, dense, reference, line = done.lines
    columns = {name: [one[heading.index(name)] for one in (dense, reference, line)] for name in heading}
    assert columns["policy"] == ["dense", "streaming-llm", "h2o"] and columns["rows"] == ["8"] * 3
    assert columns["kl ratio"][:2] == ["", "1.000"] and " to " in columns["kl ratio"][2]
    losses = {name: [r["kl"] for r in done.records if r["policy"] == name] for name in ("h2o", "streaming-llm")}
    assert columns["kl"][2].split()[0] == f"{sum(losses['h2o']) / 8:.4f}" and columns["kl"][2].count("(") == 1
    assert columns["kl ratio"][2].split()[0] == f"{sum(losses['h2o']) / sum(losses['streaming-llm']):.3f}"
    assert "intervals need" not in done.notes


@pytest.mark.parametrize("task", ["text", "replay"])
def test_equal_k_and_equal_bytes_stand_in_one_table(kvpop, task):
    """MomentKV's moments take a page of 64 slots per KV head."""
    roles = "--sinks 4 --window 16" if task == "text" else ""
    words = f"--data long.jsonl --length 260 --budget 128 {roles} --rows 1 --task {task}"
    done = evaluated(kvpop, f"{words} --policies streaming-llm momentkv")
    by_name = {(r["policy"], r.get("equal")): r for r in done.records}
    assert len(by_name) == len(done.records) == 5
    k, in_bytes = (by_name["streaming-llm", equal] for equal in ("k", "bytes"))
    assert k | {"equal": "bytes"} == in_bytes
    one, other = (by_name["momentkv", equal] for equal in ("k", "bytes"))
    assert one["allocated"] > other["allocated"] == k["allocated"] and one["topk"] - other["topk"] == 64
    assert one["kl"] != other["kl"] and other["settings"]["budget"] == 64
    records = evaluated(kvpop, f"{words} --policies streaming-llm momentkv --equal bytes").records
    same = {r["policy"]: r["kl"] for r in records if r["policy"] != "dense"}
    assert same == pytest.approx({"streaming-llm": in_bytes["kl"], "momentkv": other["kl"]})


def test_what_equal_bytes_cannot_compare_is_said_and_left_out(kvpop):
    words = "--data long.jsonl --length 700 --rows 1 --budget"
    small = evaluated(kvpop, f"{words} 72 --policies l2norm momentkv")
    assert {(r["policy"], r.get("equal")) for r in small.records} == {
        ("dense", None), ("l2norm", "k"), ("l2norm", "bytes"), ("momentkv", "k")
    }  # fmt: skip
    assert (
        "left out at equal bytes: a budget of 72 (64 in as many bytes for 700 tokens) leaves momentkv no" in small.notes
    )
    both_ways = evaluated(kvpop, f"{words} 80 --task retrieval --kinds needle --policies h2o random")
    assert {r.get("equal") for r in both_ways.records if r["policy"] != "dense"} == {"k", "bytes"}


def test_equal_bytes_behind_a_protected_prompt():
    """A protected prompt takes as many bytes at equal k and at equal bytes; the state is taken from the tail."""
    shape = ModelShape("llama", 2, 2, 32, 600)
    sizes = {}
    for protect in (0, True):
        for equal in ("k", "bytes"):
            spec = replace(training_free("momentkv"), protect=protect)
            resolved = Setting(600, 256, 4, 16, equal, prompt=100).resolve(spec, shape, torch.float32)
            sizes[protect, equal] = resolved, resolved.request_bytes(600, torch.float32, 100).allocated
    page = 64 * (2 * 32 * 4 + 8) * 2 * 2
    assert sizes[True, "k"][1] - sizes[0, "k"][1] == sizes[True, "bytes"][1] - sizes[0, "bytes"][1] == 2 * page
    for protect in (0, True):
        (k, by_k), (in_bytes, allocated) = sizes[protect, "k"], sizes[protect, "bytes"]
        assert by_k - allocated >= page
        assert k.roles.topk - in_bytes.roles.topk == (60 if protect else 64)  # a tail has no sinks


def test_settings_that_mean_the_same_are_one_run():
    shape, settings = ModelShape("llama", 2, 2, 32, 600), [Setting(600, 256, 4, 16, equal) for equal in ("k", "bytes")]
    for name, count in (("h2o", 1), ("momentkv", 2)):
        runs = resolve_all([(training_free(name), setting) for setting in settings], shape, torch.float32)
        assert len(runs) == count and sum((run_settings for _, run_settings in runs), []) == settings
