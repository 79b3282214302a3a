"""Tables of records: divergences and gaps are ratios of summed nats, with intervals over documents."""

import math

import numpy as np
import pytest

from kvpop_vllm.evaluation.output import format_table
from kvpop_vllm.evaluation.statistics import bootstrap_ratio
from kvpop_vllm.evaluation.summaries import TEXT_COLUMNS, summarise_retrieval, summarise_text

UNITS = [0, 1, 2, 2, 4, 5, 6, 7, 8, 9]
"""Ten rows of nine documents."""
TOKENS = np.array([100, 80, 90, 70, 100, 60, 100, 100, 50, 100])
NLL = {"dense": 2.0, "streaming-llm": 2.2, "h2o": 2.12}


def make_records(rows=10):
    draw, rows_of_text = np.random.default_rng(0), []
    for policy, level in NLL.items():
        for row in range(rows):
            nll, kl = level + 0.1 * draw.normal(), (level - 1.9) * draw.uniform(0.5, 1.5)
            one = {"row": row, "unit": UNITS[row], "length": 101, "tokens": int(TOKENS[row]), "nll": nll}
            one |= {"policy": policy, "allocated": 3 * 2**19}
            if policy != "dense":
                one |= {"budget": 30, "equal": "k", "window": 6, "topk": 22, "kl": kl}
            rows_of_text.append(one)
    return rows_of_text


def column(records, policy, name):
    return np.array([r[name] for r in records if r["policy"] == policy]) * TOKENS


def percentiles(above, below, draws=8_000):
    """Bootstrap over documents, written for this test."""
    draw, documents = np.random.default_rng(1), [np.flatnonzero(np.array(UNITS) == u) for u in sorted(set(UNITS))]
    rows_of_text = []
    for _ in range(draws):
        rows = np.concatenate([documents[i] for i in draw.integers(len(documents), size=len(documents))])
        rows_of_text.append(above[rows].sum() / below[rows].sum())
    return np.quantile(rows_of_text, [0.025, 0.975])


def test_ratios_of_summed_nats_and_their_intervals():
    records = make_records()
    dense, reference, line = summarise_text(records, "streaming-llm")
    assert [dense["policy"], reference["policy"], line["policy"]] == list(NLL) and "kl" not in dense
    kl, of_reference = (column(records, name, "kl") for name in ("h2o", "streaming-llm"))
    nll = {name: column(records, name, "nll") for name in NLL}
    gap, gap_of_reference = nll["h2o"] - nll["dense"], nll["streaming-llm"] - nll["dense"]
    for name, above, below in (
        ("kl", kl, TOKENS),
        ("kl ratio", kl, of_reference),
        ("gap ratio", gap, gap_of_reference),
    ):
        assert line[name] == pytest.approx(above.sum() / below.sum())
        assert line[f"{name} interval"] == pytest.approx(percentiles(above, below), rel=0.04), name
    assert line["perplexity"] == pytest.approx(math.exp(nll["h2o"].sum() / TOKENS.sum()))
    assert reference["kl ratio"] == reference["gap ratio"] == 1 and "kl ratio interval" not in reference
    assert line["MiB"] == 1.5 and line["rows"] == 10


def test_policies_are_compared_at_the_same_setting_only():
    records = make_records()
    halved = [r | {"equal": "bytes", "kl": r["kl"] / 2} for r in records if r["policy"] == "h2o"]
    lines = summarise_text(records + halved, "streaming-llm")
    assert [(x["policy"], x["equal"], "kl ratio" in x) for x in lines] == [
        ("dense", None, False),
        ("streaming-llm", "k", True),
        ("h2o", "k", True),
        ("h2o", "bytes", False),
    ]
    equal_bytes = [r | {"equal": "bytes", "kl": r["kl"] / 4} for r in records if r["policy"] == "streaming-llm"]
    *_, k, _, in_bytes = summarise_text(records + equal_bytes + halved, "streaming-llm")
    assert in_bytes["kl ratio"] == pytest.approx(2 * k["kl ratio"])
    assert all("kl ratio" not in x for x in summarise_text(records, None))


def test_few_documents_have_means_without_intervals_and_columns_without_values_are_left_out():
    lines = summarise_text(make_records(8), "streaming-llm")  # seven documents
    assert all("kl interval" not in line for line in lines) and lines[2]["kl ratio"] > 0
    heading, *cells = (line.split() for line in format_table(lines, TEXT_COLUMNS).splitlines())
    assert "hindsight" not in heading and "accuracy" not in heading and len(cells[2]) == 12
    *_, line = format_table(summarise_text(make_records(), "streaming-llm"), TEXT_COLUMNS).splitlines()
    low, high = summarise_text(make_records())[2]["kl interval"]
    assert f"({low:.4f} to {high:.4f})" in line


def test_shares_of_answers_have_intervals_over_the_examples_of_a_kind():
    exact = {"needle": [1.0, 0, 1, 1, 0, 1, 1, 0, 1], "words": [0.0] * 9}
    about = {"length": 100, "policy": "dense", "allocated": 0}
    records = [
        about | {"kind": kind, "unit": i, "exact": share, "partial": share}
        for kind, shares in exact.items()
        for i, share in enumerate(shares)
    ]
    needle, words = summarise_retrieval(records)
    assert (needle["exact"], *needle["exact interval"]) == bootstrap_ratio(exact["needle"])
    assert needle["examples"] == 9 and words["partial interval"] == (0, pytest.approx(0.336, abs=1e-3))
