"""`benchmarks/policy_table.py` at tiny sizes: one row per policy and budget, reused for the same commit."""

from __future__ import annotations

import csv
import shutil
import sys

import kernel_steps
import policy_cells
import policy_table
import pytest
import record
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from threads import same_threads

from kvpop_vllm.evaluation.policies import PolicySpec, known_training_free
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import ops
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.testing import write_random_scorer, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    write_byte_tokenizer(write_tiny_model(root / "model", "llama", vocab=VOCABULARY))
    write_random_scorer(root / "scorer", root / "model", sinks=4, window=16, topk=80)
    write_text(root / "text.jsonl", documents=200)
    return root


@pytest.fixture
def bench(folder, tmp_path, monkeypatch, capsys):
    """Function that runs the script with options and returns status, quality rows, time rows and output."""
    monkeypatch.setattr(policy_table, "RESULTS", tmp_path)
    monkeypatch.setitem(record.KEY, "commit", "abc")

    def run(*options):
        text = str(folder / "text.jsonl")
        words = f"--model {folder / 'model'} --scorer {folder / 'scorer'} --data {text} --haystack {text} --length 700 --context 700"
        words += " --needles 2 --requests 2 --rounds 3"
        monkeypatch.setattr(sys, "argv", ["policy_table.py", *words.split(), *options])
        with same_threads():
            status = policy_table.main()
        paths = [tmp_path / name for name in ("policies.csv", "policy-steps.csv")]
        rows, times = (list(csv.DictReader(path.open())) if path.exists() else [] for path in paths)
        return status, rows, times, capsys.readouterr()

    return run


def test_prompts_are_protected_or_compressed(bench):
    """With a prompt, divergences are smaller and policies that compress a prompt are included."""
    plain = ("--budget", "128", "--parts", "quality", "--policies", "streaming-llm", "h2o")
    _, (_, *plain), _, _ = bench(*plain)
    names = ("streaming-llm", "h2o", "snapkv", "pyramidkv", "adakv")
    status, rows, _, said = bench("--budget", "128", "--parts", "quality", "--prompt", "300", "--policies", *names)
    own = {row["policy"]: row for row in rows if row["prompt"] == "300"}
    assert status == 0 and own.keys() == {"dense", *names} and "left out: snapkv" not in said.out
    for row in plain:
        assert row["prompt"] == "0" and 0 < float(own[row["policy"]]["kl"]) < float(row["kl"])
    dense, kept = own["dense"], own["h2o"]
    assert (dense["exact"], dense["partial"]) == (kept["exact"], kept["partial"]), "a whole prompt is protected"
    assert len({own[name]["kl"] for name in names}) == 5
    assert len(bench("--budget", "128", "--parts", "quality", "--prompt", "300", "--policies", *names)[1]) == len(rows)


def table_of(said):
    return [line for line in said.out.splitlines() if line.startswith("|")]


def test_a_row_for_every_policy_and_budget_and_none_twice(bench, monkeypatch):
    status, rows, times, said = bench("--budget", "128")
    names = {*known_training_free(), "kvpop"} - {"snapkv", "pyramidkv", "adakv"}
    assert "left out: snapkv compresses a prompt at its end, and these texts have none: give --prompt" in said.out
    assert status == 0 and {row["policy"] for row in rows} == names | {"dense"} and len(rows) == len(names) + 1
    dense, *others = rows
    assert dense["policy"] == "dense" and float(dense["kl"]) == float(dense["error"]) == 0
    for row in others:
        assert float(row["kl"]) > 0.05 > float(row["kl_before"]) and 0 < float(row["error"]) < 2
        assert float(row["perplexity"]) > 1
        assert [row[name] for name in ("commit", "budget", "equal", "text")] == ["abc", "128", "k", "text"]
    named = [[tuple(row[name] for name in ("policy", "budget", "scorer")) for row in part] for part in (rows, times)]
    assert [row for row in named[0] if row[0] not in ("vase", "rkv")] == named[1]
    assert "not timed: vase makes its scores every so many steps" in said.out
    for row in times:
        assert float(row["step_ms"]) > 0 < float(row["dense_ms"])
        assert float(row["least"]) <= float(row["dense_over_it"]) <= float(row["largest"])
    windows = {row["policy"]: int(row["window"]) for row in others}
    assert windows["h2o"] == 64 and windows["tova"] == 1 and windows["kvpop"] == 16
    assert {row["policy"]: row["scorer"] for row in rows}["kvpop"].startswith("scorer@")
    table = [line for line in table_of(said) if line.startswith("| 128 |")]
    assert len(table) == len(names) and "left out: kvpop-mlp needs a scorer" in said.out

    def again(*asked):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        for part in ("quality", "steps"):
            patch.setattr(policy_cells.Cells, part, again)
        status, same, _, repeated = bench("--budget", "128")
        assert status == 0 and same == rows
        assert table_of(repeated) == table_of(said) == table_of(bench("--table", "--budget", "128")[3])
    status, more, _, _ = bench(
        "--budget", "128", "512", "--policies", "momentkv", "--length", "720", "--parts", "quality"
    )
    assert [(r["policy"], r["budget"], r["equal"], r["topk"]) for r in more[len(rows) :]] == [
        ("dense", "", "k", ""), ("momentkv", "128", "k", "126"), ("momentkv", "512", "k", "510"),
        ("momentkv", "512", "bytes", str(512 - 64 - 2)),
    ]  # fmt: skip
    sizes = {(r["policy"], r["budget"], r["equal"]): int(r["allocated_bytes"]) for r in more}
    assert sizes["momentkv", "512", "bytes"] == 8 * 2 * 2 * 64 * (2 * 32 * 2 + 8) < sizes["momentkv", "512", "k"]
    monkeypatch.setitem(record.KEY, "commit", "abc+")
    _, changed, _, said = bench("--budget", "128", "--policies", "tova", "--parts", "quality")
    assert (
        all(line.endswith("| |") for line in table_of(said)[2:])
        and len(changed) == len(more) + 2
        and "no row can be taken over" in said.out
    )
    monkeypatch.setitem(record.KEY, "commit", "def")
    _, other, late, _ = bench("--budget", "128", "--policies", "tova")
    assert [row["commit"] for row in other[len(changed) :]] == ["def", "def"]
    assert [row["commit"] for row in late[len(times) :]] == ["def", "def"]
    of_both = table_of(bench("--table", "--budget", "128", "--commit", "def", "abc")[3])
    commits = {cells[2].strip(): cells[10].strip() for cells in (line.split("|") for line in of_both[2:])}
    assert commits == dict.fromkeys(names | {"dense"}, "abc") | {"dense": "def", "tova": "def"}
    monkeypatch.setitem(record.KEY, "commit", "ghi")
    bench("--budget", "128", "--policies", "tova", "--parts", "quality")
    mixed = bench("--table", "--budget", "128", "--commit", "ghi", "def")[3]
    assert [line.split("|")[10].strip() for line in table_of(mixed)[2:]] == ["ghi, def"] * 2
    assert mixed.out.count("Times on ") == 1


