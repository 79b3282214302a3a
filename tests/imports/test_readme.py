"""README keeps to its limits, and what it names, shows and claims exists."""

import ast
import csv
import json
import math
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import record

from kvpop_vllm import cpu_env, policies
from kvpop_vllm.bench.plot import NAMES, newest, read_answers
from kvpop_vllm.cli import main, make_parser
from kvpop_vllm.config import AUTO
from kvpop_vllm.evaluation import corpus
from kvpop_vllm.evaluation.summaries import summarise_text
from kvpop_vllm.flags import FLAGS

ROOT, RESULTS = readme.ROOT, record.RESULTS
NUMBER = r"(?<![\w.])\d[\d,.]*"
MEASURED = "9202969"
"""Commit of the measurement of decoding that README shows."""


def test_limits():
    lines = readme.README.splitlines()
    assert len(lines) <= 170 and max(map(len, lines)) <= 120
    first = next(number for number, line in enumerate(lines, start=1) if line.split()[:1] == ["make"])
    assert first < 20
    assert len(re.findall(NUMBER, readme.prose())) <= 90
    outside = "\n".join(line for line in readme.prose().splitlines() if not line.startswith("|"))
    assert len(re.findall(NUMBER, outside)) <= 30


def test_links_of_pictures_resolve():
    targets = re.findall(r"(?:href|src)=\"([^\"#]*)", readme.README)
    assert targets and all((ROOT / target).exists() for target in targets)


def test_every_figure_and_table_names_its_command():
    """A command follows each picture, and the table of results, before the next heading."""
    named = {
        "](benchmarks/results/figure.png)": "`kvpop bench plot ",
        "](docs/slots.svg)": "`python docs/slots.py`",
        'src="docs/inspect.png"': "`python tests/server/inspect_picture.py ",
        "| B = 1,024 ": "`make bench ",
    }
    pictures = re.findall(r"!\[|<img", readme.README)
    assert len(pictures) == 3
    for shown, command in named.items():
        (section,) = (part for part in readme.README.split("\n## ") if shown in part)
        assert command in section, shown


def test_the_picture_of_slots_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/slots.py"))["picture"]()
    assert (ROOT / "docs/slots.svg").read_text(encoding="utf-8") == drawn


def options_of(script: str) -> set[str]:
    """Return the options that a script's help lists."""
    run = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(re.findall(r"--[a-z][a-z-]*", run.stdout))


def test_commands_exist():
    """Make targets, packages, scripts, subcommands and their options; tests/server/test_readme.py tests options of vLLM."""
    makefile, programs = (ROOT / "Makefile").read_text(), set()
    targets = re.search(r"^\.PHONY: (.*)", makefile, re.M)[1].split()
    for program, *words in readme.commands():
        programs.add(program)
        options = {word for word in words if word.startswith("--")}
        if program == "make":
            assert words[0] in targets, words
            if arguments := [word for word in words[1:] if word.startswith("BENCH_ARGS=")]:
                script = re.search(rf"^{words[0]}:.*\n\t.*python (\S+) \$\(BENCH_ARGS\)", makefile, re.M)[1]
                assert set(re.findall(r"--[a-z-]+", arguments[0])) <= options_of(script)
        elif program == "pip":
            assert words == ["install", "."] and (ROOT / "pyproject.toml").exists()
        elif program == "python":
            assert (ROOT / words[0]).exists(), words
            assert not options or options <= options_of(words[0])
        elif program == "kvpop":
            make_parser().parse_args(words)
        elif program == "vllm":
            assert words[0] == "serve"
            assert {option for option in options if option.startswith("--kv-")} - {"--kv-cache-memory-bytes"} <= set(
                FLAGS.values()
            )
    assert programs == set(readme.PROGRAMS)


