"""The policy in docs/adding_a_policy.md is a package that works, and keeps what a sort keeps."""

import re
from pathlib import Path

import pytest
import torch
from policies.matrix import Row, force, made
from policies.outside import importable, install

from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.model_shape import ModelShape

PAGE = Path(__file__).parents[2] / "docs/adding_a_policy.md"
HEADS, GROUP, SIZE, LENGTH, BUDGET = 2, 2, 32, 120, 40
SINKS, WINDOW = 4, 9
CHUNKS = (17, 40, 1, 1, 50, *[1] * 11)
"""Tokens of each chunk of a prompt, then decode steps."""


@pytest.fixture
def policy(tmp_path):
    """Return the page's policy for a small model, from an installed package that holds the page's code."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    with importable(tmp_path):
        install(tmp_path, "value-norm = outside_value_norm:ValueNorm", "outside-value-norm", code)
        yield made("value-norm", BUDGET, ModelShape("llama", 1, HEADS, SIZE, LENGTH))


def naive(v: torch.Tensor, count: int, protected: int) -> torch.Tensor:
    """Return which of the first ``count`` tokens are held, ``[H, count]`` booleans, by a sort of float64 scores."""
    first = protected or SINKS
    retained = torch.zeros(HEADS, count, dtype=torch.bool)
    retained[:, :first] = True
    retained[:, max(0, count - WINDOW) :] = True
    last, room = max(first, count - WINDOW), BUDGET - SINKS - WINDOW
    for h in range(HEADS):
        values = v[h, first:last].double()
        scores = values.abs().sum(-1)
        order = scores.argsort(descending=True)
        if len(order) > room:
            assert scores[order[room - 1]] - scores[order[room]] > 1e-4, "rounding may decide: choose another seed"
        retained[h, first + order[:room]] = True
    return retained


@pytest.mark.parametrize("protected", [0, 20])
@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_the_policy_of_the_page_keeps_the_largest_values(policy, monkeypatch, impl, protected):
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, LENGTH, SIZE, generator=draw) for n in (HEADS * GROUP, HEADS, HEADS))
    force(monkeypatch, impl)
    rows = LayerRows(policy.layer_rule(0, slice(0, HEADS)), BUDGET, k[None], SIZE**-0.5, protected=protected)
    for chunk in CHUNKS:
        cut = slice(rows.tokens_seen, rows.tokens_seen + chunk)
        rows.append(*(x[None, :, cut] for x in (q, k, v)))
        assert torch.equal(rows.held_by_rows()[0], naive(v, rows.tokens_seen, protected)), (
            f"after {rows.tokens_seen} tokens"
        )
    counts = rows.held_by_rows().sum(-1).flatten().tolist()
    assert rows.tokens_seen == LENGTH and counts == [BUDGET + max(0, protected - SINKS)] * HEADS


def test_each_rank_has_the_rule_of_its_heads(policy):
    """A tensor-parallel rank asks for the rule of some heads, and gets tensors of as many."""
    retention = policy.retention
    assert (retention.budget, retention.sinks, retention.window) == (BUDGET, SINKS, WINDOW)
    assert len(policy.layer_rule(0, slice(1, 2)).log_gamma) == 1


def test_the_row_of_the_page_is_one():
    (line,) = re.findall(r'^ +"value-norm": (Row\(.*\)),$', PAGE.read_text(encoding="utf-8"), re.M)
    row = eval(line, {"Row": Row})
    assert (row.sinks, row.window, row.set_by_tests, row.engines) == (4, 5, True, ("qwen3",))
