"""The example that compares policies on reasoning: from an untrained reasoner to a table, and what is not made again."""

import json
import shutil
import sys
from itertools import product, takewhile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "reasoner"))
import commands
import compare
import contenders
import train
from tables import records_of, write_tables

from kvpop_vllm.calibrate.command import options_of
from kvpop_vllm.calibrate.plan import Plan
from kvpop_vllm.calibrate.records import Records
from kvpop_vllm.cli import main, make_parser
from kvpop_vllm.distill.command import recipe_of
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.output import read_records
from kvpop_vllm.evaluation.problems import DRAW_SIZE, SEEDS
from kvpop_vllm.evaluation.reasoning import make_questions
from kvpop_vllm.testing import write_random_scorer

WORDS = ["--kinds", "programs", "--steps", "2", "--rows", "8", "--size", "4"]
OPTIONS = {"kinds": ["programs"], "size": None, "seed": 0, "share": [4, 8], "protect_prompt": None}
"""Options in the first line of windows' records."""


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory):
    """An untrained one."""
    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("reasoner"), train.make_tokenizer()
    train.make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_here(command: list) -> None:
    """Run a command of kvpop in this process: each process of its own would import torch."""
    program, *words = map(str, command)
    assert program == "kvpop" and main(words) == 0, command


@pytest.fixture
def small(monkeypatch):
    """Make trainings and evaluations small; return the names of the trained policies."""
    trained = {
        "kvpop": f"--window 8 --topk 12 {contenders.LISTWISE} {contenders.BASE} --skip",
        "kvpop-frozen-base": f"--window 8 --topk 12 {contenders.LISTWISE} --no-train-base --skip",
        "streaming-plus": f"--window 8 --topk 12 {contenders.BASE} --phase streaming-plus",
        "dense-longer": contenders.TRAINED["dense-longer"],
    }
    monkeypatch.setattr(contenders, "TRAINED", trained)
    monkeypatch.setattr(contenders, "FREE", ("h2o", "random"))
    monkeypatch.setattr(contenders, "WINDOWS", {8: (2,)})
    monkeypatch.setattr(contenders, "COMPRESSIONS", {2: (2,)})
    monkeypatch.setattr(contenders, "CALIBRATED", {2: (2,)})
    for uses in ("OF_SCORERS", "OF_STATES"):
        monkeypatch.setattr(contenders, uses, (contenders.Use(2, None, (2,)),))
    monkeypatch.setattr(contenders, "CALIBRATION_ROWS", 8)
    monkeypatch.setattr(commands, "_run", run_here)
    monkeypatch.setattr(contenders, "COMMON", contenders.COMMON.replace("1600", "300"))
    return list(trained)


def table_of(folder: Path) -> list[dict[str, str]]:
    heading, _, *lines = (folder / "table.md").read_text().splitlines()
    names = [name.strip() for name in heading.split("|")]
    return [dict(zip(names, (cell.strip() for cell in line.split("|")), strict=True)) for line in lines]


@pytest.mark.slow
def test_from_a_reasoner_to_a_table(tmp_path, reasoner, small, monkeypatch):
    ran, run = [], commands._run
    monkeypatch.setattr(commands, "_run", lambda command: ran.append(command) or run(command))
    words = [str(tmp_path), "--model", str(reasoner), *WORDS]
    compare.main(words)
    better = [path.stem.removeprefix("shares-2-") for path in (tmp_path / "records").glob("shares-2-*")]
    # dense, trainings, windows, training-free and trained policies, calibrations, policies with shares
    assert len(ran) == 1 + 4 + 1 + 1 + 4 + 5 + len(better)
    table = table_of(tmp_path)
    unevicted = [f"{name}, nothing evicted" for name in ("kvpop", "streaming-plus", "dense-longer")]
    shared = [f"{name}, shares" for name in better]
    evicting = {"h2o", "random", *small} - {"dense-longer"}
    assert {line["policy"] for line in table} == {"dense", *evicting, *unevicted, *shared}
    assert {*better} <= (calibrated := evicting)
    assert {path.name for path in (tmp_path / "calibrations").iterdir()} == {f"{name}-2" for name in calibrated}
    assert {line["problems"] for line in table} == {"8"}
    assert {line["samples"] for line in table if line["policy"].startswith("random")} == {"5"}
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("| policy | equal | all held | 2 times less |") == 3
    assert all(f"| {line['policy']} | " in summary for line in table)
    assert len((tmp_path / "answers.csv").read_text().splitlines()) > len(small)
    before = len(ran)
    compare.main(words)
    (tmp_path / "records/dense.jsonl").unlink()
    compare.main([*words, "--tables"])
    assert len(ran) == before and "dense" not in {line["policy"] for line in table_of(tmp_path)}


@pytest.mark.slow
def test_prompts_that_are_not_protected(tmp_path, reasoner, small):
    """SnapKV, which holds prompts until their end, is then one of the policies."""
    only = ["--no-protect-prompt", "--only", "kvpop-frozen-base"]
    compare.main([str(tmp_path), "--model", str(reasoner), *WORDS, *only])
    assert not json.loads((tmp_path / "kvpop-frozen-base/run/run.json").read_text())["protect_prompt"]
    names = {"h2o", "random", "snapkv", "kvpop-frozen-base"}
    assert {line["policy"] for line in table_of(tmp_path)} == {"dense", *names}
    for path in {*(tmp_path / "records").iterdir()} - {tmp_path / "records/dense.jsonl"}:
        settings = {record["settings"].get("protect_prompt") for record in read_records(path)[1] if "budget" in record}
        assert settings == {None if "snapkv" in path.name else 0}, path.name