def test_nothing_is_compared_when_predictions_differ_before_eviction(bench, monkeypatch):
    """A decode or prefill kernel that is wrong from the first token on gives no row."""
    right = ops.prefill_chunk

    def wrong(q, *arguments, **options):
        out, lse = right(q, *arguments, **options)
        return 0.5 * out, lse

    monkeypatch.setattr("kvpop_vllm.kernels.ops.prefill_chunk", wrong)
    status, rows, times, said = bench("--budget", "128", "--policies", "tova")
    assert status == 1 and [row["policy"] for row in rows] == [row["policy"] for row in times] == ["dense"]
    assert "tova, B = 128: output check failed" in said.out and "| 128 |" not in said.out
    status, _, times, said = bench("--budget", "128", "--policies", "tova", "--parts", "steps")
    assert status == 1 and [row["policy"] for row in times] == ["dense"] and "output check failed" in said.out


def test_scorers_of_one_name_are_told_apart(folder, tmp_path):
    """Scorers in folders of one name differ by their contents, so rows of one never stand for another."""
    name, other = policy_table.fingerprint(folder / "scorer"), tmp_path / "scorer"
    shutil.copytree(folder / "scorer", other)
    assert policy_table.fingerprint(other) == name
    write_random_scorer(other, folder / "model", sinks=4, window=16, topk=80, seed=5)
    assert policy_table.fingerprint(other) != name


def test_what_cannot_be_measured_is_refused(bench):
    with pytest.raises(SystemExit, match="'l2' cannot be compared: choose from .*l2norm"):
        bench("--policies", "l2", "--budget", "64")
    with pytest.raises(SystemExit, match="holds 0 rows of 900000 tokens"):
        bench("--length", "900000", "--budget", "64")
    with pytest.raises(SystemExit, match="2"):
        bench("--budget", "700")
    with pytest.raises(SystemExit, match="2"):
        bench("--data", "nothing.jsonl")


@pytest.mark.parametrize("name", ["full", "h2o", "streaming-llm"])
def test_timed_steps_are_real_ones(name):
    """The kernel that is timed gives the outputs of a prefill of the whole text."""
    shape, context, count = ModelShape("llama", 2, 2, 32, 64), 50, 6
    resolved = PolicySpec(name, name).resolve(shape, None if name == "full" else 24)
    steps = kernel_steps.Steps(resolved, 4, 3, context, count, torch.float32)
    given, outs = [], []

    def watch(tokens, rule, pages, table, budgets, positions):
        out, _ = ops.decode_step(*tokens, pages, table, positions, budgets, rule=rule, scale=32**-0.5)
        given.append(tokens)
        outs.append(out)

    steps._step = watch
    assert steps.seconds(2) > 0 and steps.seconds(4) > 0 and steps.position == context + count
    draw = torch.Generator().manual_seed(0)
    prompt = [torch.randn(context, heads, 32, generator=draw) for heads in (4, 2, 2)]
    for layer, request in ((0, 0), (1, 2)):
        texts = [
            torch.cat([start, *(step[i][request][None] for step in given[layer::2])]).transpose(0, 1)
            for i, start in enumerate(prompt)
        ]
        rows = LayerRows(resolved.rules[layer], resolved.budgets(layer), texts[1][None], 32**-0.5)
        whole = rows.append(*(text[None] for text in texts))[0, :, context:]
        own = torch.stack([out[request] for out in outs[layer::2]], 1)
        torch.testing.assert_close(own, whole, rtol=0, atol=2e-5)
