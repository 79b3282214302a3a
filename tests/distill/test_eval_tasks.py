"""The commands `kvpop eval --task retrieval` and `--task replay`, at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from distill.tiny_text import write_text
from distill.typed import distill, evaluated, records, refused

from kvpop_vllm.evaluation.policies import known_training_free
from kvpop_vllm.policies import POLICIES
from kvpop_vllm.policies.base import Signal

EVICTING = [name for name in known_training_free() if not POLICIES[name].compresses]
"""Policies that evict from the first token on, because replay rows are not prompts and answers."""


@pytest.fixture(autouse=True, scope="module")
def long_text(folder):
    write_text(folder / "long.jsonl", documents=200)


def test_replay_of_all_policies_with_their_own_defaults(kvpop):
    distill(kvpop, "replayed", "--steps=2")
    words = "--task=replay --data long.jsonl --length 160 120 --budget 80 --rows=2 --bucket=30 --equal k"
    done = evaluated(kvpop, f"{words} --scorer=replayed --report=replay")
    results = done.records
    names = {*EVICTING, "replayed"}
    assert {r["policy"] for r in results} == names | {"dense"} and len(results) == 4 * (1 + len(names))
    windows = {r["policy"]: r["window"] for r in results if r["policy"] != "dense"}
    assert (windows["h2o"], windows["tova"], windows["streaming-llm"], windows["replayed"]) == (40, 1, 75, 8)
    for record in results:
        assert record["task"] == "replay" and record["backend"] == "transformers" and record["bucket"] == 30
        assert len(record["kl_by_position"]) == -(-(record["length"] - 1) // 30)
        early, late = record["kl_by_position"][0], record["kl_by_position"][-1]
        assert abs(early) < 1e-6 and (record["policy"] == "dense" or late > 1e-4)
    assert done.lines[0][-1] == "agreement"
    assert "| streaming-llm | 2 |" in Path("replay/table.md").read_text()
    maps = records("replay/retained.jsonl")
    assert {m["policy"] for m in maps} == names and {m["length"] for m in maps} == {160}
    for m in maps:
        if m["policy"] in ("h2o", "tova", "streaming-llm", "replayed"):
            assert all(sum(layer) * m["tokens_per_bin"] == pytest.approx(80, abs=4) for layer in m["held"])
    results = evaluated(kvpop, f"{words} --policies tova --window=5 --sinks=3").records
    assert {r.get("window") for r in results} == {None, 5}


def test_what_the_registry_cannot_run_is_left_out_unless_it_is_named(kvpop, monkeypatch):
    class NeedsHidden(POLICIES["tova"]):
        """Policy of a kind that no backend of evaluation can serve."""

        name, signals = "needs-hidden", frozenset({Signal.HIDDEN, Signal.MASS})

    monkeypatch.setitem(POLICIES, "needs-hidden", NeedsHidden)
    words = "--task=replay --data long.jsonl --length 120 --budget 80 --rows=1"
    done = evaluated(kvpop, words)
    assert "left out: needs-hidden: --policy needs-hidden declares signals of a gate and has none, or" in done.notes
    assert {r["policy"] for r in done.records} == {"dense", *EVICTING}
    words = f"eval --model=qwen3 --split=all {words}"
    compresses = "snapkv compresses a prompt at its end, and these rows have no end before the last"
    refused(kvpop, f"{words} --policies snapkv", compresses)
    refused(kvpop, f"{words} --policies tova needs-hidden", "needs-hidden: --policy needs-hidden declares signals")
    refused(kvpop, f"{words} --window=80", "no long-range tokens")


def test_retrieval_with_a_report(kvpop):
    words = "--task=retrieval --data long.jsonl --length 700 --share 4 8 --rows=2 --kinds needle --digits 3 --equal k"
    done = evaluated(kvpop, f"{words} --policies h2o --correction=moment --report=retrieval")
    assert "qwen3 has no chat template: prompts are plain text" in done.notes
    results = done.records
    budgets = [(name, budget) for name in ("h2o", "h2o+moment") for budget in (175, 87)]
    assert [(r["policy"], r.get("budget")) for r in results[::2]] == [("dense", None), *budgets]
    for record in results:
        assert record["kind"] == "needle" and not record["chat"] and len(record["expected"][0]) == 3
        assert 0 <= record["partial"] <= 1 and record["tokens"] + 16 <= 700 and record["depth"] in (0.25, 0.75)
    assert {tuple(r["expected"]) for r in results if r["example"] == 0} == {tuple(results[0]["expected"])}
    written = sorted(path.name for path in Path("retrieval").iterdir())
    assert written == ["figure.png", "retained.jsonl", "retained.png", "table.md"]


REASON = "--task=reasoning --kinds programs --size 2 --rows 8 --split test --share 2"


def test_reasoning_from_problems_to_a_table(kvpop):
    """Every policy solves the same problems; the tiny model solves none."""
    words = f"{REASON} --policies h2o random --protect-prompt all --window 9 --sinks 0"
    done = evaluated(kvpop, f"{words} --report reasoning --samples 2 --temperature 0.7 --top-p 0.9")
    assert {r["policy"] for r in done.records} == {"dense", "h2o", "random"}
    by_policy = {name: [r for r in done.records if r["policy"] == name] for name in ("dense", "h2o", "random")}
    assert [len(results) for results in by_policy.values()] == [16, 32, 160]  # two samples, k and bytes, five seeds
    problems = {r["unit"] for r in by_policy["dense"]}
    assert len(problems) == 8 and min(problems) >= 2 * 10**9
    for results in by_policy.values():
        assert {r["unit"] for r in results} == problems and {r["sample"] for r in results} == {0, 1}
    assert {r["settings"]["budget"] for r in by_policy["h2o"]} == {r["budget"] for r in by_policy["random"]}
    assert {r["protect"] for r in by_policy["h2o"]} == {"all"}
    heading, *lines = done.lines
    assert heading[-4:] == ["right", "before_error", "answered", "written"] and len(lines) == 5
    assert Path("reasoning/figure.png").exists() and "| programs | 8 |" in Path("reasoning/table.md").read_text()


@pytest.mark.parametrize(
    "task", [f"{REASON} --rows 1", "--task=retrieval --data long.jsonl --length 700 --share 4 --rows 1 --kinds needle"]
)
def test_protected_prompts_leave_out_what_compresses_them(kvpop, task):
    """Without --policies. With it they are refused."""
    done = evaluated(kvpop, f"{task} --equal k --protect-prompt all")
    assert {r["policy"] for r in done.records} == {"dense", *EVICTING}
    assert (
        "left out with --protect-prompt: snapkv, pyramidkv, adakv, attention-matching, which compress prompts"
        in done.notes
    )
    words = f"eval --model=qwen3 --split=all {task} --policies snapkv --protect-prompt all".replace(
        "--split=all --task=reasoning", "--task=reasoning"
    )
    refused(kvpop, words, "snapkv holds prompts until their end anyway: leave --protect-prompt out, or snapkv")


def test_dense_models_and_policies_apart(kvpop):
    """They answer as together."""
    words = f"{REASON} --policies h2o --equal k"
    together, policies = (evaluated(kvpop, f"{words} {option}").records for option in ("", "--no-dense"))
    dense = evaluated(kvpop, f"{REASON.replace(' --share 2', '')} --policies").records
    assert {r["policy"] for r in policies} == {"h2o"} and {r["policy"] for r in dense} == {"dense"}
    assert [r | {"length": 0} for r in dense + policies] == [r | {"length": 0} for r in together]


def test_reasoning_is_repeated_by_its_record(kvpop):
    words = f"{REASON} --policies h2o --temperature 0.7 --requests 3"
    first, second = (evaluated(kvpop, words).records for _ in "ab")
    problems, of_seed = (
        {r["unit"] for r in records} for records in (first, evaluated(kvpop, f"{words} --seed 1").records)
    )
    assert first == second and len(problems) == len(of_seed) == 8 and not problems & of_seed