def test_policies_are_trained_again_with_the_shares_that_were_found(tmp_path, reasoner, small):
    """The second training gets the shares of the first one, and is measured itself; where equal ones were best there is none."""
    comparison = commands.Comparison(tmp_path, reasoner, True, ["programs"], 8, 1, size=4, shares=(2,))
    comparison.prepare_calibration()
    for name, unit in (("kvpop", "head"), ("kvpop-frozen-base", "uniform")):
        comparison.cells, ran = {}, []
        for variant in comparison._variants(name):
            comparison._expect(variant, 2)
        for command in comparison._chain(name, [], 2):
            program, action, *words = map(str, command)
            ran.append((action, words[words.index("--out") + 1].removeprefix(f"{tmp_path}/")))
            if action == "calibrate":
                folder = Path(words[words.index("--out") + 1])
                folder.mkdir(parents=True)
                (folder / commands.NAME).write_text(json.dumps({"unit": unit}))
            if action == "distill":
                source = [str(comparison.calibrations / f"{name}-2")] if ran[-1][1] == f"{name}-shares-2" else []
                assert words[words.index("--shares") + 1 :][:1] == source if "--shares" in words else not source
            comparison.cells.pop(command[command.index("--out") + 1], None)
        actions = ["distill", "calibrate", "eval", "eval"]
        again = ["distill", "calibrate", "eval"]
        assert [action for action, _ in ran] == ([*actions, *again] if unit == "head" else actions[:3])
        assert not comparison.cells, "commands were expected that did not come"
        assert {out for action, out in ran if action == "distill"} <= {name, f"{name}-shares-2"}


def test_other_seeds_train_what_was_trained_last_with_its_shares(tmp_path, reasoner, small):
    """Shares in training are those of the first seed. Each training is measured itself."""
    comparison = commands.Comparison(tmp_path, reasoner, True, ["programs"], 8, 1, size=4, shares=(2,), trainings=3)
    comparison.prepare_calibration()
    for name, unit in (("kvpop", "head"), ("kvpop-frozen-base", "uniform")):
        last, measured = f"{name}-shares-2" if unit == "head" else name, []
        folder = comparison.calibrations / f"{name}-2"
        trainings = [last, f"{last}-seed-1", f"{last}-seed-2"]
        for calibrated in {folder, *(comparison.calibrations / f"{training}-2" for training in trainings)}:
            calibrated.mkdir(parents=True)
            (calibrated / commands.NAME).write_text(json.dumps({"unit": unit}))
        comparison._calibration = lambda training, *_: measured.append(training) or iter(())  # noqa: B023
        chain = [list(map(str, command)) for command in comparison._chain(name, [], 2)]
        assert measured == [*dict.fromkeys([name, *trainings])]
        repeated = [command for command in chain if "-seed-" in command[command.index("--out") + 1]]
        seeds = [command[command.index("--seed") + 1] for command in repeated if command[1] == "distill"]
        assert seeds == ["1", "2"]
        for command in repeated:
            out = Path(command[command.index("--out") + 1])
            if command[1] == "distill":
                assert out.name in trainings[1:]
                assert ("--shares" in command) == (unit == "head")
                assert unit == "uniform" or command[command.index("--shares") + 1] == str(folder)
            elif "--calibration" in command:
                source = Path(command[command.index("--calibration") + 1])
                assert source.parent == comparison.calibrations and out.name == f"shares-2-{source.name[:-2]}.jsonl"
                assert source.name[:-2] in trainings[1:]
        assert [command[1] for command in repeated] == ["distill", "eval"] * 2


def write_shares(comparison: commands.Comparison, name: str, **changes) -> None:
    """Write shares of the heads of a reasoner at 2 times, as `kvpop calibrate` does."""
    folder = comparison.earlier / f"{name}-2"
    folder.mkdir(parents=True, exist_ok=True)
    rope = {"rope_theta": 1000000.0, "rope_type": "default"}
    model = {"model_type": "llama", "num_layers": 4, "num_kv_heads": 2, "head_dim": 32, "rope": rope}
    about = {"format": "kvpop-calibration", "version": 1, "unit": "head", "windows": {}, "policy": "kvpop"}
    about |= {"budget": comparison._calibrated_sizes(2)[1], "shares": [[1.5, 0.5], *[[1.0, 1.0]] * 3]}
    (folder / commands.NAME).write_text(json.dumps(about | model | changes))


@pytest.fixture
def with_earlier_shares(tmp_path, reasoner, small):
    """A comparison that trains scorers twice with shares of an earlier one."""
    options = {"size": 4, "shares": (2,), "trainings": 2, "earlier": tmp_path / "earlier"}
    comparison = commands.Comparison(tmp_path / "here", reasoner, True, ["programs"], 8, 1, **options)
    comparison.prepare_calibration()
    for name in ("kvpop", "kvpop-frozen-base"):
        write_shares(comparison, name)
    return comparison


