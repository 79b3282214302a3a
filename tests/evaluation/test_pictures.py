"""`kvpop eval --report` writes tables and figures that hold the given numbers."""

import json

import pytest
import torch
from matplotlib.figure import Figure

from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.report import Report, draw_reasoning, draw_replay, draw_retrieval
from kvpop_vllm.evaluation.runner import Setting
from kvpop_vllm.evaluation.summaries import summarise_replay, summarise_retrieval
from kvpop_vllm.testing import OracleModel, OraclePolicy, random_prompt


def line(policy, budget, **values):
    return {"length": 100, "budget": budget, "equal": "k", "policy": policy, "allocated": 2**21} | values


def points(axis):
    return {line.get_label(): line.get_xydata().tolist() for line in axis.lines}


def test_retrieval_is_averaged_by_kind_and_drawn():
    records = [
        line("x", 16, kind=kind, exact=e, partial=p, unit=0)
        for kind, e, p in (("needle", 0, 0.5), ("needle", 1, 1.0), ("words", 0, 0.2))
    ]
    records += [line("dense", None, kind="needle", exact=1, partial=1.0, unit=0)]
    table = summarise_retrieval(records)
    assert [(x["policy"], x["kind"], x["examples"], x["exact"], x["partial"]) for x in table] == [
        ("dense", "needle", 1, 1, 1.0),
        ("x", "needle", 2, 0.5, 0.75),
        ("x", "words", 1, 0, 0.2),
    ]
    drawing = Figure()
    draw_retrieval(drawing, table)
    needle, words = drawing.axes
    assert points(needle)["x"] == [[16, 0.75]] and "dense" in points(needle) and points(words) == {"x": [[16, 0.2]]}


def test_intervals_are_drawn():
    table = [line("x", b, kind="ledgers", exact=0.5, **{"exact interval": (0.25, 0.6)}) for b in (16, 32)]
    drawing = Figure()
    draw_reasoning(drawing, [line("dense", None, kind="ledgers", exact=1.0), *table])
    (bars,) = drawing.axes[0].collections
    assert [part.vertices.tolist() for part in bars.get_paths()] == [[[b, 0.25], [b, 0.6]] for b in (16, 32)]


def test_replay_is_averaged_by_position_and_drawn():
    curves = [([0.0, 0.2, 0.4, 0.6, 0.8], [1.0, 0.9, 0.8, 0.7, 0.6]), ([0.0, 0.4, 0.6, 0.8, 1.0], [1.0] * 5)]
    records = [
        line(
            "x", 20, row=i, nll=1.0 + i, kl=sum(kl) / 5, agreement=sum(same) / 5, bucket=20, whole=20, unit=i, tokens=99
        )
        | {"nll_by_position": [1.0] * 5, "kl_by_position": kl, "agreement_by_position": same}
        for i, (kl, same) in enumerate(curves)
    ]
    (table,) = summarise_replay(records)
    assert table["kl_by_position"] == pytest.approx([0, 0.3, 0.5, 0.7, 0.9]) and table["rows"] == 2
    assert table["kl"] == pytest.approx(0.48) and table["agreement"] == pytest.approx(0.9)
    assert table["perplexity"] == pytest.approx(4.4816890)  # e^1.5
    assert table["kl, all held"] == 0 and table["kl, last quarter"] == pytest.approx(0.9)
    drawing = Figure()
    draw_replay(drawing, [table])
    kl, agreement = drawing.axes
    for axis, name in ((kl, "kl"), (agreement, "agreement")):
        x, y = zip(*points(axis)["x"], strict=True)
        assert x == (10, 30, 50, 70, 90) and list(y) == table[f"{name}_by_position"]


def test_a_report_holds_what_the_oracle_holds(model, tmp_path):
    """The map of a policy on a text equals the oracle's, by layer and bin."""
    length, budget = 150, 40
    backend = TransformersBackend(model, torch.float32, length)
    report, settings = Report(str(tmp_path / "report")), [Setting(length, budget, None, None)]
    tokens = random_prompt(length)
    report.add_maps(backend, settings, training_free("h2o").resolve(backend.shape, budget), torch.tensor(tokens))
    report.write("text", [line("h2o", budget, perplexity=5.0, kl=0.5, error=0.1)], ("policy", "kl"), "some text")
    folder = tmp_path / "report"
    assert (folder / "table.md").read_text().splitlines()[-1] == "| h2o | 0.5000 |"
    (picture,) = (json.loads(text) for text in (folder / "retained.jsonl").read_text().splitlines())
    assert (picture["policy"], picture["length"], picture["budget"], picture["tokens_per_bin"]) == (
        "h2o",
        length,
        budget,
        3,
    )
    run = OracleModel(model).run(tokens, OraclePolicy("mean mass", 0, budget // 2, budget // 2))
    for layer, visible in enumerate(run.visible):
        shares = [sum(t in run.retained(layer, head, length - 1) for head in range(2)) / 2 for t in range(length)]
        by_hand = [sum(shares[a : a + 3]) / 3 for a in range(0, length, 3)]
        assert picture["held"][layer] == pytest.approx(by_hand), layer
        assert int(visible[:, length - 1].sum()) == 2 * budget
    assert all((folder / name).stat().st_size > 5000 for name in ("figure.png", "retained.png"))
