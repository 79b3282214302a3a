"""`benchmarks/policy_table.py` at tiny sizes: one row per policy and budget, reused for the same commit."""

import csv
import json
import re
import shutil
import sys

import harness
import kernel_steps
import policy_cells
import policy_table
import pytest
import record
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from policy_table import SHARED
from threads import same_threads

from kvpop_vllm.calibrate.command import options_of
from kvpop_vllm.calibrate.plan import specs_of
from kvpop_vllm.calibration.shares import SIZES, Calibration
from kvpop_vllm.cli import make_parser
from kvpop_vllm.evaluation.policies import PolicySpec, known_training_free
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import ops
from kvpop_vllm.model_shape import ModelShape
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


def test_the_table_of_the_document_is_that_of_the_records(monkeypatch, capsys):
    """Its command prints each of its rows of quality: KL, perplexity, and needles of twenty."""
    document = (record.ROOT / "docs" / "benchmarks.md").read_text()
    words = re.search(r"policy_table.py (--table .* [0-9a-f]{7})`", document)[1].split()
    monkeypatch.setattr(sys, "argv", ["policy_table.py", *words, "--model", str(harness.DEMO_MODEL)])
    assert policy_table.main() == 0
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    records = {}
    for b, policy, _, _, _, perplexity, kl, _, needles, *_ in (row for row in printed if len(row) > 9):
        if b == "512":  # one policy may have rows of several commits
            exact = round(20 * float(needles.split()[0]))
            records.setdefault(policy, []).append([float(kl), float(perplexity), exact])
    rows = document.split("| policy | KL, nats per token |")[1].split("\n\n")[0].splitlines()[2:]
    for row in rows:
        policy, *numbers = (cell.strip().strip("`") for cell in row.split("|")[1:5])
        if policy != "dense":
            rounding = (0.0006, 0.06, 0)  # the script prints a digit or two more
            assert any(
                all(abs(float(a) - b) <= unit for a, b, unit in zip(numbers, measured, rounding, strict=True))
                for measured in records[policy]
            ), (policy, numbers, records[policy])


def test_prompts_are_protected_or_compressed(bench):
    """With a prompt, divergences are smaller and policies that compress a prompt are included."""
    common, names = ("--budget", "128", "--parts", "quality"), ("streaming-llm", "h2o", "snapkv", "pyramidkv", "adakv")
    _, (_, *plain), _, _ = bench(*common, "--policies", *names[:2])
    status, rows, _, output = bench(*common, "--prompt", "300", "--policies", *names)
    with_prompt = {row["policy"]: row for row in rows if row["prompt"] == "300"}
    assert status == 0 and with_prompt.keys() == {"dense", *names} and "left out: snapkv" not in output.out
    assert all(0 < float(with_prompt[row["policy"]]["kl"]) < float(row["kl"]) for row in plain)
    assert all(with_prompt["dense"][name] == with_prompt["h2o"][name] for name in ("exact", "partial")), (
        "a whole prompt is protected"
    )
    assert len({with_prompt[name]["kl"] for name in names}) == 5


def table_of(output):
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in output.out.splitlines() if line.startswith("|")
    ]


def test_a_row_for_every_policy_and_budget_and_none_twice(bench):
    status, rows, times, output = bench("--budget", "128")
    names = {*known_training_free(), "kvpop"} - {"snapkv", "pyramidkv", "adakv", "attention-matching"}
    assert "left out: snapkv compresses a prompt at its end, and these texts have none: give --prompt" in output.out
    assert "left out: kvpop-mlp needs a scorer" in output.out
    dense, *measured = rows
    assert status == 0 and dense["policy"] == "dense" and float(dense["kl"]) == float(dense["kl_before"]) == 0
    assert {row["policy"] for row in measured} == names and len(measured) == len(names)
    for row in measured:
        assert float(row["kl"]) > 0.05 > float(row["kl_before"])
        assert [row[name] for name in ("commit", "budget", "equal", "text")] == ["abc", "128", "k", "text"]
    assert [row["policy"] for row in times] == [row["policy"] for row in rows if row["policy"] not in ("vase", "rkv")]
    assert "not timed: vase makes its scores every so many steps" in output.out
    for row in times:
        assert float(row["least"]) <= float(row["dense_over_it"]) <= float(row["largest"]) and float(row["step_ms"]) > 0
    by_policy = {row["policy"]: row for row in measured}
    assert [by_policy[name]["window"] for name in ("h2o", "tova", "kvpop")] == ["64", "1", "16"]
    assert by_policy["kvpop"]["scorer"].startswith("scorer@")
    assert sum(line[0] == "128" for line in table_of(output)) == len(names)