def test_shares_of_an_earlier_comparison_are_trained_with_at_once(with_earlier_shares, monkeypatch):
    """Scorers are not trained without them first. What is no scorer, and what is measured here, is as without them."""
    comparison, ran = with_earlier_shares, []
    monkeypatch.setattr(commands, "_run", lambda command: ran.append(list(map(str, command))))
    comparison.check_trained(["kvpop", "streaming-plus"], 2)
    comparison.run_trained(["kvpop", "streaming-plus"], 2)
    outs = [str(Path(command[command.index("--out") + 1]).relative_to(comparison.folder)) for command in ran]
    trained = ["kvpop-shares-2", "kvpop-shares-2-seed-1"]
    of_scorer = [out for name in trained for out in (name, f"calibrations/{name}-2", f"records/shares-2-{name}.jsonl")]
    assert outs == [*of_scorer, "streaming-plus", "calibrations/streaming-plus-2", "records/streaming-plus.jsonl"]
    sources = [command[command.index("--shares") + 1] for command in ran[:6] if command[1] == "distill"]
    assert sources == [str(comparison.earlier / "kvpop-2")] * 2 and not comparison.cells


@pytest.mark.parametrize(
    "shares, run, line",
    [
        (None, None, "kvpop-2 is not there"),
        ({"unit": "uniform"}, None, "kvpop-2 has no shares that are better than equal ones"),
        ({"budget": 7}, None, r"kvpop-2 was measured at a budget of 7, not \d+"),
        ({"head_dim": 64}, None, "kvpop-2 was made for a model with head_dim = 64"),
        ({}, {"shares": [[1.2, 0.8], *[[1.0, 1.0]] * 3]}, "kvpop-shares-2-seed-1 was trained with other shares"),
        ({}, {"topk": [12, 20]}, r"kvpop-shares-2-seed-1 was trained with --topk \[12, 20\], not \[12\]"),
        ({}, {"steps": 9}, "kvpop-shares-2-seed-1 was trained with --steps 9, not 2"),
        ({}, {"lists": 16}, "kvpop-shares-2-seed-1 was trained with --lists 16, not 64"),
        ({}, {"window": [16]}, r"kvpop-shares-2-seed-1 was trained with --window \[16\], not \[8\]"),
        ({}, {}, None),
    ],
)
def test_what_does_not_fit_an_earlier_comparison_is_refused(with_earlier_shares, shares, run, line):
    comparison = with_earlier_shares
    if shares is None:
        shutil.rmtree(comparison.earlier / "kvpop-2")
    else:
        write_shares(comparison, "kvpop", **shares)
    if run is not None:
        trained = comparison.folder / "kvpop-shares-2-seed-1"
        (trained / commands.RUN).parent.mkdir(parents=True)
        words = ["distill", "--out", "o", *map(str, comparison._training_words(trained.name, 2))]
        settings = recipe_of(make_parser().parse_args(words)).to_json() | {"shares": [[1.5, 0.5], *[[1.0, 1.0]] * 3]}
        settings.pop("target_power")  # of a run from before there was such a field
        (trained / commands.RUN).write_text(json.dumps(settings | run))
    if line is None:
        comparison.check_trained(["kvpop-frozen-base", "kvpop"], 2)
    else:
        with pytest.raises(SystemExit, match=line):
            comparison.check_trained(["kvpop-frozen-base", "kvpop"], 2)


@pytest.mark.parametrize("name", contenders.TRAINED)
def test_every_policy_has_options_that_take_effect(name):
    """The trainer refuses options without effect, as those of a loss with weight 0, and unknown ones."""
    words = ["distill", "--model", "m", "--data", "d", "--out", "o", *contenders.COMMON.split()]
    words += [] if name == "dense-longer" else ["--protect-prompt"]
    recipe_of(make_parser().parse_args([*words, *contenders.training_options(name)]))


def test_scorers_alone_are_trained_again(tmp_path):
    """With shares and with further seeds: gates and bases are trained once."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, shares=(12,), trainings=2)
    again = {name for name in contenders.TRAINED if comparison._variants(name) != [name]}
    assert again == {name for name in contenders.TRAINED if comparison._with_other_seeds(name)}
    assert {*contenders.TRAINED} - again == {"streaming-plus", "trimkv", "dms", "dense-longer"}


def test_the_base_of_what_is_trained_with_shares_answers_once(tmp_path, monkeypatch):
    """It answers without a policy in the records of the compression whose shares it is trained with."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, size=4)
    comparison._calibration = lambda *_: iter(())
    for name, base_answers in (
        ("kvpop-shares-12-seed-1", [False, False, True, False]),
        ("kvpop-frozen-base-shares-12", [False] * 4),
    ):
        for c in contenders.calibrated_at(name):
            folder = comparison.calibrations / f"{name}-{c}"
            folder.mkdir(parents=True)
            (folder / commands.NAME).write_text(json.dumps({"unit": "head"}))
        train, *solved = (list(map(str, command)) for command in comparison._training_commands(name, [], 9))
        assert train[1] == "distill"
        assert [Path(command[-1]).name for command in solved] == [
            f"{kind}-{c}-{name}.jsonl" for c in (8, 12) for kind in ("shares", "bytes")
        ]
        assert [command[command.index("--equal") + 1] for command in solved] == ["k", "bytes"] * 2
        shares = [command[command.index("--share") + 1 : command.index("--equal")] for command in solved]
        assert shares == [["2", "4", "6", "8"], ["2", "4"], ["12", "16"], ["6", "8"]]
        assert ["--no-dense" not in command for command in solved] == base_answers


