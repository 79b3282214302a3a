"""Protected prefixes in serving kernels: each implementation against an independent float64 loop."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from kernels.problems import CLOSE, CLOSE_MASS, SOME_CASES, Problem
from kernels.served import IMPLS, INTERPRETED, ISAS, Pool, check_exact, check_roundings, check_same, serve, use
from threads import one_thread

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import Prefix
from kvpop_vllm.testing import eager_runs

REPLAYS = {"mlstm-short": 5, "mlstm-no-replay": 0, "mlstm-immediate-short": 3}
"""Number of tokens that a scorer's state begins before the tail, by case; else the default."""
CASES = [*SOME_CASES, "gate_scores-threshold-corrected", *REPLAYS]
SINKS, WINDOW, TOPK, SLOTS = 2, 5, 13, 16
BUDGET = SINKS + WINDOW + TOPK
PROTECTED = [1, SLOTS - 1, SLOTS, SLOTS + 1, BUDGET - 1, BUDGET, BUDGET + 1, 2 * SLOTS]
BF16, BEYOND = torch.bfloat16, 34
"""Number of tokens behind the prefix, larger than the tail's number of slots."""


@pytest.fixture(autouse=True)
def alone():
    with one_thread():
        yield


def made(case: str, *protected: int, **options) -> Problem:
    """Return a problem of requests with these prefixes."""
    options = dict(sinks=SINKS, window=WINDOW, topk=TOPK, slots=SLOTS, length=max(protected) + BEYOND) | options
    if case in REPLAYS:
        case, options["replay"] = case.removesuffix("-short").removesuffix("-no-replay"), REPLAYS[case]
    options.setdefault("q_dtype", options.get("dtype", torch.float32))
    return Problem(case, protected=protected, **options).prepare()


@functools.cache
def problem(case: str, *protected: int, dtype: torch.dtype = torch.float32):
    """Return a problem without close decisions, and its exact results by request."""
    for seed in range(40):
        found = made(case, *protected, dtype=dtype, seed=seed)
        exact = [found.exact_run(r) for r in range(found.requests)]
        if min(each.margin for each in exact) > (CLOSE_MASS if found.rule.coupled else CLOSE):
            return found, exact
    raise AssertionError("no seed does")


@functools.cache
def eager(case: str, protect: int, dtype: torch.dtype = torch.float32):
    """Return the eager log-sum-exps of a problem of one request."""
    p, (exact,) = problem(case, protect, dtype=dtype)
    return eager_runs(functools.partial(p.lse, exact.held))


