"""Heads that divide a layer's budget (Ada-KV): kernels against the naive oracle, and what a request's pages hold."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from kernels.factories import random_rule, random_scorer
from kernels.shared_heads import CASES, GROUP, SIZE, N, Problem, retained

from kvpop_vllm import _C
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.reference.shared_heads import divide
from kvpop_vllm.kernels.regions import HeadRegions
from kvpop_vllm.testing.oracle_shared import divided

IMPLS = ["reference", *_C.isa_levels()]


@pytest.fixture(autouse=True)
def fastest_isa_afterwards():
    yield
    _C.set_isa(_C.isa_levels()[-1])


@functools.cache
def known(case):
    """A problem, and what its oracle makes of it."""
    p = Problem(**CASES[case])
    return p, p.oracle()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_the_oracle(case, impl):
    """Retained sets after every token, and outputs; decisions are not close."""
    p, (expected, visible, margins) = known(case)
    assert float(margins.min()) > 1e-6
    out, held = p.serve([1], impl)
    for seen, heads in held:
        assert heads == [visible[h, seen - 1].nonzero().flatten().tolist() for h in range(p.heads)], seen
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["votes", "votes-corrected", "mass-corrected", "linear"])
@pytest.mark.parametrize("impl", IMPLS)
def test_chunks_change_nothing(case, impl):
    p = Problem(**CASES[case])
    one, whole, some = (p.serve(chunks, impl) for chunks in ([1], [p.length], [13, 40, 2]))
    assert one[1][-1] == whole[1][-1] == some[1][-1]
    assert torch.equal(one[0], whole[0]) and torch.equal(one[0], some[0])


KINDS = {
    "mlstm": {},
    "mlstm-immediate": {"delayed": False},
    "mlp": {},
    "given": {},
    "given-ages": {"ages": True},
    "mass-newest": {"mean": False},
}


@pytest.mark.parametrize("every, corrected", [(1, True), (6, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_scores(kind, every, corrected):
    """What the oracle above does not score: C++ equals the reference."""
    p = Problem(kind="key-norm", every=every, corrected=corrected, seed=20 + every)
    draw = torch.Generator().manual_seed(7)
    scorer = random_scorer(kind.split("-")[0], p.heads, SIZE, draw, **KINDS[kind])
    rule = random_rule(scorer, p.heads, p.sinks, p.window, draw, 1, every, corrected)
    p.rule = replace(rule, share_pages=p.rule.share_pages)
    p.layout = PageLayout(p.heads, SIZE, torch.float32, N, p.rule.state_floats(SIZE))
    width = p.layout.state_blocks + cdiv(p.budget, N) + 1
    p.num_blocks, p.blocks = width + 1, torch.arange(1, width + 1).int().view(1, -1)
    found = [p.serve([40, 1, 60], impl) for impl in ("reference", _C.isa_levels()[-1])]
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)
    assert len({len(head) for head in found[0][1][-1][1]}) > 1, "all shares are equal"


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("case", ["votes", "mass-corrected"])
def test_requests_together(case, impl):
    """Decoded together, and each alone."""
    p = Problem(**CASES[case] | {"requests": 3, "length": 60, "prompt": 45})
    pages, rows = p.pages()
    budgets = torch.full((3, p.heads), p.budget, dtype=torch.int32)
    alone = [p.serve([1], "reference" if impl == "reference" else _C.isa_levels()[-1], r) for r in range(3)]
    for t in range(p.length):
        at = torch.full((3,), t)
        valid = torch.full((3, p.heads), p.rule.for_prompt(p.prompt).extent(t, p.budget), dtype=torch.int32)
        own = dict(rule=p.rule, scale=SIZE**-0.5, prompts=torch.full((3,), p.prompt), impl=impl)
        out, _ = ops.decode_step(p.q[:, t], p.k[:, t], p.v[:, t], pages, rows, at, valid, budgets, **own)
        assert torch.equal(out, torch.stack([alone[r][0][t] for r in range(3)]))
    assert [retained(p, pages, rows[r], p.length) for r in range(3)] == [alone[r][1][-1][1] for r in range(3)]


def test_shares_differ_and_keep_to_the_budget():
    """Otherwise all of this would show nothing."""
    p = Problem()
    _, visible, _ = p.oracle()
    held = visible[:, p.prompt].sum(-1)
    assert held.sum() <= p.heads * p.budget and held.max() > held.min() + p.topk // 4


@pytest.mark.parametrize("seed", range(20))
def test_division(seed):
    draw = torch.Generator().manual_seed(seed)
    heads, topk = (int(torch.randint(1, 7, (), generator=draw)) for _ in range(2))
    ranked = [
        [
            (float(torch.randint(0, 9, (), generator=draw)), t)
            for t in range(int(torch.randint(0, 2 * topk + 3, (), generator=draw)))
        ]
        for _ in range(heads)
    ]
    found = divide(ranked, topk, (1, 5))
    assert found == divided(ranked, topk)
    if found is not None:
        assert sum(found) == heads * topk and min(found) >= topk // 5


@pytest.mark.parametrize("isa", _C.isa_levels())
@pytest.mark.parametrize("case", ["votes-corrected", "norm"])
def test_scores_that_are_no_numbers_break_nothing(case, isa):
    """A model that has come to NaN: outputs are, slots and pages stay in order."""
    p = Problem(**CASES[case])
    p.k[:, 40:45], p.v[:, 60] = torch.nan, torch.nan
    out, held = p.serve([7], isa)
    assert out[:40].isfinite().all() and out[40].isnan().all()
    assert all(sum(len(head) for head in heads) <= p.heads * p.budget for _, heads in held)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("budget", [40, 48])
@pytest.mark.parametrize("every", [1, 4])
def test_blocks_that_are_not_claimed_are_not_touched(impl, budget, every):
    """Rows as vLLM has them, narrower than the budget for short sequences; a page that is not claimed is another's."""
    p = Problem(every=every, topk=budget - 2 - 5 - every + 1)
    assert p.budget == budget
    whole = p.blocks.clone()
    for length in (1, 30, budget - every, budget - every + 1, budget - every + 2, p.length):
        slots = length + every - 1
        claimed = p.layout.state_blocks + cdiv(min(slots, budget), N) + (slots > budget)
        p.blocks = whole[:, :claimed].clone()
        kept, p.length = p.length, length
        held = p.serve([length], impl)[1][-1][1]
        assert all(len(head) == length for head in held) or slots > budget
        p.length = kept