@pytest.mark.parametrize("name, has_state", [("kvpop-shares-12", True), ("kvpop-mlp-shares-12", False), ("h2o", False)])
def test_shares_at_equal_bytes_are_those_that_leave_about_as_many_slots(name, has_state):
    """A state takes a page, so that 6 times less at equal bytes is about 11 times less."""
    at_bytes = {c: use.measured for use in contenders.uses_of(name) if use.equal != "k" for c in use.compressions}
    assert (at_bytes[6], at_bytes[8]) == ((12, 12) if has_state else (8, 8))
    assert (12 in at_bytes) == (16 in at_bytes) == (not has_state)


def test_what_is_trained_with_shares_is_solved_with_equal_ones_where_these_are_best(tmp_path):
    """At every compression, so that all trainings count, and its base answers."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, size=4)
    comparison._calibration = lambda *_: iter(())
    for name, solves in (("kvpop-shares-12", [8, 12]), ("kvpop", [8])):
        for c, unit in ((8, "head"), (12, "uniform")):
            folder = comparison.calibrations / f"{name}-{c}"
            folder.mkdir(parents=True)
            (folder / commands.NAME).write_text(json.dumps({"unit": unit}))
        solved = [list(map(str, command)) for command in comparison._training_commands(name, [], 9)][1:]
        files = {Path(command[-1]).name: command for command in solved}
        shared = {file: command for file, command in files.items() if file.startswith("shares-")}
        assert [*shared] == [f"shares-{c}-{name}.jsonl" for c in solves]
        if last := shared.get("shares-12-kvpop-shares-12.jsonl"):
            assert "--calibration" not in last and "--no-dense" not in last
            assert last[last.index("--allocator") + 1] == "uniform"
            assert last[last.index("--share") + 1 : last.index("--equal")] == ["12", "16"]


def test_records_with_other_shares_are_refused_before_anything_runs(tmp_path):
    """As those of a training that had the shares of its training at all compressions."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1)
    name, options = "kvpop-shares-12", OPTIONS | {"rows": 8, "share": [2, 4, 6, 8, 12, 16]}
    folder = comparison.calibrations / f"{name}-12"
    folder.mkdir(parents=True)
    (folder / commands.NAME).write_text(json.dumps({"unit": "head"}))
    record = {"policy": "dense", "kind": "programs", "unit": SEEDS["test"][0], "exact": True}
    (comparison.records / f"shares-12-{name}.jsonl").write_text(record_lines(options, record))
    with pytest.raises(SystemExit, match=r"has share \[2, 4, 6, 8, 12, 16\], not \[12, 16\]"):
        comparison._expect(name, 9)


def test_trainings_are_summarised_together_and_each(tmp_path):
    """Also where their shares leave other slots in other bytes."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1)
    base = {"length": 1200, "right": 1.0, "answered": True, "written": 9, "kind": "programs", "before_error": 1.0}
    dense = [base | {"policy": "dense", "allocated": 6, "unit": unit, "exact": True} for unit in range(8)]
    setting = {"policy": "scorer", "budget": 125, "equal": "k", "window": 8, "topk": 99, "allocated": 2}
    for stem, right in (("kvpop", 8), ("kvpop-seed-1", 4), ("shares-8-kvpop", 8), ("shares-8-kvpop-seed-1", 6)):
        about = {"run": {"options": {"share": [8], "teacher": "model"}}}
        setting |= {"topk": 99, "allocated": 2} if "seed" in stem else {"topk": 95, "allocated": 1}
        lines = [about, *dense, *(base | setting | {"unit": unit, "exact": unit < right} for unit in range(8))]
        (comparison.records / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tables(tmp_path, "", "kvpop")
    lines = {line["policy"]: line for line in table_of(tmp_path)}
    assert {name: line["exact"][:5] for name, line in lines.items()} == {
        "dense": "1.000",
        "kvpop": "0.750",
        "kvpop, shares": "0.875",
    }
    assert [lines[name]["trainings"] for name in lines] == ["", "2", "2"] and lines["kvpop"]["problems"] == "8"
    text = (tmp_path / "summary.md").read_text()
    _, together, apart = text.split("Exact answers")[0], *text.split("Exact answers of each training")
    assert (
        "| kvpop | k |  | 4.00 |" in together
        and {lines[name]["topk"] for name in lines} == {"", "97"}
        and "| dense |  | 1.00 |" in together
    )
    rows = [
        [cell.strip().split(" (")[0] for cell in line.split("|")[1:-1]] for line in apart.splitlines() if "seed" in line
    ]
    assert sorted([row[0], row[-1]] for row in rows) == [
        ["kvpop, seed 0", "1.00"],
        ["kvpop, seed 1", "0.50"],
        ["kvpop, shares, seed 0", "1.00"],
        ["kvpop, shares, seed 1", "0.75"],
    ]


def test_other_test_problems_have_records_and_tables_of_their_own(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(commands, "_run", lambda command: ran.append(list(map(str, command))))
    test = {"size": 45, "samples": 16, "temperature": 0.8}
    comparison = commands.Comparison(
        tmp_path, tmp_path, True, ["programs"], 8, 1, size=30, untrained=("h2o",), test=test
    )
    comparison._solve({comparison.records / "h2o.jsonl": ["--policies", "h2o"]}, 8)
    (path,) = (Path(command[command.index("--out") + 1]) for command in ran)
    assert path == tmp_path / "records-size-45-samples-16-temperature-0.8" / "h2o.jsonl"
    assert "--size 45 --seed 0 --samples 16 --temperature 0.8" in " ".join(ran[0])
    with pytest.raises(FileNotFoundError):  # nothing was written
        comparison.choose_windows()
    assert len(ran) == 1 + len(contenders.WINDOWS)
    for command in ran[1:]:
        assert "--size 30" in " ".join(command) and "--samples" not in command and "--split" in command
    options = OPTIONS | {"rows": 8, "size": 45, "samples": 16, "temperature": 0.5}
    path.write_text(json.dumps({"run": {"options": options}}) + "\n")
    with pytest.raises(SystemExit, match="h2o.jsonl has temperature 0.5, not 0.8: name another folder"):
        comparison._solve({path: []}, 8)


@pytest.mark.parametrize(
    "words, line",
    [
        (["--samples", "16"], "--samples needs --temperature"),
        (["--temperature", "-1"], "a finite number of at least 0"),
        (
            ["--calibrations", "nowhere", "--train-shares", "12"],
            "--calibrations names a folder of shares for --train-shares",
        ),
        (["--calibrations", "."], "name one that is there, and give both"),
        (["--test-size", "500"], "--test-size: a problem of kind 'programs' has 1 to"),
    ],
)
def test_options_of_test_problems_are_judged_before_anything_is_trained(tmp_path, capsys, words, line):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "runs"), "--kinds", "programs", *words])
    assert line in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_what_is_trained_is_not_exported_again(tmp_path, small):
    """Its config has the shares that were found for it."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, size=4)
    comparison._calibration = lambda *_: iter(())
    (tmp_path / "kvpop" / "run" / "step-9").mkdir(parents=True)
    for text, actions in ((None, ["distill", "eval"]), ("{}", ["eval"])):
        if text:
            (tmp_path / "kvpop" / commands.CONFIG_NAME).write_text(text)
        assert [command[1] for command in comparison._training_commands("kvpop", [], 9)] == actions