def cuts(protect: int) -> dict[str, list[int]]:
    """Return chunks of a request by name; 0 is a decode step, and the last entry is used for all the rest."""
    found = {"whole": [10_000], "decode": [0], "sevens": [7], "crosses": [protect + 3, 9, 0], "ends": [protect, 11, 0]}
    if protect > 1:
        found["last-of-one"] = [protect - 1, 0, 0, 6, 64]
        found["short-of-it"] = [protect - 1, 64]
    return found


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect", PROTECTED)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_rule_however_it_is_cut(case, protect, impl):
    p, (exact,) = problem(case, protect)
    for name, chunks in cuts(protect).items():
        if (
            impl != "reference"
            or name == "whole"
            or (name, protect) in (("crosses", SLOTS + 1), ("ends", 1), ("ends", 2 * SLOTS))
        ):
            check_exact(p, exact, eager(case, protect), serve(p, chunks, impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect", [1, SLOTS, 2 * SLOTS])
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "gate_scores-threshold", "linear", "mlstm", "mlstm-corrected", "moment"]
)
def test_bfloat16(case, protect, impl):
    (p, (exact,)), budget = problem(case, protect, dtype=BF16), eager(case, protect, BF16)
    for name in ["crosses"] if impl == "reference" else cuts(protect):
        check_exact(p, exact, budget, serve(p, cuts(protect)[name], impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "moment-corrected", "gate_scores-threshold", "mlstm", "mlstm-short"]
)
def test_several_requests_in_one_step(case, impl):
    """Requests without a prefix, at its end, below it and behind it are right in one step.

    Each gives the same as alone, to the bit.
    """
    p, exact = problem(case, 0, 1, 17, 32, 21)
    together, alone, requests = Pool(p), Pool(p), range(5)
    for pool in (together, alone):
        for r, start in enumerate((3, 1, 17, 20, 35)):
            pool.chunk(r, start, impl)
    for _ in range(6 if impl == "reference" else 15):
        out, lse = together.decode([*requests], impl)
        for r in requests:
            one, least = alone.decode([r], impl)
            assert torch.equal(out[r : r + 1], one) and torch.equal(lse[r : r + 1], least)
            t = together.seen[r] - 1
            assert torch.equal(together.held(r), exact[r].held[:, t, : t + 1])
            check_roundings(p.dtype, out[r], exact[r].out[t], exact[r].magnitude[t])
    assert torch.equal(together.pages.raw, alone.pages.raw)
    assert (together.pages.raw[p.foreign()] == 255).all() and (together.pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", ["none", "mass-newest", "gate_scores-threshold", "moment-corrected", "mlstm", "mlstm-immediate"]
)
def test_nothing_is_taken_from_the_bytes_that_lay_there(case, impl):
    """Results do not depend on bytes that lay in the pages before.

    These come from a new pool, one full of NaN, another request in the same blocks, and the request itself,
    stepped back to its prefix's end or below.
    """
    p, chunks = problem(case, 17)[0], [20, 0]
    found = [Pool(p, byte).serve(chunks, impl) for byte in ((0, 255) if impl == "reference" else (0, 1, 127, 255))]
    used, texts = Pool(p), p.texts
    p.texts = [[x[0].flip(0)] for x in texts]
    used.serve([11], impl)
    p.texts, used.seen = texts, [0]
    found.append(used.serve(chunks, impl))
    for out, lse, held, _ in found[1:]:
        assert torch.equal(out, found[0].out) and torch.equal(lse, found[0].lse)
        assert all(torch.equal(held[seen], tokens) for seen, tokens in found[0].held.items())
    for back in [17] if impl == "reference" else (17, 16, 3):
        again = Pool(p)
        again.serve(chunks, impl)
        again.seen = [back]
        check_same(again.serve([20 - back, 0], impl), found[0].after(back))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_prefix_is_written_once_and_never_changes(impl):
    """The prefix's keys and values are exact, and nothing else is written except the tail's blocks."""
    for case in ("mlstm", "gate_scores-threshold", "mass-mean"):
        p = problem(case, 21)[0]
        pool, (_, k, v) = Pool(p), (x[0][:21].transpose(0, 1) for x in p.texts)
        pool.serve([30, 0], impl)
        pages, blocks = pool.pages, p.prefix_table[0].long()
        keys, values = p.prefix(pages, [0]).gather(0, 0, 21)
        assert torch.equal(keys, k) and torch.equal(values, v)
        assert pages.k[blocks[1], :, 5:].isnan().all() and pages.v[blocks[1], :, 5:].isnan().all()
        assert pages.score[blocks].isnan().all() and (pages.position[blocks] == -1).all()
        assert (pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [name for name in CASES if name not in REPLAYS])