def test_tables_of_shares_that_are_too_small_are_refused():
    p = Problem()
    p.rule = replace(p.rule, share_pages=3)
    with pytest.raises(ValueError, match="shares of a budget of 30 do not fit 3 pages a head"):
        p.serve([10], _C.isa_levels()[-1])


@pytest.mark.parametrize("isa", _C.isa_levels())
def test_no_number_reaches_another_request(isa):
    """Every score of a head is NaN: what it evicts lies in its own pages all the same."""
    p = Problem(**CASES["votes-corrected"])
    mine = set(p.blocks.flatten().tolist())
    others = [block for block in range(p.num_blocks) if block not in mine]
    p.q[:, 30:, : 2 * GROUP] = torch.nan
    _C.set_isa(isa)
    regions = HeadRegions(p.layout, p.budget, p.num_blocks)
    raw = torch.full((p.num_blocks, p.heads, p.layout.region_bytes), 255, dtype=torch.uint8)
    own = dict(rule=p.rule, scale=SIZE**-0.5, prompt=p.prompt, impl="cpp")
    tokens, budgets = (x[0] for x in (p.q, p.k, p.v)), torch.full((p.heads,), p.budget, dtype=torch.int32)
    ops.prefill_chunk(*tokens, regions.view(raw), regions.rows(0, p.blocks)[0], 0, budgets, **own)
    assert (raw[others] == 255).all()


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_prompt_lengths_are_asked_for(impl):
    p = Problem()
    p.prompt = None
    with pytest.raises(ValueError, match="prompts must be"):
        p.serve([10], impl if impl == "reference" else _C.isa_levels()[-1])


@pytest.mark.parametrize("change", [{"scorer": ops.MomentResidual()}, {"scorer": ops.GivenScore(threshold=0.0)}])
def test_scores_that_heads_cannot_divide_by(change):
    with pytest.raises(ValueError, match="heads cannot divide a budget by the scores of"):
        replace(Problem().rule, **change)