def test_names_exist():
    """Every flag, policy, folder and file in a code span, and every policy that a command chooses."""
    for words in readme.commands():
        for option, value in zip(words, words[1:], strict=False):
            assert option != "--kv-policy" or value in {*policies.POLICIES, AUTO}
    assert [name.strip("`") for name, *_ in readme.table("`--kv-policy`")] == [
        "kvpop",
        "kvpop-mlp",
        "triattention",
        "h2o",
        "streaming-llm",
        "snapkv",
    ]
    for folders, _ in readme.table("folder"):
        assert all((ROOT / name.strip("`")).is_dir() for name in folders.split(", "))
    words = {"dense", "kv_report", ".venv", ".venv/bin", f"torch=={cpu_env.TORCH}", "KVpopCache", "LLM(...)", "make"}
    for span in readme.spans():
        first = span.split()[0]
        exists = span in {*policies.POLICIES, *words} or first in FLAGS.values() or (ROOT / span).exists()
        assert exists or first in readme.PROGRAMS, span
    assert f"`torch=={cpu_env.TORCH}`" in readme.README
    versions = re.search(r"\(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert "Python 3.{} to 3.{},".format(*versions.groups()) in readme.README


def test_supported_versions_of_vllm():
    first, end = re.search(r"\"vllm>=0\.(\d+),<0\.(\d+)\"", (ROOT / "pyproject.toml").read_text()).groups()
    versions = {f"0.{minor}" for minor in range(int(first), int(end))}
    rows = [row[0] for row in readme.table("where")]
    assert {name for row in rows for name in re.findall(r"vLLM (0\.\d+)", row)} == versions


def median(rows: list[dict], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)


def csv_rows(file: str, **values) -> list[dict]:
    """Return the rows of a recorded CSV file with these values."""
    with (RESULTS / file).open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if all(row[name] == value for name, value in values.items())]


def divergence(file: str, length: int, policy: str) -> float:
    """Return the mean divergence from dense at equal bytes, in nats per token."""
    lines = map(json.loads, (RESULTS / file).read_text().splitlines())
    records = [line for line in lines if line.get("length") == length]
    (line,) = (
        row for row in summarise_text(records) if row["equal"] == "bytes" and row["policy"].split("/")[-1] == policy
    )
    return line["kl"]


def test_results_are_the_recorded_ones():
    """Each row of the table follows from the files of benchmarks/results."""
    _, steps = newest(RESULTS / "decode.csv", MEASURED)
    names = "dense", "streaming-llm", "kvpop"
    decode = {(r["requests"], r["context"], r["configuration"].partition(",")[0]): r for r in steps}
    prefill = csv_rows("prefill.csv", commit="e2add9c+")
    rates = {
        name: median([row for row in prefill if row["configuration"].partition(",")[0] == name], "tokens_per_s")
        for name in names
    }
    answers = read_answers(RESULTS / "reasoning/answers.csv")
    assert NAMES["kvpop-frozen-base"] == "kvpop"
    solved = [answers["dense"][1], answers["streaming-llm"][8], answers["kvpop"][8]]
    scorer = divergence("shipped-scorer-listwise.jsonl", 8192, "smollm2-135m-kvpop")
    rows = {
        "decode step, 8 requests of 7,500 tokens, ms": [f"{decode[8, 7500, n]['step_ms']:.1f}" for n in names],
        "KV memory of these requests, MiB": [f"{decode[8, 7500, n]['kv_bytes'] / 2**20:,.0f}" for n in names],
        "decode step, 1 request of 1,000 tokens (below B), ms": [f"{decode[1, 1000, n]['step_ms']:.1f}" for n in names],
        "prefill of 7,500 tokens, tokens per second": [f"{rates[n]:.0f}" for n in names],
        "problems solved of 256, B an eighth of a solution": [f"{256 * share[0]:.0f}" for share in solved],
        "divergence on text of 8,192 tokens, nats per token": [
            "0",
            f"{divergence('shipped-scorer-shares.jsonl', 8192, 'streaming-llm'):.4f}",
            f"{scorer:.4f}",
        ],
    }
    assert readme.table("B = 1,024 unless the row says otherwise") == [[name, *cells] for name, cells in rows.items()]
    assert {row["budget"] for row in steps} == {1024} and {row["budget"] for row in prefill} == {"1024"}


def solved_problems(file: str) -> dict[tuple[str, str, str], str]:
    """Return the problems that were solved exactly, means over trainings, by policy, equality and compression."""
    return {
        (row["policy"], row["equal"], row["compression"]): f"{int(row['problems']) * float(row['exact']):.0f}"
        for row in csv_rows(file)
    }


TRAINED = {
    "trained base": ("kvpop{}", 12),
    "frozen base": ("kvpop{}-frozen-base", 8),
}
"""Names of trained policies in records, and the compression whose shares they were trained with."""


def recorded_name(policy: str, words: str) -> str:
    """Return the name in records of a policy that a document describes by some words."""
    if words not in TRAINED:
        return policy + {"own shares": ", shares", "equal shares": ""}[words]
    name, compression = TRAINED[words]
    return f"{name.format(policy.removeprefix('kvpop'))}, trained with shares of {compression} times"