def test_a_prefix_is_so_many_sinks(case, impl):
    """An unprotected request with p sinks and a budget of p + B - s retains and returns the same."""
    for protect in [SLOTS] if impl == "reference" else (1, SLOTS, BUDGET + 1):
        p = problem(case, protect)[0]
        plain = made(case, 0, sinks=protect, length=p.length)
        plain.rule, plain.texts = replace(p.rule, sinks=protect), p.texts
        chunks = [13, 0] if impl == "reference" else [9, protect + 1, 0]
        check_same(serve(p, chunks, impl), serve(plain, chunks, impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["mlstm", "mlstm-short", "mlstm-corrected", "mlstm-immediate-short"])
def test_a_tail_begun_twice_is_begun_once(case, impl):
    """Previous contents of the state do not matter; requests without a prefix or a state are left alone."""
    p = made(case, 17, 0)
    pools, states = [Pool(p, byte) for byte in (255, 0)], []
    mine, words = p.table[0, 0, : p.layout.state_blocks].long(), p.rule.scorer.state_floats
    others = torch.ones(p.num_blocks, dtype=torch.bool)
    others[mine] = False
    for pool in pools:
        pool.chunk(0, 17, impl)
        before = pool.pages.raw.clone()
        for _ in range(2):
            p.begin(pool.pages, [0, 1], use(impl))
            assert torch.equal(pool.pages.raw[others], before[others])
        states.append(pool.pages.state[mine].transpose(0, 1).flatten(1)[:, :words])
    assert torch.equal(*states) and states[0].isfinite().all()
    linear = Pool(made("linear", 17))
    linear.p.begin(linear.pages, [0], use(impl))
    assert (linear.pages.raw == 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [2, 5])
def test_a_long_prefix_shared_among_threads(dtype, threads):
    """Several tiles, odd sizes and a head shared by threads give the results of one thread up to rounding."""
    for case in ("linear", "mlstm"):
        sizes = dict(heads=1, group=3, size=64, slots=64, topk=40)
        p, found = made(case, 1333, dtype=dtype, length=1360, seed=2, **sizes), []
        for number in (1, threads):
            torch._C.set_num_threads(number)
            found.append(serve(p, [1024, 320, 0], ISAS[-1]))
        alone, shared = found
        assert not torch.equal(alone.out[1344:], shared.out[1344:]), "no head was cut"
        check_same(shared, alone, 2e-5 if dtype == torch.float32 else 2**-8)
        torch.testing.assert_close(shared.lse, alone.lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
@pytest.mark.parametrize("start", [18, 29, 31])
def test_a_step_out_of_order_behind_a_prefix_is_refused(impl, start):
    """The refusal comes before anything is written; at or below the prefix's end any step may start.

    Decode steps in Triton cannot refuse, and return NaN instead.
    """
    pool = Pool(problem("mlstm", 17)[0])
    pool.chunk(0, 30, "reference" if INTERPRETED else impl)
    before = pool.pages.raw.clone()
    for step in (lambda: pool.chunk(0, 4, impl), lambda: pool.decode([0], impl))[: 1 if INTERPRETED else 2]:
        pool.seen = [start]
        with pytest.raises(ops.StepOrderError, match=f"starts at position {start}, but its cache has seen 30"):
            step()
    assert torch.equal(pool.pages.raw, before)


def test_bad_prefixes_are_refused_before_anything_is_written():
    p = problem("mlstm", 17)[0]
    pool, token = Pool(p), [x[0][20:21] for x in p.texts]
    pool.chunk(0, 20, "cpp")
    before, (blocks, right) = pool.pages.raw.clone(), (p.prefix_table, p.tokens)

    def step(prefix, table=p.table):
        at = torch.tensor([20]), p.budgets
        ops.decode_step(*token, pool.pages, table, *at, rule=p.rule, scale=p.scale, prefix=prefix, impl="cpp")

    far = blocks.clone()
    far[0, 1] = len(before)
    for table, tokens, error, message in (
        (blocks[:, :1], right, IndexError, "its prefix table has 1 entries, 2 are needed"),
        (far, right, IndexError, f"prefix block {len(before)} is not one of"),
        (torch.full_like(blocks, -1), right, IndexError, "prefix block -1 is not one of"),
        (blocks, torch.tensor([-1]), ValueError, "a prefix of -1 tokens is out of range"),
        (blocks, torch.tensor([2**31]), ValueError, "a prefix of 2147483648 tokens is out of range"),
        (blocks[0], right, ValueError, "the prefix table must be"),
        (blocks.long(), right, (TypeError, ValueError), "prefix table"),
        (blocks, right.int(), (TypeError, ValueError), "prefix tokens"),
        (blocks, torch.tensor([17, 17]), ValueError, "prefix tokens"),
    ):
        prefix = Prefix(pool.pages, table, tokens)
        with pytest.raises(error, match=message):
            step(prefix)
        if int(tokens.max()) == 17 and table.dim() == 2 and table.dtype is torch.int32:
            with pytest.raises(error, match=message):
                ops.begin_tail(pool.pages, p.table, prefix, rule=p.rule, impl="cpp")
    with pytest.raises(IndexError, match="entries"):
        step(p.prefix(pool.pages, [0]), p.table[..., :1])
    assert torch.equal(pool.pages.raw, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_step_below_the_end_needs_the_blocks_up_to_it_only(impl):
    """A prompt in chunks has blocks only as far as it is scheduled, and none of its tail's."""
    p = made("mlstm", 33)
    pool, whole = Pool(p), serve(p, [17, 0], impl)
    blocks, p.prefix_table = p.prefix_table, p.prefix_table.clone()
    p.prefix_table[0, 2:] = -1
    pool.table = torch.full_like(p.table, -1)
    for count in (17, 0):
        out, _ = pool.chunk(0, count, impl) if count else pool.decode([0], impl)
        torch.testing.assert_close(out, whole.out[pool.seen[0] - len(out) : pool.seen[0]], rtol=0, atol=2e-5)
    p.prefix_table, pool.table = blocks, p.table
    check_same(pool.serve([0], impl), whole.after(18))