def test_time_left_is_told_once_every_kind_of_command_has_ended(tmp_path):
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 2)
    comparison.cells = {Path("a"): "distill", Path("b"): "eval", Path("c"): "eval"}
    comparison.seconds = {"distill": [600.0, 1200.0]}
    assert comparison.left() == "3 results to come"
    comparison.seconds["eval"] = [300.0]
    assert comparison.left() == "3 results to come, in about 13 minutes"


def test_windows_are_those_whose_solutions_go_right_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_run", lambda command: pytest.fail(f"ran {command}"))
    monkeypatch.setattr(contenders, "COMPRESSIONS", {4: (2, 4), 8: (6, 8)})
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, untrained=("h2o", "tova"))
    best = {("h2o", 4): 64, ("h2o", 8): 32, ("tova", 4): 32, ("tova", 8): 16}
    shares = {16: (4, 8), 32: (4, 8), 64: (4, 8)}
    monkeypatch.setattr(contenders, "WINDOWS", shares)
    for window in contenders.WINDOWS:
        lines = [
            {"run": {"options": OPTIONS | {"rows": 16, "split": "validation", "share": list(shares[window])}}},
            {"policy": "dense", "before_error": 1.0},
        ]
        for (name, c), equal, x in product(best, ("k", "bytes"), (0.1, 0.3)):
            good = x + (window == best[name, c]) / 4
            if (name, c, window) == ("tova", 8, 64):  # good at equal k, and not possible at equal bytes
                good = 1.0
                if equal == "bytes":
                    continue
            lines.append({"policy": name, "budget": {4: 260, 8: 130}[c], "equal": equal, "before_error": good})
        path = comparison.windows / f"windows-{window}-h2o.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert comparison.choose_windows() == best