def test_rows_are_taken_over_from_the_same_commit_only(bench, monkeypatch):
    words = ("--budget", "128", "--policies", "tova")
    _, rows, times, output = bench(*words)
    with monkeypatch.context() as patch:
        for part in ("quality", "steps"):
            patch.setattr(policy_cells.Cells, part, lambda *words: pytest.fail("measured again"))
        again = bench(*words)
        assert again[:3] == (0, rows, times)
        assert table_of(again[3]) == table_of(output) == table_of(bench("--table", "--budget", "128")[3])
    for commit, names, new in (("abc+", ["quality"], 0), ("def", ["quality", "steps"], 2), ("ghi", ["quality"], 0)):
        monkeypatch.setitem(record.KEY, "commit", commit)
        _, after, late, output = bench(*words, "--parts", *names)
        assert [row["commit"] for row in after[len(rows) :]] == [commit] * 2 and len(late) == len(times) + new
        assert ("no row can be taken over" in output.out) == commit.endswith("+")
        rows, times = after, late
    for chosen, commits in {"abc": "abc", "def abc": "def", "ghi def": "ghi, def", "ghi": "ghi"}.items():
        output = bench("--table", "--budget", "128", "--commit", *chosen.split())[3]
        assert [line[9] for line in table_of(output)[2:]] == [commits] * 2
        assert output.out.count("Times on ") == (chosen != "ghi")


def test_equal_bytes(bench):
    """A policy whose state takes a page is measured with as many bytes as a plain one, too."""
    words = ("--budget", "128", "512", "--policies", "momentkv", "--length", "720", "--parts", "quality")
    dense, *rows = bench(*words)[1]
    assert [(r["budget"], r["equal"], r["topk"]) for r in rows] == [
        ("128", "k", "126"), ("512", "k", "510"), ("512", "bytes", str(512 - 64 - 2)),
    ]  # fmt: skip
    assert int(rows[2]["allocated_bytes"]) == 8 * 2 * 2 * 64 * (2 * 32 * 2 + 8) < int(rows[1]["allocated_bytes"])


def test_equal_bytes_alone(bench):
    """A policy without a state has its row at equal k, whose bytes are those of others."""
    words = "--budget", "512", "--policies", "momentkv", "h2o", "--length", "720", "--parts", "quality"
    dense, *rows = bench(*words, "--equal", "bytes")[1]
    assert {(row["policy"], row["equal"], row["topk"]) for row in rows} == {
        ("momentkv", "bytes", str(512 - 64 - 2)),
        ("h2o", "k", "256"),
    }
    with pytest.raises(SystemExit):
        bench(*words, "--budget", "256", "--equal", "bytes")


def test_the_window_decides_in_one_calibration_of_make_default_policy(folder):
    makefile = (record.ROOT / "Makefile").read_text()
    options = re.search(r"calibrate \$\(DEMO_MODEL\) --out \$\(OUT\)/window (.*) \$\(CALIBRATE_ARGS\)", makefile)[1]
    words = ["calibrate", str(folder / "model"), "--out", "out", *options.split()]
    assert next(iter(specs_of(options_of(make_parser().parse_args(words))))) == "streaming-llm"


def test_shares_are_compared_at_the_same_equal():
    """At equal k whatever bytes they take; a row at equal k stands for equal bytes if it takes no more."""

    def row(policy, equal, size):
        return {"policy": policy, "budget": "512", "scorer": "", "equal": equal, "allocated_bytes": str(size)}

    plain, bytes_row = row("h2o", "k", 100), row("h2o", "bytes", 90)
    assert policy_table.with_equal_shares(row("h2o, calibrated", "k", 90), [plain, bytes_row]) is plain
    assert policy_table.with_equal_shares(row("h2o, calibrated", "bytes", 90), [plain, bytes_row]) is bytes_row
    assert policy_table.with_equal_shares(row("h2o, calibrated", "bytes", 100), [plain]) is plain
    assert policy_table.with_equal_shares(row("h2o, calibrated", "bytes", 90), [plain]) is None


def test_nothing_is_compared_when_predictions_differ_before_eviction(bench, monkeypatch):
    """A decode or prefill kernel that is wrong from the first token on gives no row."""
    right = ops.prefill_chunk

    def wrong(q, *arguments, **options):
        out, lse = right(q, *arguments, **options)
        return out.mul_(0.5), lse

    monkeypatch.setattr("kvpop_vllm.kernels.ops.prefill_chunk", wrong)
    for measured in (["quality", "steps"], ["steps"]):
        status, rows, times, output = bench("--budget", "128", "--policies", "tova", "--parts", *measured)
        assert status == 1 and {row["policy"] for row in (*rows, *times)} == {"dense"}
        assert "tova, B = 128: output check failed" in output.out and "| 128 |" not in output.out


def test_scorers_of_one_name_are_told_apart(folder, tmp_path):
    """Scorers in folders of one name differ by their contents, so rows of one never stand for another."""
    name, changed_scorer = policy_table.fingerprint(folder / "scorer"), tmp_path / "scorer"
    shutil.copytree(folder / "scorer", changed_scorer)
    assert policy_table.fingerprint(changed_scorer) == name
    write_random_scorer(changed_scorer, folder / "model", sinks=4, window=16, topk=80, seed=5)
    assert policy_table.fingerprint(changed_scorer) != name
    calibration = tmp_path / "calibration"
    calibration.mkdir()
    names = []
    for share in (0.5, 0.6):
        shares = calibration / "shares.json"
        shares.write_text(json.dumps({"shares": [[share, 2 - share]] * 2}))
        names += [policy_table.fingerprint(source, *policy_table.CALIBRATION) for source in (calibration, shares)]
    assert len(set(names)) == 4 and names[1].startswith("shares.json@"), "a folder, or a file of shares"