def test_the_table_of_long_reasoning_is_the_recorded_one():
    answers, page = solved_problems("reasoning/answers.csv"), (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)`, ([a-z ]+) \| (k|bytes) ((?:\| [-0-9]+ ){6})\|$", page, re.M)
    assert {policy for policy, *_ in rows} == {"kvpop", "kvpop-mlp", "h2o", "triattention", "streaming-llm"}
    section = readme.section(page, "long-reasoning").partition("###")[0]
    assert len(rows) == section.count("\n| `"), "a row of the table is not read"
    for policy, words, equal, cells in rows:
        name = recorded_name(policy, words)
        recorded = [answers.get((name, equal, str(compression)), "-") for compression in (2, 4, 6, 8, 12, 16)]
        assert [cell.strip() for cell in cells.split("|")[1:]] == recorded, name


def cells_of(text: str) -> dict[str, dict[tuple[str, str], dict[str, str]]]:
    """Return the filled cells of each table of a text by heading, policy and equality, then by compression."""
    by_title: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for title, table in re.findall(r"(?m)^(?:### )?([A-Z][^\n|]+?):?\n\n((?:\|.*\n)+)", text):
        rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()]
        columns = [re.sub(r"1/(\d+)", r"\1 times less", name) for name in rows[0]]
        by_title[title] = {
            (row[0], row[1].strip("-")): {
                column: cell for column, cell in zip(columns[2:], row[2:], strict=True) if cell not in ("", "-")
            }
            for row in rows[2:]
        }
    return by_title


def test_the_tables_of_evidence_are_the_recorded_ones():
    """Each table of the page is that of the summary that the comparison wrote, without the dense model's rows."""
    recorded = cells_of((RESULTS / "reasoning/summary.md").read_text())
    shown = cells_of((ROOT / "docs/evidence.md").read_text())
    bytes_over = "Bytes of a dense request over those of a request, prompts included"
    titles = {
        "Exact answers over dense's": "Exact answers over those of the dense model",
        "Exact answers of each training": "Exact answers of each training",
        bytes_over: bytes_over,
    }
    assert shown.keys() == titles.keys()
    for title, name in titles.items():
        rows = {}
        for (words, equal), cells in shown[title].items():
            policy, base, ending = re.fullmatch(r"`([a-z0-9-]+)`, ([a-z ]+)((?:, .*)?)", words).groups()
            rows[recorded_name(policy, base) + ending, equal] = cells
        expected = recorded[name]
        if title == bytes_over:  # what evicts nothing has the bytes of a dense request
            expected = {key: cells for key, cells in expected.items() if key[1]}
        assert rows == expected, title


