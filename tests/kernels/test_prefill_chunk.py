"""A prefill chunk equals the decode steps of its tokens for any cut, and a dense masked attention."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernels.problems import SOME_CASES, Problem
from kernels.served import IMPLS, INTERPRETED, ISAS, Pool, check_roundings, check_same, serve

from kvpop_vllm.kernels import ops

SCORE_NOISE, MASS_NOISE = 2e-6, 2e-7
"""Differences between paths that round differently, for raw scores and for attention masses.

Raw scores of order 1 to 3 differ by up to the first (float32, states of up to 120 tokens). Attention masses,
of order 1 / B, and their products with residuals differ by up to a tenth of that.
"""
DECODE = [0]
"""Way of serving: decode steps alone."""


def problem(case, sinks, window, topk, length, **options) -> Problem:
    """Return a problem of one request."""
    roles = dict(sinks=sinks, window=window, topk=topk)
    return Problem(case, requests=1, length=length, **roles, **options).prepare()


@pytest.mark.parametrize("case", SOME_CASES)
@pytest.mark.parametrize("roles", [(2, 8, 10), (0, 1, 5), (4, 16, 0), (3, 5, 40)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_decode_steps(case, roles, impl):
    p, expected = decoded(case, roles)
    one_by_one = impl == "reference" and p.rule.sequential
    if not one_by_one:  # which runs decode steps itself
        check_same(serve(p, [90], impl), expected)
    if not one_by_one or roles == (2, 8, 10):
        check_same(serve(p, [1, 13, 30], impl), expected)


@functools.cache
def decoded(case, roles):
    """Return a problem and the results of the reference's decode steps."""
    p = problem(case, *roles, length=90, seed=sum(roles) + len(case))
    return p, serve(p, DECODE)


def test_the_reference_runs_no_other_implementation(monkeypatch):
    monkeypatch.setattr("kvpop_vllm.kernels.cpp.online_topk.online_topk", None)
    monkeypatch.setattr("kvpop_vllm.kernels.dispatch.select", None)
    serve(problem("mlstm", 2, 8, 10, length=40), [40])


@pytest.mark.parametrize("case", ["linear", "mlstm"])
@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("impl", IMPLS)
def test_decay_steps_beyond_one(case, step, impl):
    p = problem(case, 2, 8, 12, length=80, step=step, seed=step)
    check_same(serve(p, [33, 7], impl), serve(p, DECODE))


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
    p = problem(case, sinks, window, topk, length, seed=seed, **shape)
    noise = MASS_NOISE if p.rule.coupled else SCORE_NOISE
    assume(SOME_CASES[case][0] is None or p.exact_run().margin > 10 * noise)
    check_same(serve(p, chunks, impl), serve(p, DECODE))


