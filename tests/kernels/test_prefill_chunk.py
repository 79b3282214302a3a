"""A prefill chunk equals the decode steps of its tokens for any cut, and a dense masked attention."""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernels.exact import Exact
from kernels.factories import given_scores, random_page_table, random_rule, random_scorer
from kernels.problems import SOME_CASES

from kvpop_vllm import _C
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = ["triton"] if INTERPRETED else ["reference", *_C.isa_levels()]
"""Torch and C++ with each instruction set of this machine, or Triton's kernels if they are interpreted."""

SCORE_NOISE, MASS_NOISE = 2e-6, 2e-7
"""Differences between paths that round differently, for raw scores and for attention masses.

Raw scores of order 1 to 3 differ by up to the first (float32, states of up to 120 tokens). Attention masses,
of order 1 / B, and their products with residuals differ by up to a tenth of that.
"""


@pytest.fixture(autouse=True)
def fastest_isa_afterwards():
    yield
    _C.set_isa(_C.isa_levels()[-1])


class Problem:
    """Random tokens of one request and the rule they are served under."""

    def __init__(self, case, sinks, window, topk, length, *, heads=2, group=2, size=32, slots=16, step=1, seed=0, dtype=torch.float32):  # fmt: skip
        kind, options = SOME_CASES[case]
        window = max(2, window) if case == "gate_scores-threshold" else window
        self.generator = torch.Generator().manual_seed(seed)
        options = dict(options)
        correction = options.pop("correction", False)
        scorer = random_scorer(kind, heads, size, self.generator, **options)
        self.rule = random_rule(scorer, heads, sinks, window, self.generator, step, correction)
        self.budget, self.heads, self.length, self.scale = self.rule.first_long + topk, heads, length, size**-0.5
        self.layout = PageLayout(heads, size, dtype, slots, self.rule.state_floats(size))
        self.q, self.k, self.v = (
            torch.randn(length, n, size, generator=self.generator).to(dtype) for n in (heads * group, heads, heads)
        )
        self.budgets = torch.full((heads,), self.budget, dtype=torch.int32)

    @property
    def told(self):
        """Rule as it is passed, with another window, because the request's own window counts."""
        return replace(self.rule, window=self.rule.window + 3)

    def pages(self):
        return random_page_table(self.layout, 1, self.budget, self.generator)

    def decode(self, impl="reference"):
        pages, table = self.pages()
        rows = []
        for t in range(self.length):
            cut = slice(t, t + 1)
            rows.append(
                ops.decode_step(
                    self.q[cut], self.k[cut], self.v[cut], pages, table, torch.tensor([t]), self.budgets.expand(1, -1),
                    rule=self.told, scale=self.scale, gate_scores=given_scores(self.rule, self.k[cut]), impl=impl,
                    windows=torch.tensor([self.rule.window], dtype=torch.int32),
                )
            )  # fmt: skip
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows]), self.held(pages, table)

    def prefill(self, chunks, impl="reference"):
        """Serve the request in ``chunks``, used in a cycle, by ``impl``, one of IMPLS."""
        if impl not in ("reference", "triton"):
            _C.set_isa(impl)
        pages, table = self.pages()
        rows, start, i = [], 0, 0
        while start < self.length:
            count = min(chunks[i % len(chunks)], self.length - start)
            cut = slice(start, start + count)
            rows.append(
                ops.prefill_chunk(
                    self.q[cut], self.k[cut], self.v[cut], pages, table[0], start, self.budgets,
                    rule=self.told, scale=self.scale, gate_scores=given_scores(self.rule, self.k[cut]), window=self.rule.window,
                    impl=impl if impl in ("reference", "triton") else "cpp",
                )
            )  # fmt: skip
            start, i = start + count, i + 1
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows]), self.held(pages, table)

    def closest_coupled_decision(self):
        """Return the closest decision of a rule whose scores depend on earlier evictions."""
        closest, group = torch.inf, self.q.shape[1] // self.heads
        for h in range(self.heads):
            exact, rows = Exact(self.rule, h, self.budget), slice(h * group, (h + 1) * group)
            gate_scores = given_scores(self.rule, self.k)
            for t in range(self.length):
                token = self.q[t, rows], self.k[t, h], self.v[t, h]
                closest = min(
                    closest, exact.step(t, *token, self.scale, None if gate_scores is None else gate_scores[t, h])[-1]
                )
        return closest

    def closest_decision(self):
        """Return the smallest float64 priority gap of worst kept and best dropped token, over all steps."""
        if self.rule.coupled or isinstance(self.rule.scorer, ops.GateScore):
            return self.closest_coupled_decision()
        pages, table = random_page_table(self.layout, 1, self.rule.first_long + self.length, self.generator)
        everything = torch.full_like(self.budgets, self.rule.first_long + self.length)
        ops.prefill_chunk(
            self.q, self.k, self.v, pages, table[0], 0, everything, rule=self.rule, scale=self.scale, impl="reference"
        )
        first, n = self.rule.first_long, self.layout.block_slots
        slots = torch.arange(first, max(first, self.length))
        blocks = table[0, 0, self.layout.state_blocks :].long()
        topk, closest = self.budget - first, torch.inf
        for h in range(self.heads):
            score = pages.score[blocks[slots // n], h, slots % n].double()
            priority = score - pages.position[blocks[slots // n], h, slots % n].double() * self.rule.log_gamma[h]
            for arrived in range(topk + 1, len(slots) + 1):
                best = priority[:arrived].sort(descending=True).values
                if topk:
                    closest = min(closest, float(best[topk - 1] - best[topk]))
        return closest

    def held(self, pages, table):
        """Return the sorted positions in the long-range slots of each head, and tokens_seen of each head."""
        first, n = self.rule.first_long, self.layout.block_slots
        blocks, found = table[0, 0, self.layout.state_blocks :].long(), []
        for h in range(self.heads):
            end = min(self.length, self.budget)
            if self.rule.threshold is not None:
                end = first + int(pages.position[blocks[0], h, 1])
            slots = torch.arange(first, max(first, end))
            found.append(sorted(pages.position[blocks[slots // n], h, slots % n].tolist()))
        return found, [int(pages.position[blocks[0], h, 0]) for h in range(self.heads)]


def check_same(actual, expected):
    assert actual[2] == expected[2]
    for a, b in zip(actual[:2], expected[:2], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", SOME_CASES)
@pytest.mark.parametrize("roles", [(2, 8, 10), (0, 1, 5), (4, 16, 0), (3, 5, 40)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_decode_steps(case, roles, impl):
    problem, expected = decoded(case, roles)
    one_by_one = impl == "reference" and problem.rule.sequential
    if not one_by_one:  # which runs decode steps itself
        check_same(problem.prefill([90], impl), expected)
    if not one_by_one or roles == (2, 8, 10):
        check_same(problem.prefill([1, 13, 30], impl), expected)


@functools.cache
def decoded(case, roles):
    """Return a problem and the results of the reference's decode steps."""
    problem = Problem(case, *roles, length=90, seed=sum(roles) + len(case))
    return problem, problem.decode()


def test_the_reference_runs_no_other_implementation(monkeypatch):
    monkeypatch.setattr("kvpop_vllm.kernels.cpp.online_topk.online_topk", None)
    monkeypatch.setattr("kvpop_vllm.kernels.dispatch.select", None)
    Problem("mlstm", 2, 8, 10, length=40).prefill([40])


@pytest.mark.parametrize("case", ["linear", "mlstm"])
@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("impl", IMPLS)
def test_decay_steps_beyond_one(case, step, impl):
    problem = Problem(case, 2, 8, 12, length=80, step=step, seed=step)
    check_same(problem.prefill([33, 7], impl), problem.decode())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(sorted(SOME_CASES)),
    sinks=st.integers(0, 5),
    window=st.integers(1, 20),
    topk=st.integers(0, 30),
    length=st.integers(1, 300),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    slots=st.sampled_from([16, 32, 64]),
    size=st.sampled_from([16, 32, 48, 80, 256]),
    impl=st.sampled_from(IMPLS),
    seed=st.integers(0, 10_000),
)
def test_any_cut_any_shape(case, sinks, window, topk, length, chunks, heads, group, slots, size, impl, seed):
    shape = dict(heads=heads, group=group, slots=slots, size=size)
    problem = Problem(case, sinks, window, topk, length, seed=seed, **shape)
    noise = MASS_NOISE if problem.rule.coupled else SCORE_NOISE
    assume(SOME_CASES[case][0] is None or problem.closest_decision() > 10 * noise)
    check_same(problem.prefill(chunks, impl), problem.decode())


@pytest.mark.parametrize("roles", [(0, 2, 10), (2, 8, 10)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_first_chunk_takes_nothing_from_the_pages(roles, impl, case="gate_scores-threshold"):
    """Neither the count of filled slots, in slot 1's position word, nor anything else is read."""
    problem, expected = decoded(case, roles)
    pages, table = problem.pages()
    for byte, chunks in ((0, [90]), (1, [1, 40]), (127, [30]), (255, [5])):
        problem.pages = lambda fill=byte: (problem.layout.view(torch.full_like(pages.raw, fill)), table)
        check_same(problem.prefill(chunks, impl), expected)
    del problem.pages


@pytest.mark.parametrize("window", [32, 200])
@pytest.mark.parametrize("impl", IMPLS)
def test_pieces_longer_than_one(impl, window):
    """A chunk is processed in pieces; budgets, windows and chunks beyond a piece do not change results."""
    problem = Problem("mlstm", 4, window, 300, length=700, seed=3)
    pieces = problem.prefill([256, 100])
    check_same(problem.prefill([100, 256], impl), pieces)
    check_same(problem.prefill([700], impl), pieces)


@pytest.mark.parametrize("isa", _C.isa_levels())
@pytest.mark.parametrize(
    "size, group, q_dtype",
    [
        (64, 3, torch.bfloat16),
        (128, 4, torch.bfloat16),
        (80, 7, torch.bfloat16),
        (96, 3, torch.bfloat16),
        (32, 5, torch.bfloat16),
        (32, 1, torch.bfloat16),
        (96, 1, torch.float32),
    ],
)
def test_bfloat16_is_within_its_roundings(isa, size, group, q_dtype):
    """Errors are within the roundings of weights and outputs to bfloat16.

    Exact results come from the same numbers in float32. Rounding the weights to bfloat16 (2^-9 of each, and
    not in their sum) moves an output by at most 2^-8 of the weighted mean of the values' magnitudes, its own
    rounding by 2^-8 of itself.
    """
    kind = dict(length=500, size=size, group=group, seed=size)
    rounded, exact = Problem("linear", 4, 32, 200, dtype=torch.bfloat16, **kind), Problem("linear", 4, 32, 200, **kind)
    rounded.q = rounded.q.to(q_dtype)
    exact.q, exact.k, exact.v = rounded.q.float(), rounded.k.float(), rounded.v.float()
    exact.rule.scorer.weight[:, size:] = 0  # values decide nothing, so that their magnitudes can replace them
    rounded.rule = exact.rule
    out, lse, held = rounded.prefill([300, 200], isa)
    expected, expected_lse, expected_held = exact.prefill([500])
    exact.v = exact.v.abs()
    magnitude = exact.prefill([500])[0]
    assert held == expected_held and out.dtype == q_dtype
    assert ((out.float() - expected).abs() <= 2.0**-8 * (magnitude + expected.abs()) + 1e-6).all()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("several", [[28, 17], [98, 300], [300, 98]])
@pytest.mark.parametrize("impl", IMPLS)
def test_unequal_budgets_equal_single_heads(impl, several, case="linear", length=400, how="reference"):
    """Heads with different budgets behave as if each were alone with its own."""
    problem = Problem(case, 2, 6, max(several) - 8, length=length, seed=5)
    problem.budgets = torch.tensor(several, dtype=torch.int32)
    out, _, _ = problem.prefill([length, 1], impl)
    for head, budget in enumerate(several):
        problem.budgets = torch.full((2,), budget, dtype=torch.int32)
        alone = problem.prefill([length], how)[0]
        rows = slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(out[:, rows], alone[:, rows], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["mass-newest", "mass-mean", "moment-corrected", "mlstm-corrected"])
@pytest.mark.parametrize("impl, how", [("reference", _C.isa_levels()[-1]), (_C.isa_levels()[-1], _C.isa_levels()[-1])])
def test_unequal_budgets_token_by_token(case, impl, how):
    test_unequal_budgets_equal_single_heads(impl, [17, 40], case, 60, how)


@pytest.mark.parametrize(
    "case",
    [
        "mass-newest",
        "mass-mean",
        "moment",
        "none-corrected",
        "moment-corrected",
        "mlstm-corrected",
        "gate_scores-threshold",
    ],
)
@pytest.mark.parametrize("isa", _C.isa_levels())
def test_chunks_change_nothing_token_by_token(case, isa):
    """For rules processed token by token, chunks change neither outputs nor pages, to the bit."""
    _C.set_isa(isa)
    problem, found = Problem(case, 2, 5, 40, length=130, seed=3), []
    pages, table = problem.pages()
    for chunks in ([130], [1, 13, 30], None):
        problem.pages = lambda: (problem.layout.view(torch.full_like(pages.raw, 255)), table)
        held, problem.held = problem.held, lambda own, _: own.raw
        found.append(problem.prefill(chunks, isa) if chunks else problem.decode("cpp"))
        problem.held = held
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["mlstm-immediate", "linear", "mlstm"])
@pytest.mark.parametrize("roles", [(140, 8, 0), (0, 1, 150), (2, 150, 20)], ids=str)
def test_several_pieces_in_one_call(case, roles, impl):
    problem = Problem(case, *roles, length=330, seed=sum(roles))
    check_same(problem.prefill([330], impl), problem.prefill([7, 60]))


def test_streaming_equals_a_plain_window():
    """Recency as the score gives dense attention over the sinks and the last B - s tokens."""
    problem = Problem("none", 3, 7, 15, length=100, seed=1)
    out, lse, _ = problem.prefill([100])
    t = torch.arange(100)
    visible = (t <= t[:, None]) & ((t < 3) | (t > t[:, None] - (problem.budget - 3)))
    logits = torch.einsum("qhgd,khd->hgqk", problem.q.double().unflatten(1, (2, 2)), problem.k.double()) * problem.scale
    logits = logits.masked_fill(~visible, -torch.inf)
    expected = torch.einsum("hgqk,khd->qhgd", logits.softmax(-1), problem.v.double()).flatten(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1).permute(2, 0, 1).flatten(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
def test_replay_raises_and_writes_nothing(impl):
    problem = Problem("mlstm", 2, 8, 10, length=50)
    pages, table = problem.pages()
    args = dict(rule=problem.rule, scale=problem.scale, impl=impl)
    ops.prefill_chunk(problem.q, problem.k, problem.v, pages, table[0], 0, problem.budgets, **args)
    before = pages.raw.clone()
    with pytest.raises(ops.StepOrderError, match="starts at position 25, but its cache has seen 50"):
        ops.prefill_chunk(problem.q[25:], problem.k[25:], problem.v[25:], pages, table[0], 25, problem.budgets, **args)
    assert torch.equal(pages.raw, before)
