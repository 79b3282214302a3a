"""Heads that divide a layer's budget (Ada-KV): kernels against the naive oracle, and what a request's pages hold."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from kernels.factories import given_scores, random_rule, random_scorer

from kvpop_vllm import _C
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.reference.shared_heads import divide
from kvpop_vllm.kernels.regions import HeadRegions
from kvpop_vllm.testing import corrected_attention, masked_attention
from kvpop_vllm.testing.oracle_shared import divided, follow_shared

GROUP, SIZE, N = 2, 32, 16
IMPLS = ["reference", *_C.isa_levels()]


@pytest.fixture(autouse=True)
def fastest_isa_afterwards():
    yield
    _C.set_isa(_C.isa_levels()[-1])


@dataclass
class Problem:
    """Requests of one layer; what its oracle ranks by. Keys of later heads are larger, so that heads differ in what they look at."""

    kind: str = "votes"
    heads: int = 3
    sinks: int = 2
    window: int = 5
    topk: int = 20
    every: int = 4
    length: int = 96
    prompt: int = 72
    corrected: bool = False
    step: int = 1
    requests: int = 1
    seed: int = 0

    def __post_init__(self):
        draw = torch.Generator().manual_seed(self.seed)
        options = {"votes": {"pool": 5}, "mass": {"mean": True}}.get(self.kind, {})
        scorer = random_scorer(self.kind, self.heads, SIZE, draw, **options)
        roles = self.sinks, self.window, draw, self.step, self.every
        rule = random_rule(scorer, self.heads, *roles, self.corrected)
        self.budget = rule.first_long + self.topk
        gamma = torch.zeros_like(rule.log_gamma) if rule.coupled else rule.log_gamma
        pages = (cdiv(self.budget, N) + 1) * self.heads
        self.rule = replace(rule, share_pages=pages, log_gamma=gamma)
        self.layout = PageLayout(self.heads, SIZE, torch.float32, N, self.rule.state_floats(SIZE))
        shape = self.requests, self.length
        self.q, self.k, self.v = (
            torch.randn(*shape, n, SIZE, generator=draw) for n in (self.heads * GROUP, self.heads, self.heads)
        )
        self.k *= (0.5 + torch.arange(self.heads)).view(-1, 1)
        width = self.layout.state_blocks + cdiv(self.budget, N) + 1
        self.num_blocks = self.requests * width + 2
        self.blocks = (
            torch.randperm(self.num_blocks, generator=draw)[: self.requests * width].int().view(self.requests, -1)
        )

    def pages(self):
        regions = HeadRegions(self.layout, self.budget, self.num_blocks)
        raw = torch.full((self.num_blocks, self.heads, self.layout.region_bytes), 255, dtype=torch.uint8)
        return regions.view(raw), regions.rows(0, self.blocks)

    def serve(self, chunks, impl, r=0):
        """Outputs ``[S, Hq, D]`` of one request and, after each chunk, what each head holds."""
        if impl != "reference":
            _C.set_isa(impl)
        (pages, rows), outs, held, a = self.pages(), [], [], 0
        budgets = torch.full((self.heads,), self.budget, dtype=torch.int32)
        while a < self.length:
            b = min(self.length, a + chunks[len(held) % len(chunks)])
            own = dict(
                rule=self.rule,
                scale=SIZE**-0.5,
                prompt=self.prompt,
                given=given_scores(self.rule, self.k[r, a:b]),
                impl="reference" if impl == "reference" else "cpp",
            )
            cut = (x[r, a:b] for x in (self.q, self.k, self.v))
            outs.append(ops.prefill_chunk(*cut, pages, rows[r], a, budgets, **own)[0])
            held.append((b, retained(self, pages, rows[r], b)))
            a = b
        return torch.cat(outs), held

    def oracle(self, r=0):
        q, k, v = (x[r].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        how = {"votes": "votes", "mass": "mean mass", "key-norm": -k.norm(dim=-1), None: torch.zeros(k.shape[:2])}
        raw = linear(self.rule, k, v) if self.kind == "linear" else how[self.kind]
        shape = self.sinks, self.window, self.topk, self.every, self.prompt
        found = follow_shared(q, k, v, raw, *shape, self.rule.log_gamma.tolist(), self.step)
        out = (corrected_attention if self.corrected else masked_attention)(q, k, v, found[0])
        return out.view(self.length, -1, SIZE), found[0], found[1]


def linear(rule, k, v):
    weights = rule.scorer
    return torch.einsum("hsx,hx->hs", torch.cat([k, v], -1), weights.weight.double()) + weights.bias.double().unsqueeze(
        1
    )


def retained(p: Problem, pages, row, seen):
    """Sorted positions that each head holds after ``seen`` tokens, by the words of its share."""
    roles, found, used = p.rule.for_prompt(p.prompt), [], []
    for h in range(p.heads):
        words = pages.state[row[h, : p.layout.state_blocks].long(), h].flatten()
        capacity, filled, *table = words[p.rule.state_floats(SIZE) - p.rule.share_floats :][
            : p.rule.share_floats
        ].tolist()
        assert 0 <= filled <= capacity
        near = [t for t in range(seen) if t < roles.sinks or t >= roles.decided(seen)]
        numbers = [int(n) for n in table[: cdiv(roles.first_long + int(capacity), N)]]
        used += numbers
        for slot in range(roles.first_long, roles.first_long + int(filled)):
            n = numbers[slot // N]
            region = int(row[n % p.heads, p.layout.state_blocks + n // p.heads])
            near.append(int(pages.position[region, h, slot % N]))
        found.append(sorted(near))
    assert len(set(used)) == len(used) and max(used) < (cdiv(p.budget, N) + 1) * p.heads
    return found


CASES = {
    "votes": {},
    "votes-corrected": {"corrected": True, "seed": 1},
    "votes-late": {"every": 16, "window": 17, "topk": 40, "seed": 2},
    "more-at-once-than-fit": {"every": 32, "window": 33, "topk": 10, "seed": 13},
    "one-head": {"heads": 1, "seed": 3},
    "mass": {"kind": "mass", "every": 1, "seed": 4},
    "mass-corrected": {"kind": "mass", "every": 6, "corrected": True, "seed": 5},
    "norm": {"kind": "key-norm", "every": 1, "sinks": 0, "window": 1, "seed": 6},
    "norm-corrected": {"kind": "key-norm", "every": 7, "corrected": True, "seed": 7},
    "linear": {"kind": "linear", "every": 5, "step": 3, "seed": 8},
    "recency": {"kind": None, "every": 3, "seed": 9},
    "nothing": {"topk": 0, "seed": 10},
    "all-generated": {"prompt": 5, "seed": 11},
    "all-prompt": {"prompt": 500, "seed": 12},
}


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