def test_the_table_of_equal_shares_is_the_recorded_one():
    answers, page = solved_problems("reasoning/equal/answers.csv"), (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (k|bytes) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert len(rows) == 12
    for policy, equal, *cells in rows:
        assert cells == [answers[policy, equal, compression] for compression in "2468"], policy


def corpus_lines() -> dict[str, dict]:
    """Return the lines of the table of `kvpop eval --task corpus` over the recorded runs, by method."""
    records = []
    for path in sorted(RESULTS.glob("corpus/*-self-study.jsonl")):
        rows = [row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if "method" in row]
        records += [row | {name: f"{path.stem} {row[name]}" for name in ("document", "unit")} for row in rows]
    return {line["method"]: line for line in corpus.summarise(records, "truncation")}


def test_the_table_of_caches_of_documents_is_the_recorded_one():
    lines, page = corpus_lines(), (ROOT / "docs/compaction.md").read_text()
    last, chosen, fitted = (lines[name] for name in ("truncation", "snapkv", "attention-matching"))
    ratio = "{:.2f} ({:.2f} to {:.2f})".format(fitted["kl ratio"], *fitted["kl ratio interval"])
    assert f"| {last['kl']:.3f} | {chosen['kl']:.3f} | {fitted['kl']:.3f} | {ratio} |" in page
    assert f"each of the others {fitted['MiB']:.0f} MiB" in page and last["MiB"] == chosen["MiB"] == fitted["MiB"]
    rows = re.findall(r"(?m)^\| (?:bible|transcripts|shakespeare) [^|]*\|([^|]*)\|", page)
    assert sum(len(row.split(",")) for row in rows) == last["documents"]


def test_claims_in_the_text_are_the_recorded_ones():
    ratio = corpus_lines()["attention-matching"]["kl ratio"]
    first = {
        name: csv_rows("cartridge.csv", what="first token", configuration=name, requests="1")
        for name in ("stock", "cartridge")
    }
    share = statistics.median(
        float(small["value"]) / float(large["value"])
        for large, small in zip(first["stock"], first["cartridge"], strict=True)
    )
    text = " ".join(readme.README.split())
    assert f"1,024 slots lose {ratio:.2f} of what the last 1,024 tokens lose" in text
    assert f"time to first token is {100 * share:.1f}% of that of stock, which reads a text of 7,000 tokens" in text
    over = cells_of((ROOT / "docs/evidence.md").read_text())["Exact answers over dense's"]
    frozen, trained = (over[f"`kvpop`, {base} base", "k"]["8 times less"].split()[0] for base in ("frozen", "trained"))
    assert f"keeps {frozen} of dense's answers, and {trained} if the [model is trained]" in text
    answers = solved_problems("reasoning/answers.csv")
    with_bytes = answers[recorded_name("kvpop", "frozen base"), "bytes", "8"]
    assert f"With as many bytes as the others `kvpop` solves {with_bytes}." in text
    slower = 1 - min(
        row["dense_over_it"]
        for commit in ("456a8c8", "7dc70aa")
        for row in newest(RESULTS / "decode.csv", commit)[1]
        if row["configuration"].startswith("kvpop") and row["context"] <= 1000
    )
    assert f"`kvpop` is up to {100 * slower:.0f}% slower than dense" in text


def test_examples_have_no_bare_function_words():
    from words import bound_names

    names = [name for block in readme.blocks("python") for name, _ in bound_names(ast.parse(block))]
    assert readme.blocks("python") and names == []


@pytest.mark.parametrize("words", [w for w in readme.commands() if w[0] == "kvpop" and w[1] in ("policies", "plan")])
def test_commands_that_only_print(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words[1:]) == 0
    assert "streaming-llm" in capsys.readouterr().out


def test_the_figure_is_drawn_by_its_command(tmp_path, monkeypatch):
    (words,) = (words for words in readme.commands() if words[:3] == ["kvpop", "bench", "plot"])
    for name in ("decode.csv", "reasoning/answers.csv"):
        target = tmp_path / "benchmarks/results" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / name, target)
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0
    assert Path("benchmarks/results/table.md").read_text() == (RESULTS / "table.md").read_text()
    assert Path("benchmarks/results/figure.png").stat().st_size > 20_000


def test_policies_are_described_as_declared():
    """Both tables of docs/policies.md have every policy, with its paper, its way of prefill and its needs."""
    page = (ROOT / "docs/policies.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\| `.*\|$", page, re.M)]
    names = [row[0].strip("` ") for row in rows]
    assert names == [*policies.POLICIES] * 2
    for row, name in zip(rows, names, strict=True):
        policy = policies.POLICIES[name]
        if len(row) == 4:
            papers = re.findall(r"arXiv:([\d.]+)", policy.paper)
            assert all(f"arXiv:{paper}](https://arxiv.org/abs/{paper})" in row[1] for paper in papers)
            continue
        prefill, state, needs = row[1], row[3], row[4]
        coupled = getattr(policy, "order", None) is policies.base.Order.COUPLED or policy.default_threshold not in (
            None,
            -math.inf,
        )
        rounds = getattr(policy, "order", None) is policies.base.Order.ROUNDS
        expected = "held whole" if policy.compresses else "token by token" if coupled else "in chunks"
        assert prefill.startswith(expected) and ("cut every" in prefill) == rounds
        assert ("a scorer" in needs) == (policy.scorer_kind is not None)
        assert ("a calibration" in needs) == policy.calibrated
        first = policy.state.partition(" float32")[0].strip("-")
        assert state == (first or "none") or policy.state.startswith(state.partition(" + ")[0])


def test_findings():
    """At most 40, a line each with the entry of the log that says more."""
    page = (ROOT / "docs/findings.md").read_text()
    findings = re.findall(r"^\d*[-.] .*", page, re.M)
    assert 20 <= len(findings) <= 40
    assert all(len(re.findall(r"\]\(log/[\w-]+\.md#[^)]+\)", line)) == 1 for line in findings)


def test_changelog():
    """It has the form of Keep a Changelog, and a section for this version."""
    from kvpop_vllm import __version__

    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]" and versions[1].startswith(f"## [{__version__}] - ")
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in versions[1:])
    kinds = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