@pytest.mark.parametrize("roles", [(0, 2, 10), (2, 8, 10)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_first_chunk_takes_nothing_from_the_pages(roles, impl, case="gate_scores-threshold"):
    """Neither the count of filled slots, in slot 1's position word, nor anything else is read."""
    p, expected = decoded(case, roles)
    for byte, chunks in ((0, [90]), (1, [1, 40]), (127, [30]), (255, [5])):
        check_same(Pool(p, byte).serve(chunks, impl), expected)


@pytest.mark.parametrize("window", [32, 200])
@pytest.mark.parametrize("impl", IMPLS)
def test_pieces_longer_than_one(impl, window):
    """A chunk is processed in pieces; budgets, windows and chunks beyond a piece do not change results."""
    p = problem("mlstm", 4, window, 300, length=700, seed=3)
    pieces = serve(p, [256, 100])
    check_same(serve(p, [100, 256], impl), pieces)
    check_same(serve(p, [700], impl), pieces)


BF16 = torch.bfloat16


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "size, group, q_dtype",
    [(64, 3, BF16), (128, 4, BF16), (80, 7, BF16), (96, 3, BF16), (32, 5, BF16), (32, 1, BF16), (96, 1, torch.float32)],
)
def test_bfloat16_is_within_its_roundings(isa, size, group, q_dtype):
    """Errors are within the roundings of weights and outputs to bfloat16."""
    check_roundings_of(exact_one(size, group, BF16, q_dtype, 500, 200), [300, 200], isa)


@functools.cache
def exact_one(size, group, dtype, q_dtype, length, topk):
    """Return a problem in 16 bits without close decisions, and its exact results."""
    options = dict(dtype=dtype, q_dtype=q_dtype, size=size, group=group)
    for seed in range(20):
        p = problem("linear", 4, 32, topk, length, seed=seed, **options)
        exact = p.exact_run()
        if exact.margin > 10 * SCORE_NOISE:
            return p, exact
    raise AssertionError("no seed does")


def check_roundings_of(known, chunks, impl):
    p, exact = known
    found = serve(p, chunks, impl)
    assert found.out.dtype == p.q_dtype and torch.equal(found.held[p.length], exact.held[:, -1])
    check_roundings(p.dtype, found.out, exact.out, exact.magnitude)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("several", [[28, 17], [98, 300], [300, 98]])
@pytest.mark.parametrize("impl", IMPLS)
def test_unequal_budgets_equal_single_heads(impl, several, case="linear", length=400, how="reference"):
    """Heads with different budgets behave as if each were alone with its own."""
    p = problem(case, 2, 6, max(several) - 8, length=length, seed=5)
    p.budgets = torch.tensor([several], dtype=torch.int32)
    out = serve(p, [length], impl).out
    for head, budget in enumerate(several):
        p.budgets = torch.full((1, 2), budget, dtype=torch.int32)
        rows = slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(out[:, rows], serve(p, [length], how).out[:, rows], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["mass-newest", "mass-mean", "moment-corrected", "mlstm-corrected"])
@pytest.mark.parametrize("impl, how", [("reference", ISAS[-1]), (ISAS[-1], ISAS[-1])])
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
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_change_nothing_token_by_token(case, isa):
    """For rules processed token by token, chunks change neither outputs nor pages, to the bit."""
    p, found = problem(case, 2, 5, 40, length=130, seed=3), []
    for chunks in ([130], [1, 13, 30], DECODE):
        pool = Pool(p)
        found.append((*pool.serve(chunks, isa)[:2], pool.pages.raw))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["mlstm-immediate", "linear", "mlstm"])
@pytest.mark.parametrize("roles", [(140, 8, 0), (0, 1, 150), (2, 150, 20)], ids=str)
def test_several_pieces_in_one_call(case, roles, impl):
    p = problem(case, *roles, length=330, seed=sum(roles))
    check_same(serve(p, [330], impl), serve(p, [7, 60]))


def test_streaming_equals_a_plain_window():
    """Recency as the score gives dense attention over the sinks and the last B - s tokens."""
    p = problem("none", 3, 7, 15, length=100, seed=1)
    found, (q, k, v) = serve(p, [100]), (x[0].double() for x in p.texts)
    t = torch.arange(100)
    visible = (t <= t[:, None]) & ((t < 3) | (t > t[:, None] - (25 - 3)))
    logits = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 2)), k) * p.scale
    logits = logits.masked_fill(~visible, -torch.inf)
    expected = torch.einsum("hgqk,khd->qhgd", logits.softmax(-1), v).flatten(1, 2)
    torch.testing.assert_close(found.out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), logits.logsumexp(-1).permute(2, 0, 1).flatten(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["mlstm", "mass-mean"])
@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
def test_replay_raises_and_writes_nothing(impl, case):
    """In Triton too, although its decode steps would only return NaN."""
    pool = Pool(problem(case, 2, 8, 10, length=50))
    pool.chunk(0, 30, "reference" if INTERPRETED else impl)
    before, pool.seen = pool.pages.raw.clone(), [25]
    with pytest.raises(ops.StepOrderError, match="starts at position 25, but its cache has seen 30"):
        pool.chunk(0, 20, impl)
    assert torch.equal(pool.pages.raw, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl):
    p = problem("mlstm-direct-values", 2, 8, 10, length=45, seed=2)
    expected, packed = serve(p, [45], impl), torch.cat([x[0] for x in p.texts], 1)
    p.texts = [[packed[:, :4]], [packed[:, 4:6]], [packed[:, 6:]]]
    found = serve(p, [45], impl)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "reference"])
def test_no_tokens(impl):
    pool = Pool(problem("mlstm", 2, 8, 10, length=20))
    pool.chunk(0, 20, impl)
    before = pool.pages.raw.clone()
    out, lse = pool.chunk(0, 0, impl)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4) and torch.equal(pool.pages.raw, before)
