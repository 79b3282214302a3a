"""The example that draws the paper's figures of policies that compare.py has trained."""

import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "reasoner"))
import commands
import contenders
import figures
import train

from kvpop_vllm.cli import main
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.runner import Setting


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder of tiny policies, each trained for two steps."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    tokenizer = train.make_tokenizer()
    train.make_model(tokenizer).save_pretrained(folder / "reasoner")
    tokenizer.save_pretrained(folder / "reasoner")
    comparison = commands.Comparison(folder, folder / "reasoner", True, ["programs"], 8, 1, size=4)
    comparison._prepare()
    scored = f"--window 8 --topk 12 {contenders.LISTWISE} {contenders.BASE} --skip"
    gate = f"--recipe dms --window 8 --topk 12 --compression 4 {contenders.GATES} {contenders.BASE}"
    policies = {"kvpop": scored, "kvpop-immediate": f"{scored} --no-delayed", "dms": gate}
    common = contenders.COMMON.replace("1600", "300").replace("every 50", "every 1")
    for name, options in policies.items():
        words = ["--model", folder / "reasoner", "--data", comparison.problems, "--steps", 2, "--out", folder / name]
        assert main(["distill", *common.split(), *options.split(), *map(str, words)]) == 0
    return folder


def read_tables(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the tables of figures.md by the line before them."""
    tables, lines = {}, (folder / "figures" / "figures.md").read_text().splitlines()
    for line in lines:
        if line.endswith(":"):
            rows = tables.setdefault(line[:-1], [])
        elif line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    return {name: [dict(zip(rows[0], row, strict=True)) for row in rows[2:]] for name, rows in tables.items()}


@pytest.mark.slow
def test_figures_and_numbers(runs):
    figures.main([str(runs), "--rows", "2", "--kinds", "programs", "--size", "4"])
    tables, shares = read_tables(runs), []
    assert {path.name for path in (runs / "figures").glob("*.png")} == {f"figure-{n}.png" for n in (5, 6, 7, 8)}
    assert [line["policy"] for line in tables["figure-5"]] == ["kvpop", "kvpop-immediate"]
    assert {line["step"] for line in tables["figure-5"]} == {"1"}
    assert [line["layer"] for line in tables["figure-7"]] == ["0", "1", "2", "3"]
    for line in tables["figure-7"]:
        assert 0 < float(line["least"]) <= float(line["recall"]) <= float(line["most"]) <= 1
    for line in tables["sparse and exact targets"]:
        # the sparse pass sees most of the attention, and not all
        assert 0.5 < float(line["rank correlation"]) < 1 and 0.3 < float(line["tokens in common"]) <= 1
    for line in tables["figure-8"]:
        shares += [float(line["head 0"]), float(line["head 1"])]
    # an untrained gate evicts nothing where all tokens have room
    assert len(shares) == 8 and max(shares) == 0


@pytest.mark.slow
def test_words_that_are_held_are_those_of_the_cache(runs):
    """As many are held as the budget has long-range slots, in every head, and classes of words have their mean."""
    rows = figures.rows_of(["programs"], 2, load_tokenizer(runs / "reasoner"), 4)
    longest = max(len(row.tokens) for row in rows)
    kvpop = figures.Trained(runs / "kvpop", Setting(longest, 37, None, None), longest)
    resolved = kvpop.resolve(rows[0].prompt)
    for row in rows:
        count = kvpop.held(row).sum(-1)
        beginning = max(row.prompt, resolved.roles.sinks)
        assert row.words[row.prompt].startswith("#") and row.prompt < len(row.tokens) - resolved.roles.window
        assert set(count.flatten().tolist()) == {
            min(len(row.tokens) - resolved.roles.window - beginning, resolved.roles.topk)
        }
    lines = figures.figure_6(Figure(), kvpop, rows)
    words = sum(line["words"] for line in lines)
    expected = sum(kvpop.held(row).float().mean((0, 1)).sum().item() for row in rows)
    assert words == sum(len(row.tokens) - row.prompt - resolved.roles.window for row in rows)
    assert sum(line["held"] * line["words"] for line in lines) == pytest.approx(expected)


@pytest.mark.parametrize(
    "word, name",
    [
        ("#12", "numbers of lines"),
        ("7", "digits"),
        ("ba", "names"),
        ("=", "+ and ="),
        (";", "marks"),
        ("end", "other words"),
    ],
)
def test_classes_of_words(word, name):
    assert figures.class_of(word) == name


def test_what_is_not_trained_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"kvpop is not trained: run compare.py .* --only kvpop"):
        figures.main([str(tmp_path)])
    with pytest.raises(
        SystemExit, match="has no validation_accuracy: remove .*kvpop, its records and calibrations, and train it again"
    ):
        figures.figure_5(Figure(), tmp_path)