def test_windows_leave_slots(reasoner):
    """At each compression some training-free window is tried, and those that are trained fit at all."""
    questions = make_questions(load_tokenizer(reasoner), ["programs", "ledgers"], 8, "test")
    written = min(question.worked for question in questions)
    for window, compressions in contenders.WINDOWS.items():
        assert all(written // c > 4 + window for c in compressions), window
    assert {c for compressions in contenders.WINDOWS.values() for c in compressions} == {*contenders.COMPRESSIONS}
    trained = int(contenders.BUDGETS.split()[1])
    assert written // max(contenders.all_compressions()) > 4 + trained


def record_lines(options: dict, *records: dict) -> str:
    lines = [{"run": {"options": options}}, *records]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_records_that_do_not_fit_together_are_refused(tmp_path):
    """Two files have one setting, a file does not say what its budgets are, or nothing is there."""
    folder = tmp_path / "records"
    with pytest.raises(SystemExit, match="records has no records: name another folder"):
        write_tables(tmp_path, "", "kvpop")
    assert not folder.exists()
    folder.mkdir()
    record = {"policy": "h2o", "budget": 90, "equal": "k", "kind": "programs", "unit": 1, "exact": True}
    (folder / "at-16-window-16-h2o.jsonl").write_text(record_lines({"share": [12]}, record))
    assert [line["policy"] for line in records_of(folder)[0]] == ["h2o"]
    (folder / "at-8-window-32-h2o.jsonl").write_text(record_lines({"share": [12]}, record))
    with pytest.raises(
        SystemExit, match="at-8-window-32-h2o.jsonl and at-16-.* both have h2o at a budget of 90: remove"
    ):
        records_of(folder)
    (folder / "at-16-window-16-h2o.jsonl").write_text(record_lines({"budget": [90]}, record))
    with pytest.raises(SystemExit, match="at-16-.* does not say by --share what its budgets are: remove it"):
        records_of(folder)


def test_the_base_of_a_policy_is_not_the_dense_model(tmp_path):
    """The base of a policy answers in a file without a teacher. What is trained with shares is named by these alone."""
    dense = {"policy": "dense", "kind": "programs", "unit": 1, "exact": True}
    record = dense | {"policy": "scorer+shares", "budget": 90, "equal": "k"}
    for stem, teacher in (
        ("kvpop", "model"),
        ("kvpop-frozen-base", None),
        ("shares-12-kvpop-mlp-shares-12-seed-1", None),
    ):
        (tmp_path / f"{stem}.jsonl").write_text(record_lines({"share": [12], "teacher": teacher}, dense, record))
    at_equal_bytes = record_lines({"share": [12], "teacher": None}, record | {"equal": "bytes"})
    (tmp_path / "bytes-12-kvpop-mlp-shares-12-seed-1.jsonl").write_text(at_equal_bytes)
    names = [(line["policy"], line.get("training")) for line in records_of(tmp_path)[0]]
    assert names == [
        ("kvpop-mlp, trained with shares of 12 times", 1),
        ("dense", None),
        ("kvpop-frozen-base", 0),
        ("kvpop", 0),
        ("kvpop-mlp, trained with shares of 12 times, nothing evicted", 1),
        ("kvpop-mlp, trained with shares of 12 times", 1),
    ]


def test_differences_are_from_the_policy_trained_with_shares(tmp_path, capsys):
    """Without records of its own, that is."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1)
    base = {"length": 1200, "right": 1.0, "answered": True, "written": 9, "kind": "programs", "before_error": 1.0}
    dense = [base | {"policy": "dense", "allocated": 6, "unit": unit, "exact": True} for unit in range(8)]
    setting = {"budget": 125, "equal": "k", "window": 8, "topk": 99, "allocated": 2}
    for stem, right in (("shares-8-kvpop-shares-8", 8), ("h2o", 4)):
        records = [base | setting | {"policy": stem, "unit": unit, "exact": unit < right} for unit in range(8)]
        (comparison.records / f"{stem}.jsonl").write_text(
            record_lines({"share": [8], "teacher": "model"}, *dense, *records)
        )
    write_tables(tmp_path, "", "kvpop")
    (tmp_path / "records" / "shares-8-kvpop-shares-8.jsonl").unlink()
    _, differences = (
        (tmp_path / "summary.md")
        .read_text()
        .split("Exact answers less those of kvpop, trained with shares of 8 times, of the same problems")
    )
    assert "| h2o | k | -0.50 (" in differences
    capsys.readouterr()
    write_tables(tmp_path, "", "kvpop")
    assert "no differences: kvpop has no records" in capsys.readouterr().out


def test_a_summary_takes_all_kinds_together(tmp_path):
    """Budgets are named by compression, kinds of problems with the same seed are counted apart, and the best comes first."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs", "ledgers"], 8, 1)
    right = {"tova": {250: 2, 125: 0}, "h2o": {250: 6, 125: 1}}
    lines = [{"run": {"options": {"share": [8, 4], "teacher": None}}}]
    for kind, unit in product(["programs", "ledgers"], range(8)):
        base = {"length": 1200, "allocated": 1, "right": 1.0, "answered": True, "written": 9}
        base |= {"kind": kind, "unit": unit}
        ones = base | {"exact": True, "before_error": 1.0}
        lines.append(ones | {"policy": "dense"})
        for name, budget in product(right, (250, 125)):
            good = kind == "programs" and unit < right[name][budget]
            setting = {"policy": name, "budget": budget, "equal": "k", "window": 8, "topk": 99}
            lines.append(base | setting | {"exact": good, "before_error": 0.5 + good / 2})
    (comparison.records / "at-4.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tables(tmp_path, "", "h2o")
    exact, errors = (tmp_path / "summary.md").read_text().split("Share of a solution before its first error")
    before, difference = errors.split("Exact answers less those of h2o")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in exact.splitlines() if line.startswith("| ")]
    assert rows[0] == ["policy", "equal", "all held", "4 times less", "8 times less"]
    assert [row[0] for row in rows[1:]] == ["dense", "h2o", "tova"]
    assert [cell.split()[0] for cell in rows[2][3:]] == ["0.38", "0.06"]  # 6 and 1 of 16
    assert [cell.split()[0] for cell in rows[3][3:]] == ["0.12", "0.00"]
    assert "| tova | k |  | 0.56 (" in before
    of_dense = before.split("Exact answers over those of the dense model")[1].split("Bytes")[0]
    assert "| h2o | k | 0.38 (" in of_dense and "| dense |" not in of_dense
    assert "| tova | k | -0.25 (" in difference and "| h2o |" not in difference and "dense" not in difference
    heading, dense, *answers = (tmp_path / "answers.csv").read_text().splitlines()
    assert heading == "policy,equal,compression,problems,exact,low,high" and dense.startswith("dense,,1,16,1.0000,")
    assert [line.rsplit(",", 2)[0] for line in answers] == [
        "h2o,k,4,16,0.3750",
        "h2o,k,8,16,0.0625",
        "tova,k,4,16,0.1250",
        "tova,k,8,16,0.0000",
    ]
    write_tables(tmp_path, "", "rkv")
    assert "less those of" not in (tmp_path / "summary.md").read_text(), "a table without a line"