@pytest.mark.parametrize(
    "options, problem",
    [
        (("--policies", "l2", "--budget", "64"), "'l2' cannot be compared: choose from .*l2norm"),
        (("--length", "900000", "--budget", "64"), "holds 0 rows of 900000 tokens"),
        (("--budget", "700"), "2"),
        (("--data", "nothing.jsonl"), "2"),
        (("--budget", "64", "--calibration", "nothing"), "nothing has neither shares.json nor queries.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, options, problem):
    with pytest.raises(SystemExit, match=problem):
        bench(*options)


@pytest.mark.parametrize("name", ["full", "h2o", "streaming-llm"])
def test_timed_steps_are_real_ones(name):
    """The kernel that is timed gives the outputs of a prefill of the whole text."""
    shape, context, count = ModelShape("llama", 2, 2, 32, 64), 50, 6
    resolved = PolicySpec(name, name).resolve(shape, None if name == "full" else 24)
    steps = kernel_steps.Steps(resolved, 4, 3, context, count, torch.float32)
    step_tokens, outs = [], []

    def watch(tokens, rule, pages, table, budgets, positions):
        out, _ = ops.decode_step(*tokens, pages, table, positions, budgets, rule=rule, scale=32**-0.5)
        step_tokens.append(tokens)
        outs.append(out)

    steps._step = watch
    assert steps.seconds(2) > 0 and steps.seconds(4) > 0 and steps.position == context + count
    draw = torch.Generator().manual_seed(0)
    prompt = [torch.randn(context, heads, 32, generator=draw) for heads in (4, 2, 2)]
    for layer, request in ((0, 0), (1, 2)):
        texts = [
            torch.cat([start, *(step[i][request][None] for step in step_tokens[layer::2])]).transpose(0, 1)
            for i, start in enumerate(prompt)
        ]
        rows = LayerRows(resolved.rules[layer], resolved.budgets(layer), texts[1][None], 32**-0.5)
        expected = rows.append(*(text[None] for text in texts))[0, :, context:]
        decoded = torch.stack([out[request] for out in outs[layer::2]], 1)
        torch.testing.assert_close(decoded, expected, rtol=0, atol=2e-5)


def test_policies_with_a_calibration_stand_next_to_equal_shares(bench, folder, tmp_path):
    shape = ModelShape.of(folder / "model", 700)
    sizes = {name: getattr(shape, name) for name in SIZES} | {"rope": shape.rope}
    shares = tuple((0.5 + layer,) * shape.num_kv_heads for layer in range(shape.num_layers))
    content = {"unit": "layer", "shares": shares, "budget": 128}
    for name, windows in (("calibration", {"h2o": 0.125}), ("others", {"h2o": 0.25})):
        (tmp_path / name).mkdir()
        content |= {"windows": windows, "policy": "tova"}
        content |= {"decided_by": "h2o" if name == "calibration" else "streaming-llm"}
        Calibration(**sizes, **content).write(tmp_path / name)
    words = (
        "--calibration",
        str(tmp_path / "others"),
        str(tmp_path / "calibration"),
        "--parts",
        "quality",
        "--rows",
        "9",
    )
    status, rows, _, output = bench(*words, "--budget", "128", "--policies", "streaming-llm", "h2o")
    rows_of = {row["policy"]: row for row in rows}
    assert status == 0 and set(rows_of) == {
        "dense",
        *(f"{n}{end}" for n in ("h2o", "streaming-llm") for end in ("", SHARED)),
    }
    assert (
        rows_of["h2o, calibrated"]["window"] == "16" != rows_of["h2o"]["window"] and rows_of["h2o"]["calibration"] == ""
    )
    names = {name: row["calibration"].partition("@")[0] for name, row in rows_of.items()}
    assert (names["h2o, calibrated"], names["streaming-llm, calibrated"]) == ("calibration", "others")
    losses = {name: [float(kl) for kl in row["kls"].split()] for name, row in rows_of.items()}
    assert len(losses["h2o"]) == 9 and len(set(rows_of["h2o"]["units"].split())) > 8
    line = next(line for line in table_of(output) if line[1] == "h2o, calibrated")
    ratio = sum(losses["h2o, calibrated"]) / sum(losses["h2o"])
    assert line[7].startswith(f"{ratio:.2f} (") and " to " in line[6]
    words = (*words, "--length", "600", "--budget", "100", "--best", "1", "--from", "700", "128")
    status, rows, _, _ = bench(*words)
    named = {row["policy"] for row in rows if row["length"] == "600"} - {"dense"}
    assert status == 0 and named == {f"{name}{end}" for name in ("h2o", "streaming-llm") for end in ("", SHARED)}
