"""Whole requests in chunks and decode steps equal a float64 loop, for any cut and any protected prefix."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernels.problems import REPLAYS, ROLES, SOME_CASES, decided, problem
from kernels.served import (
    IMPLS,
    INTERPRETED,
    ISAS,
    Pool,
    Served,
    check_exact,
    check_roundings,
    check_same,
    merges,
    serve,
)

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.draws import head_lanes
from kvpop_vllm.kernels.ops import StepOrderError
from kvpop_vllm.testing import eager_runs

SCORE_NOISE, MASS_NOISE = 2e-6, 2e-7
"""Differences between paths that round differently, for raw scores and for attention masses.

Raw scores of order 1 to 3 differ by up to the first (float32, states of up to 120 tokens). Attention masses,
of order 1 / B, and their products with residuals differ by up to a tenth of that.
"""
DECODE = [0]
"""Way of serving: decode steps alone."""
BF16 = torch.bfloat16
CASES = [*SOME_CASES, "gate_scores-threshold-corrected", *REPLAYS]
SEQUENTIAL = [case for case in SOME_CASES if problem(case).rule.sequential]
SHAPES = [
    *((0, roles) for roles in (ROLES, (0, 1, 5), (4, 16, 0), (3, 5, 40))),
    *((protect, ROLES) for protect in (1, 15, 16, 17, 19, 20, 21, 32)),  # around one block, the budget, two blocks
]
"""Number of protected tokens, and roles."""


@functools.cache
def eager(case: str, protect: int, **options):
    """Return the eager log-sum-exps of a problem of one request."""
    p, (exact,) = decided(case, protect, **options)
    return eager_runs(functools.partial(p.lse, exact.retained))


def cuts(protect: int) -> dict[str, list[int]]:
    """Return chunks of a request by name; 0 is a decode step, and the last entry is used for all the rest."""
    chunks = {
        "whole": [10_000],
        "decode": DECODE,
        "sevens": [7],
        "crosses": [protect + 3, 9, 0],
        "ends": [protect, 11, 0],
    }
    if protect > 1:
        chunks["last-of-one"] = [protect - 1, 0, 0, 6, 64]
        chunks["short-of-it"] = [protect - 1, 64]
    return chunks


OF_REFERENCE = ("sevens", 0), ("crosses", 17), ("ends", 1), ("ends", 32)
"""Cuts, apart from whole requests, that the slow reference serves."""


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect, roles", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_rule_however_it_is_cut(case, protect, roles, impl):
    p, (exact,) = decided(case, protect, roles=roles)
    for name, chunks in cuts(protect).items():
        if impl != "reference" or name == "whole" or (name, protect) in OF_REFERENCE:
            check_exact(p, exact, eager(case, protect, roles=roles), serve(p, chunks, impl))


BIASED = [
    *(
        (case, 17, 9)
        for case in ("none", "mass-newest", "moment-corrected", "gate_scores-threshold-corrected", "mlstm")
    ),
    *(("mass-mean", protect, count) for protect, count in ((1, 1), (16, 16), (17, 17), (20, 3), (32, 17))),
    ("none", 32, 32),
]
"""Case, number of protected tokens and number of the first of these that have a bias."""


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case, protect, count", BIASED)
def test_biases_count_however_a_request_is_cut(case, protect, count, impl):
    """Outputs, log-sum-exps, attention masses and what they retain follow from biased logits; all other scores are NaN."""
    biased = dict(biased=(count,), group=3)
    p, (exact,) = decided(case, protect, **biased)
    for name, chunks in cuts(protect).items():
        if impl in ISAS or name in ("crosses", "last-of-one"):
            check_exact(p, exact, eager(case, protect, **biased), serve(p, chunks, impl))


SINKS = [
    *((case, protect) for case in ("none", "mass-mean", "moment-corrected", "mlstm") for protect in (0, 17)),
    *((case, 0) for case in ("mass-newest", "none-corrected", "moment", "gate_scores-threshold", "linear", "key-norm")),
]
"""Case, and number of protected tokens."""


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case, protect", SINKS)
def test_attention_sinks_count_however_a_request_is_cut(case, protect, impl):
    """Outputs, log-sum-exps, masses, moments and what they retain follow from a softmax with sinks."""
    p, (exact,) = decided(case, protect, has_sinks=True, group=3)
    for name, chunks in cuts(protect).items():
        if impl in ISAS or name in ("crosses", "last-of-one", "sevens"):
            check_exact(p, exact, eager(case, protect, has_sinks=True, group=3), serve(p, chunks, impl))


def test_attention_sinks_change_what_is_retained():
    """The test above would not pass without them: outputs differ, and what masses retain."""
    with_sinks, without = (problem("mass-newest", has_sinks=sinks).exact_run() for sinks in (True, False))
    assert not torch.equal(with_sinks.retained, without.retained)
    assert ((with_sinks.out - without.out).abs().amax((1, 2)) > 1e-2).all()


def test_biases_change_what_attention_retains():
    """The test above would not pass without them."""
    runs = [problem("mass-newest", 17, biased=biased).exact_run() for biased in ((), (9,))]
    assert not torch.equal(runs[0].retained, runs[1].retained)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect, biased", [(0, ()), (1, ()), (16, ()), (32, ()), (32, (20,))])
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "gate_scores-threshold", "linear", "mlstm", "mlstm-corrected", "moment"]
)
def test_bfloat16(case, protect, biased, impl):
    options = dict(dtype=BF16, biased=biased)
    (p, (exact,)), budget = decided(case, protect, **options), eager(case, protect, **options)
    for name in ["crosses"] if impl == "reference" else cuts(protect):
        check_exact(p, exact, budget, serve(p, cuts(protect)[name], impl))


def test_the_reference_runs_no_other_implementation(monkeypatch):
    monkeypatch.setattr("kvpop_vllm.kernels.cpp.online_topk.online_topk", None)
    monkeypatch.setattr("kvpop_vllm.kernels.dispatch.select", None)
    serve(problem("mlstm"), [40])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(sorted(SOME_CASES)),
    roles=st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(0, 30)),
    length=st.integers(1, 220),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    slots=st.sampled_from([16, 32, 64]),
    size=st.sampled_from([16, 32, 48, 80, 256]),
    step=st.sampled_from([1, 1, 3, 7]),
    protect=st.sampled_from([0, 0, 5, 70]),
    biased=st.sampled_from([0, 3, 50, 70]),
    impl=st.sampled_from(IMPLS),
    seed=st.integers(0, 10_000),
)
def test_any_cut_any_shape(case, chunks, protect, biased, impl, **shape):
    p = problem(case, protect, biased=(min(biased, protect),), **shape)
    noise = MASS_NOISE if p.rule.coupled else SCORE_NOISE
    assume(SOME_CASES[case][0] is None or p.exact_run().margin > 10 * noise)
    check_same(serve(p, chunks, impl), serve(p, DECODE))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case, roles, length, chunks",
    [
        *((case, roles, 330, [330]) for case in ("mlstm-immediate", "linear", "mlstm") for roles in ((140, 8, 0), (0, 1, 150), (2, 150, 20))),
        *(("mlstm", (4, window, 300), 700, chunks) for window in (32, 200) for chunks in ([100, 256], [700])),
    ],
    ids=str,
)  # fmt: skip
def test_pieces_longer_than_one(case, roles, length, chunks, impl):
    """A chunk is processed in pieces; budgets, windows and chunks beyond a piece do not change results."""
    p = problem(case, roles=roles, length=length, seed=sum(roles))
    check_same(serve(p, chunks, impl), serve(p, [7, 60]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "size, group, q_dtype, protect",
    [
        *((64, 3, BF16, 0), (128, 4, BF16, 200), (80, 7, BF16, 0), (96, 3, BF16, 333), (32, 5, BF16, 97)),
        *((32, 1, BF16, 0), (96, 1, torch.float32, 0), (80, 2, torch.float32, 200), (512, 8, BF16, 40)),
    ],
)
def test_bfloat16_is_within_its_roundings(isa, size, group, q_dtype, protect):
    shape = dict(size=size, group=group, dtype=BF16, q_dtype=q_dtype, length=500)
    check_roundings_of(isa, [300, 200], protect, roles=(4, 32, 200), **shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "size, group, q_dtype, protect, biased",
    [(128, 4, BF16, 200, 200), (96, 3, BF16, 333, 130), (80, 2, torch.float32, 200, 1), (64, 7, BF16, 97, 64)],
)
def test_bfloat16_with_biases_is_within_its_roundings(isa, size, group, q_dtype, protect, biased):
    shape = dict(size=size, group=group, dtype=BF16, q_dtype=q_dtype, length=500, biased=(biased,))
    check_roundings_of(isa, [300, 200], protect, roles=(4, 32, 200), **shape)


def check_roundings_of(impl, chunks, protect=0, **options):
    """Check that errors are within the roundings of weights and outputs to 16 bits."""
    p, (exact,) = decided("linear", protect, close=10 * SCORE_NOISE, **options)
    served = serve(p, chunks, impl)
    assert served.out.dtype == p.q_dtype and torch.equal(served.retained[p.length], exact.retained[:, -1])
    check_roundings(p.dtype, served.out, exact.out, exact.magnitude, merged=served.in_cpp_chunks if merges(p) else None)
    torch.testing.assert_close(served.lse.double(), exact.lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "case, several, length, how",
    [
        *(("linear", several, 400, "reference") for several in ((28, 17), (98, 300), (300, 98))),
        *((case, (17, 40), 60, ISAS[-1]) for case in ("mass-newest", "mass-mean", "moment-corrected", "mlstm-corrected")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("impl", IMPLS)
def test_unequal_budgets_equal_single_heads(impl, case, several, length, how):
    """Heads with different budgets behave as if each were alone with its own."""
    p = problem(case, roles=(2, 6, max(several) - 8), length=length, seed=5)
    p.budgets = torch.tensor([several], dtype=torch.int32)
    out = serve(p, [length], impl).out
    for head, budget in enumerate(several):
        p.budgets = torch.full((1, 2), budget, dtype=torch.int32)
        rows = slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(out[:, rows], serve(p, [length], how).out[:, rows], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", SEQUENTIAL)
@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ISAS)
def test_chunks_change_nothing_token_by_token(case, impl):
    """For rules processed token by token, chunks change neither outputs nor pages, to the bit.

    They continue another implementation's request.
    """
    length = 23 if INTERPRETED else 130
    p, runs = problem(case, roles=(2, 4, 9), length=length, seed=len(case)), []
    for chunks in ([length], [1, 13, 0]):
        pool = Pool(p)
        pool.chunk(0, 20, ISAS[0])
        runs.append((pool.serve(chunks, impl), pool.pages.raw))
    (first, pages), *other_runs = runs
    assert all(torch.equal(pages, raw) and torch.equal(first.out, run.out) for run, raw in other_runs)
    assert all(torch.equal(first.lse, run.lse) for run, _ in other_runs)
    check_same(first, serve(p, DECODE).after(20))


TOGETHER = [{0: 26, 1: 40, 2: 7, 3: 30}, {0: 1, 2: 30, 3: 9}, {0: 40, 1: 27, 2: 30, 3: 28}]
"""Chunks of the requests of each call: some lie within a prefix, some end in it, some leave requests out."""


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case",
    [
        *("mlstm-norm-skip", "mlstm-norm-skip, small, biased", "mlstm-immediate"),
        *("gate_scores-ages, small", "draws", "mass-mean, biased"),
    ],
)
def test_requests_are_prefilled_together(case, impl, request):
    """Chunks of requests with their own prefixes, budgets by head and windows equal the decode steps of each."""
    kind, *words = case.split(", ")
    biased = (0, 11, 0, 35) if "biased" in words else ()
    if "small" in words and impl == "triton":
        request.getfixturevalue("small")
    options = dict(roles=(2, 5, 20), unequal=True, length=67, replay=9, seed=3, biased=biased)
    p = problem("none" if kind == "draws" else kind, 0, 18, 5, 35, **options)
    if kind == "draws":
        p.rule, p.seeds = replace(p.rule, scorer=ops.RandomDraw(head_lanes(1, slice(None), 2))), torch.arange(4)
    pool, outputs = Pool(p), {r: [] for r in range(4)}
    for counts in TOGETHER:
        out, lse = pool.chunks(counts, impl)
        for r, *chunks in zip(counts, out.split([*counts.values()]), lse.split([*counts.values()]), strict=True):
            outputs[r].append((*chunks, pool.retained(r)))
    for r, chunks in outputs.items():
        outs, lses, retained = zip(*chunks, strict=True)
        lengths = torch.tensor([len(out) for out in outs]).cumsum(0).tolist()
        served = Served(torch.cat(outs), torch.cat(lses), dict(zip(lengths, retained, strict=True)), torch.zeros(67))
        check_same(served, Pool(p).serve(DECODE, "reference", r))
    assert pool.untouched()


@pytest.mark.parametrize("case", ["mlstm", "mass-mean"])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_wrong_start_among_others(case, impl):
    """In Triton that request alone gets NaN and keeps its pages; elsewhere its chunk is refused."""
    p = problem(case, 0, 0, 0, length=40)
    pool, alone = Pool(p), Pool(p)
    for filled_pool in (pool, alone):
        filled_pool.chunks(dict.fromkeys(range(3), 20), "cpp" if ISAS else impl)
    pool.lengths[1], before = 19, pool.pages.raw.clone()
    if impl != "triton":
        with pytest.raises(StepOrderError, match="step starts at position 19, but its cache has seen 20 tokens"):
            pool.chunks({1: 4}, impl)
        assert torch.equal(pool.pages.raw, before)
        return
    out, lse = pool.chunks(dict.fromkeys(range(3), 4), impl)
    assert out[4:8].isnan().all() and lse[4:8].isnan().all()
    alone_out, _ = alone.chunks({0: 4, 2: 4}, impl)
    torch.testing.assert_close(out[[0, 1, 2, 3, 8, 9, 10, 11]], alone_out, rtol=0, atol=1e-6)
    alone.pages.raw[p.table[1].flatten().long()] = before[p.table[1].flatten().long()]
    torch.testing.assert_close(pool.pages.raw, alone.pages.raw)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl):
    p = problem("mlstm-direct-values", length=45, seed=2)
    expected, packed = serve(p, [45], impl), torch.cat([x[0] for x in p.texts], 1)
    p.texts = [[packed[:, :4]], [packed[:, 4:6]], [packed[:, 6:]]]
    served = serve(p, [45], impl)
    assert torch.equal(served.out, expected.out) and torch.equal(served.lse, expected.lse)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "reference"])
def test_no_tokens(impl):
    pool = Pool(problem("mlstm", length=20))
    pool.chunk(0, 20, impl)
    before = pool.pages.raw.clone()
    out, lse = pool.chunk(0, 0, impl)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4) and torch.equal(pool.pages.raw, before)
