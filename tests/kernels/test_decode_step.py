"""The C++ decode step against the reference and against an independent float64 loop."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels.factories import poisoned_pages
from kernels.problems import CASES, Problem, problem
from kernels.served import IMPLS, INTERPRETED, ISAS, Lockstep, Pool, use

from kvpop_vllm import _C
from kvpop_vllm.kernels import ops

excused: list[float] = []


@pytest.fixture(scope="module", autouse=True)
def few_decisions_are_excused():
    """Excused decisions are few in all tests of this module together."""
    yield
    assert len(excused) <= 3, excused


def check_budgets(p: Problem):
    """Follow requests that start one after another, until an implementation makes a close decision otherwise."""
    followed = Lockstep(p.prepare(), ISAS)
    for tick in range(int(p.budgets.max()) + p.beyond):
        margin = followed.step(list(range(min(tick + 1, p.requests))))
        if margin is not None:
            excused.append(margin)
            break
    followed.check()


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from(sorted(CASES)),
    requests=st.integers(1, 5),
    heads=st.integers(1, 3),
    group=st.integers(1, 5),
    size=st.sampled_from([32, 64, 80, 96, 128, 256, 512]),
    slots=st.sampled_from([16, 32, 64]),
    sinks=st.integers(0, 4),
    window=st.integers(1, 12),
    topk=st.integers(0, 24),
    beyond=st.integers(1, 16),
    step=st.sampled_from([1, 1, 3]),
    dtypes=st.sampled_from([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]),
    unequal=st.booleans(),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_every_isa_is_within_the_error_budget(dtypes, **options):
    check_budgets(Problem(**options, dtype=dtypes[0], q_dtype=dtypes[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [64, 128, 48, 16])
def test_several_tiles_and_blocks(dtype, slots):
    check_budgets(Problem("mlstm", 2, 1, 3, 64, slots, 4, 30, 140, 8, 1, dtype, dtype, seed=slots))


@pytest.mark.parametrize(
    "case, size, group, slots, dtypes",
    [
        ("none", 32, 1, 16, (torch.float32,) * 2),
        ("mass-mean", 64, 4, 64, (torch.bfloat16,) * 2),
        ("linear", 80, 3, 48, (torch.float32,) * 2),
        ("mass-newest", 96, 5, 16, (torch.bfloat16, torch.float32)),
        ("mlstm-corrected", 128, 2, 32, (torch.bfloat16,) * 2),
        ("moment", 256, 1, 16, (torch.float32,) * 2),
        ("mass-newest", 512, 4, 16, (torch.bfloat16, torch.float32)),
    ],
)
def test_biases_of_some_prefixes(case, size, group, slots, dtypes):
    """One step holds requests without a prefix, within theirs, at its end and after it, with a bias and without.

    Heads of five queries have attention sinks.
    """
    shape = dict(
        has_sinks=group == 5, size=size, group=group, slots=slots, dtype=dtypes[0], q_dtype=dtypes[1], window=3, topk=13
    )
    protected, biased = (0, 18, 16, 33, 70, 21), (0, 18, 0, 5, 65, 1)
    followed = Lockstep(
        Problem(case, protected=protected, biased=biased, **shape).prepare(), ISAS, (3, 17, 40, 9, 75, 25)
    )
    assert [followed.step(list(range(6))) for _ in range(3)] == [None] * 3, "another seed: a decision is too close"
    followed.check()


def served_by(threads, p, steps):
    """Return outputs, log-sum-exps and pages of all requests, whose last ``steps`` tokens come one by one."""
    pool, active = Pool(p), list(range(p.requests))
    torch._C.set_num_threads(threads)
    outs = [pool.chunk(r, p.length - steps, "cpp") for r in active]
    outs += [pool.decode(active, "cpp") for _ in range(steps)]
    return *(torch.cat(x) for x in zip(*outs, strict=True)), pool.pages.raw


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sink", [-80.0, 80.0])
def test_sinks_of_any_size(impl, sink):
    """A sink far below the logits changes nothing; one far above takes all of the softmax, and nothing overflows."""
    p = problem("none", length=30)
    without = Pool(p).serve([20, 0], impl)
    p.sink_logits = torch.full((p.heads * p.group,), sink)
    with_sinks = Pool(p).serve([20, 0], impl)
    if sink < 0:
        torch.testing.assert_close((with_sinks.out, with_sinks.lse), (without.out, without.lse), rtol=0, atol=1e-6)
    else:
        assert (with_sinks.out.abs() < 1e-30).all() and (with_sinks.lse - sink).abs().max() < 1e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_that_do_not_fit_are_refused(impl):
    p = problem("none", length=30)
    for sinks in (torch.zeros(p.heads * p.group + 1), torch.zeros(p.heads * p.group).double()):
        p.sink_logits = sinks
        for way in ([20], [0]):
            with pytest.raises(ValueError, match="sink_logits must be contiguous float32"):
                Pool(p).serve(way, impl)


LONG = 4, 300, 1200
"""Roles of a head with many slots."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "threads, protected, roles",
    [(2, (0,), LONG), (5, (0, 0), LONG), (16, (0,), LONG), (2, (0,) * 5, LONG), (5, (1333,), (2, 5, 40))],
)
def test_one_head_is_shared_among_threads(dtype, threads, protected, roles):
    """Slots, or prefixes, that threads cannot share evenly are cut; results equal one thread's to rounding."""
    sizes = dict(heads=1, group=3, size=64, length=sum(roles) + protected[0] + 40, has_sinks=threads == 5)
    if dtype == torch.float32:  # rounded outputs beyond 1 could differ by 2^-7
        sizes["biased"] = tuple(count // 2 for count in protected)
    p = problem("mlstm", *protected, roles=roles, dtype=dtype, **sizes)
    (out, lse, pages), (shared, shared_lse, shared_pages) = (served_by(number, p, 60) for number in (1, threads))
    decoded = slice(-60 * p.requests, None)
    assert torch.equal(pages, shared_pages)
    assert not (torch.equal(out[decoded], shared[decoded]) and torch.equal(lse, shared_lse)), "no head was cut"
    atol = 2e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(shared.float(), out.float(), rtol=0, atol=atol)
    torch.testing.assert_close(shared_lse, lse, rtol=0, atol=atol)


@pytest.mark.parametrize("case", ["mass-newest", "mass-mean", "moment-corrected", "mlstm-corrected"])
def test_rules_that_need_a_whole_head_are_not_cut(case):
    """Masses and corrections need all of a head's slots, so threads change nothing, to the bit."""
    p = problem(case, roles=(4, 100, 700), heads=1, group=3, length=810)
    expected = served_by(1, p, 12)
    for threads in (2, 5):
        assert all(torch.equal(a, b) for a, b in zip(served_by(threads, p, 12), expected, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("decay_step", [1, 4])
def test_victim_far_out_and_ties(impl, decay_step, cut):
    """Among equal effective scores at positions beyond 131,072, the older token is evicted.

    In the last head the lowest scores equal that of the token leaving the window, which is the newest.
    """
    p = Problem("none", requests=4, heads=3, topk=50, step=decay_step).prepare()
    p.rule = replace(p.rule, log_gamma=torch.tensor([-0.5, -0.125, 0.0], dtype=torch.float64))
    pages, q0, slots = poisoned_pages(p.layout, p.num_blocks), 200_000, torch.arange(int(p.budgets[0, 0]))
    heads, active = [(r, h) for r in range(p.requests) for h in range(p.heads)], list(range(p.requests))
    for r, h in heads:
        places = p.table[r, h, slots // p.slots].long(), h, slots % p.slots
        pages.k[places], pages.v[places] = 0.0, 0.0
        pages.score[places] = torch.randint(0 if h == 2 else -2, 3, slots.shape, generator=p.generator).float() / 4
        near = torch.randperm(60, generator=p.generator)[: len(slots)]
        pages.position[places] = (q0 - p.window - 1 - near).int()
        pages.position[p.table[r, h, 0], h, 0] = q0
    before = {head: p.long_range(pages, *head, q0) for head in heads}
    p.run(pages, active, [q0] * p.requests, *p.inputs(active), use(impl))
    for r, h in heads:
        tokens = {**before[r, h], q0 - p.window: 0.0}
        assert len(tokens) == p.topk + 1
        ranked = sorted((s + (q0 - t) // decay_step * float(p.rule.log_gamma[h]), t) for t, s in tokens.items())
        del tokens[ranked[0][1]]
        assert p.long_range(pages, r, h, q0) == tokens


def served(p: Problem, steps: int):
    """Return the pages after ``steps`` tokens of every request, and the next inputs."""
    p.prepare()
    pages, active = poisoned_pages(p.layout, p.num_blocks), list(range(p.requests))
    for t in range(steps):
        p.run(pages, active, [t] * p.requests, *p.inputs(active), "cpp")
    return pages, active, p.inputs(active)


@pytest.mark.parametrize("positions", [[7, 8, 8], [8, 8, 9], [8, 8, 1]])
def test_replay_is_refused_before_anything_is_written(positions):
    p = Problem(requests=3)
    pages, active, inputs = served(p, 8)
    before = pages.raw.clone()
    with pytest.raises(ops.StepOrderError, match="has seen 8 tokens"):
        p.run(pages, active, positions, *inputs, "cpp")
    assert torch.equal(pages.raw, before)
    p.run(pages, active, [8, 8, 8], *inputs, "cpp")


def test_a_threshold_needs_a_window_of_two():
    threshold, log_gamma = ops.GateScore(threshold=0.0), torch.zeros(2, dtype=torch.float64)
    for make in (
        lambda: ops.RetentionRule(4, 1, log_gamma, scorer=threshold),
        lambda: _C.Rule(4, 1, 1, log_gamma, "gate_scores", {}, threshold=0.0),
    ):
        with pytest.raises(ValueError, match="a threshold needs a window of at least 2"):
            make()


@pytest.mark.parametrize("entry", [-1, 10_000])
@pytest.mark.parametrize("column", [0, -1])
def test_page_entry_out_of_range_is_refused(entry, column):
    p = Problem()
    pages, active, inputs = served(p, 16)
    before = pages.raw.clone()
    p.table = p.table.clone()
    p.table[1, 1, column] = entry
    with pytest.raises(IndexError, match=f"page-table entry {entry}"):
        p.run(pages, active, [16, 16], *inputs, "cpp")
    assert torch.equal(pages.raw, before)


def test_other_bad_arguments_are_refused():
    p = Problem()
    pages, active, (q, k, v) = served(p, 3)
    for error, arguments in (
        (TypeError, (q, k.bfloat16(), v)),
        (TypeError, (q.half(), k, v)),
        (ValueError, (q[:, :3], k, v)),
        (ValueError, (q, k, v[..., :16])),
    ):
        with pytest.raises(error):
            p.run(pages, active, [3, 3], *arguments, "cpp")
    p.table = p.table[..., :-2]
    with pytest.raises(IndexError, match="entries"):
        p.run(pages, active, [3, 3], q, k, v, "cpp")


@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["cpp"])
def test_strided_inputs_equal_contiguous_ones(impl):
    """Queries and keys are views of one tensor, values of another."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    p = Problem("mlstm-direct-values", dtype=dtype, q_dtype=dtype)
    pages, active, (q, k, v) = served(p, 19)
    twin, packed, values = p.layout.view(pages.raw.clone()), torch.cat([q, k], 1), torch.cat([k, v], 1)
    strided = packed[:, :4], packed[:, 4:], values[:, 2:]
    expected, got = (p.run(cache, active, [19, 19], *x, impl) for cache, x in ((pages, (q, k, v)), (twin, strided)))
    assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1]) and torch.equal(pages.raw, twin.raw)


def test_packed_rules_die_with_their_rule():
    from kvpop_vllm.kernels.cpp.decode_step import _packed

    gc.collect()
    before = len(_packed)
    served(Problem(), 1)
    gc.collect()
    assert len(_packed) <= before


def test_asking_for_cpp_without_the_extension_is_an_error():
    code = """
import sys
sys.modules["kvpop_vllm._C"] = None
import torch
from kvpop_vllm.kernels import dispatch, ops
q = torch.zeros(1, 1, 32)
assert dispatch.select("decode_step", q) == "reference"
try:
    ops.decode_step(q, q, q, None, None, None, None, rule=None, scale=1.0, impl="cpp")
except ImportError as error:
    assert "kvpop_vllm._C is not usable here" in str(error)
else:
    raise SystemExit("no ImportError")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