def test_records_of_another_draw_are_refused(tmp_path):
    """Before seeds had problems of their own, records of any seed were of the first draw."""
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, seed=3)
    path = comparison.records / "h2o.jsonl"
    options = OPTIONS | {"rows": 8, "seed": 3, "share": None}
    for unit in (SEEDS["test"][3 * DRAW_SIZE], SEEDS["test"][4 * DRAW_SIZE - 1]):
        path.write_text(record_lines(options, {"policy": "h2o", "unit": unit}))
        assert comparison._has(path, [], 8)
    for unit in (SEEDS["test"][0], SEEDS["test"][4 * DRAW_SIZE], SEEDS["validation"][3 * DRAW_SIZE]):
        path.write_text(record_lines(options, {"policy": "h2o", "unit": unit}))
        with pytest.raises(SystemExit, match="h2o.jsonl has problems of another seed than 3"):
            comparison._has(path, [], 8)


@pytest.mark.parametrize(
    "name, value",
    [
        ("kinds", ["ledgers"]),
        ("rows", 9),
        ("size", 7),
        ("seed", 1),
        ("share", [2, 4]),
        ("protect_prompt", [0]),
        ("calibration", ["kvpop-4"]),
    ],
)
def test_records_of_other_settings_are_refused(tmp_path, name, value, monkeypatch):
    comparison = commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1)
    options = OPTIONS | {"rows": 8, "protect_prompt": [True], "share": list(contenders.all_compressions())}
    path = comparison.records / "trimkv.jsonl"
    monkeypatch.setattr(commands, "_run", lambda command: pytest.fail(f"ran {command}"))
    path.write_text(json.dumps({"run": {"options": options}}) + "\n")
    comparison.run_trained(["trimkv"], 9)
    path.write_text(json.dumps({"run": {"options": options | {name: value}}}) + "\n")
    with pytest.raises(SystemExit, match=f"trimkv.jsonl has {name} .* name another folder, or remove this file"):
        comparison.run_trained(["trimkv"], 9)


def test_problems_are_solved_at_some_compressions_alone(tmp_path, monkeypatch):
    """Uses of shares without one of them are left out, those of other policies keep what they are named by."""
    ran = []
    monkeypatch.setattr(commands, "_run", lambda command: ran.append([*map(str, command)]))
    comparison = commands.Comparison(
        tmp_path, tmp_path, True, ["programs"], 8, 1, untrained=["h2o"], compressions=(4, 8)
    )
    comparison.run_trained(["trimkv"], 9)
    windows = {("h2o", 4): 16, ("h2o", 8): 64, ("h2o", 16): 16}
    comparison.run_untrained(windows)
    solved = {command[-1]: command for command in ran if command[1] == "eval"}
    shares = {Path(out).stem: words[words.index("--share") + 1 :] for out, words in solved.items()}
    assert {name: [*takewhile(str.isdigit, words)] for name, words in shares.items()} == {
        "trimkv": ["4", "8"],
        "at-4-window-16-h2o": ["4"],
        "at-8-window-64-h2o": ["8"],
    }
    uses = [(use.measured, use.equal, use.compressions) for use in comparison._uses("kvpop")]
    assert uses == [(8, "k", (4, 8)), (8, "bytes", (4,)), (12, "bytes", (8,))]
    assert comparison._solved("kvpop-shares-12").name == "bytes-12-kvpop-shares-12.jsonl"
    assert comparison._solved("kvpop-mlp-shares-12").name == "shares-8-kvpop-mlp-shares-12.jsonl"
    assert comparison._calibrated_at("kvpop-mlp") == [8]


@pytest.mark.slow
def test_a_failed_command_stops_the_comparison(tmp_path, capfd):
    comparison = commands.Comparison(tmp_path, tmp_path / "none", True, ["programs"], 8, 2)
    with pytest.raises(SystemExit, match="kvpop eval failed"):
        comparison.solve_dense()
    assert "kvpop eval --task reasoning" in capfd.readouterr().out


def settings_of(command: list) -> dict:
    """Return the settings that `kvpop calibrate` writes for a command line."""
    return Plan(options_of(make_parser().parse_args(list(map(str, command[1:]))))).settings


def test_calibrations_of_something_else_are_refused(tmp_path, reasoner):
    """They were measured for another scorer, text, budget or unit, or nothing says what they were measured for."""
    comparison = commands.Comparison(tmp_path, reasoner, True, ["programs"], 8, 1)
    comparison.prepare_calibration()
    scorer = write_random_scorer(tmp_path / "scorer", reasoner, "mlp", sinks=2, window=6, topk=24)
    words, out = [reasoner, "--scorer", scorer], comparison.calibrations / "kvpop-mlp-8"
    (command,) = comparison._calibration("kvpop-mlp", 8, words)
    Records(out, settings_of(command))
    (out / "shares.json").write_text('{"unit": "head"}')
    measured = (out / "measured.jsonl").read_text()

    def refused(names: str) -> None:
        with pytest.raises(
            SystemExit,
            match=rf"kvpop-mlp-8 was measured with other settings \({names}\): name another folder, or remove it",
        ):
            list(comparison._calibration("kvpop-mlp", 8, words))

    assert list(comparison._calibration("kvpop-mlp", 8, words)) == []
    calibration = comparison.calibrations / "kvpop-mlp-12"
    shutil.copytree(out, calibration)
    with pytest.raises(SystemExit, match=r"kvpop-mlp-12 was measured with other settings \(budgets\)"):
        list(comparison._calibration("kvpop-mlp", 12, words))
    (out / "shares.json").write_text('{"unit": "layer"}')
    refused("shares")
    (out / "shares.json").write_text('{"unit": "uniform"}')
    (out / "report.json").write_text(json.dumps({"rounds": 0}))
    refused("rounds")
    (out / "report.json").unlink()
    write_random_scorer(scorer, reasoner, "mlp", sinks=2, window=6, topk=24, seed=1)
    refused("scorer")
    comparison.validation.write_text(comparison.validation.read_text().replace("end", "end end", 1))
    refused("data, scorer")
    (out / "measured.jsonl").write_text("")
    refused("version, model, .*, budgets")
    (out / "measured.jsonl").write_text(measured.replace("{", "[", 1))
    with pytest.raises(SystemExit, match="measured.jsonl is damaged: remove it"):
        list(comparison._calibration("kvpop-mlp", 8, words))


@pytest.mark.parametrize("prepare", ["_prepare", "prepare_calibration"])
def test_other_problems_are_refused(tmp_path, prepare):
    """Problems of another size or kind, or a file that was cut off, are in the place of those that are wanted."""
    for _ in range(2):
        getattr(commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, 3), prepare)()
    for kinds, size in ((["programs"], 4), (["ledgers"], 3), (["programs"], None)):
        with pytest.raises(
            SystemExit, match=f"has other problems than {kinds[0]} of .*: name another folder, or remove it"
        ):
            getattr(commands.Comparison(tmp_path, tmp_path, True, kinds, 8, 1, size), prepare)()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(SystemExit, match=f"{path.name} has other problems than programs of size 3"):
        getattr(commands.Comparison(tmp_path, tmp_path, True, ["programs"], 8, 1, 3), prepare)()


def test_policies_with_better_shares_are_solved_with_both(tmp_path, reasoner, monkeypatch):
    """Shares are measured once, and one that has none is solved with equal shares alone."""
    ran = []

    def run(command):
        ran.append(list(map(str, command)))
        if "calibrate" in command:
            out = Path(command[command.index("--out") + 1])
            out.mkdir(parents=True)
            if not out.name.startswith("kvpop-mlp"):  # which has not been trained
                Records(out, settings_of(command))
            unit = "uniform" if out.name.startswith("h2o") or out.name == "vase-4" else "head"
            (out / "shares.json").write_text(json.dumps({"unit": unit}))

    monkeypatch.setattr(commands, "_run", run)
    untrained = "h2o", "tova", "vase"
    comparison = commands.Comparison(tmp_path, reasoner, True, ["programs"], 8, 1, untrained=untrained)
    comparison.prepare_calibration()
    comparison.run_trained(["kvpop-mlp", "trimkv"], 9)
    comparison.calibrate_untrained()
    comparison.run_untrained({(name, c): 16 for name in untrained for c in contenders.COMPRESSIONS})
    calibrated = {
        command[command.index("--out") + 1].split("/")[-1]: command for command in ran if "calibrate" in command
    }
    without = {"vase-12", "kvpop-mlp-4"}
    assert set(calibrated) == {f"{name}-{c}" for name in ("kvpop-mlp", *untrained) for c in (4, 8, 12)} - without
    assert all(command[command.index("--budget") + 2].startswith("--") for command in calibrated.values())
    budgets = [int(calibrated[f"tova-{c}"][calibrated[f"tova-{c}"].index("--budget") + 1]) for c in (4, 8, 12)]
    assert budgets == [budgets[0], budgets[0] // 2, budgets[0] // 3]
    assert {command[command.index("--shares") + 1] for command in calibrated.values()} == {"head"}
    assert calibrated["kvpop-mlp-8"][2] == str(tmp_path / "kvpop-mlp/model") and "--scorer" in calibrated["kvpop-mlp-8"]
    assert all(
        "--protect-prompt" in command and str(comparison.validation) in command for command in calibrated.values()
    )
    solved = [command for command in ran if "eval" in command]
    shared = {Path(c[c.index("--out") + 1]).stem: c for c in solved if "--calibration" in c}
    of_scorer = {f"shares-{c}-kvpop-mlp" for c in (8, 12)}
    assert set(shared) == {f"shares-{c}-tova" for c in (4, 8, 12)} | {"shares-8-vase"} | of_scorer
    for c, used in {4: ["2", "4"], 8: ["6", "8"], 12: ["12", "16"]}.items():
        command = shared[f"shares-{c}-tova"]
        assert command[command.index("--calibration") + 1].endswith(f"tova-{c}")
        assert command[command.index("--share") + 1 : command.index("--no-dense")] == used
    equal = next(c for c in solved if c[-1].endswith("records/kvpop-mlp.jsonl"))
    assert equal[equal.index("--allocator") + 1] == "uniform"
    before = len([command for command in ran if "calibrate" in command])
    comparison.calibrate_untrained()
    assert len([command for command in ran if "calibrate" in command]) == before
