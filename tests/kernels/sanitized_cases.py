"""Every C++ op at small shapes, for ``make sanitize``: problems of other tests, in memory without slack."""

import ctypes
import itertools
import os
import tempfile
from pathlib import Path

import pytest
import torch
from kernels import sanitized
from kernels import test_decode_step as decode
from kernels import test_prefill_chunk as prefill
from kernels import test_running_topk as running
from kernels import test_verify_step as verify
from kernels.problems import CASES, Problem, problem
from kernels.served import ISAS, Pool, check_same, serve
from kernels.test_decode_step import (  # noqa: F401  (tests and fixtures that run here too)
    few_decisions_are_excused,
    test_other_bad_arguments_are_refused,
    test_page_entry_out_of_range_is_refused,
    test_replay_is_refused_before_anything_is_written,
    test_strided_inputs_equal_contiguous_ones,
    test_victim_far_out_and_ties,
)
from kernels.test_online_topk import (
    test_equals_the_definition,  # noqa: F401
    test_the_extension_itself_refuses_what_it_would_overrun,  # noqa: F401
)
from kernels.test_online_topk import test_strided_inputs as test_strided_scores  # noqa: F401
from kernels.test_prefill_chunk import test_no_tokens as test_no_tokens_of_a_chunk  # noqa: F401
from kernels.test_prefix import test_attention_that_would_overrun_a_prefix_is_refused  # noqa: F401
from kernels.test_running_topk import test_cutoffs_by_name, test_infinite_and_negative_zero_priorities  # noqa: F401

from kvpop_vllm import _C
from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.kernels import ops

F32, BF16 = torch.float32, torch.bfloat16
GAP = 36
"""Bytes between the pages of two heads, so that pages start at multiples of no more than 4."""
poison = ctypes.CDLL(None).__asan_poison_memory_region
poison.argtypes = ctypes.c_void_p, ctypes.c_size_t


def apart(layout, num_blocks):
    """Return pages as ``factories.poisoned_pages`` does, with forbidden gaps between, and none at the end."""
    heads, region = layout.num_kv_heads, layout.region_bytes
    raw = torch.full((num_blocks * heads * (region + GAP) - GAP,), 255, dtype=torch.uint8)
    for page in range(1, num_blocks * heads):
        poison(raw.data_ptr() + page * (region + GAP) - GAP, GAP)
    return layout.view(raw.as_strided((num_blocks, heads, region), (heads * (region + GAP), region + GAP, 1)))


@pytest.fixture(autouse=True)
def no_slack(monkeypatch):
    """Put gaps between pages, copy chunks into allocations of their own, and use two threads."""
    chunk = ops.prefill_chunk

    def copied(q, k, v, *tensors, **options):
        return chunk(q.clone(), k.clone(), v.clone(), *tensors, **options)

    verified = ops.verify_step

    def copied_drafts(q, k, v, *tensors, **options):
        return verified(q.clone(), k.clone(), v.clone(), *tensors, **options)

    monkeypatch.setattr(ops, "prefill_chunk", copied)
    monkeypatch.setattr(ops, "verify_step", copied_drafts)
    for module in ("factories", "problems", "served", "test_decode_step"):
        monkeypatch.setattr(f"kernels.{module}.poisoned_pages", apart)
    torch.set_num_threads(2)


def test_the_sanitized_extension_runs():
    """The sanitized extension is loaded, and no other one."""
    assert Path(_C.__file__) == sanitized.EXTENSION
    assert ops.__file__ == str(sanitized.ROOT / "kvpop_vllm/kernels/ops/__init__.py")
    maps = Path("/proc/self/maps").read_text().split()
    assert {path for path in maps if "/_C." in path and "kvpop_vllm" in path} == {str(sanitized.EXTENSION)}


@pytest.mark.parametrize("dtype, threads", [(BF16, 2), (BF16, 16), (F32, 16)])
def test_one_head_is_shared_among_threads(dtype, threads):
    decode.test_one_head_is_shared_among_threads(dtype, threads, (0,), decode.LONG)


SHAPES = {
    "size": (128, 80, 96, 64, 32, 16, 48),
    "group": (5, 3, 1, 7, 2),
    "slots": (16, 48, 64),
    "roles": ((2, 5, 9), (0, 1, 61), (1, 40, 41), (0, 2, 20), (3, 7, 0), (0, 1, 0), (4, 9, 30), (2, 3, 17)),
    "heads": (2, 1, 3, 2),
    "step": (1, 1, 3, 1, 1),
    "dtypes": ((F32, F32), (BF16, BF16), (BF16, F32)),
    "unequal": (False, True),
}
"""Sizes of more than one block and tile, and of less. Each case takes the next of each, and no two are alike."""


def shapes(cases):
    """Return a row for each case, with its options."""
    rows = zip(*(itertools.islice(itertools.cycle(values), len(cases)) for values in SHAPES.values()), strict=True)
    return [
        pytest.param(case, dict(zip(SHAPES, row, strict=True)), id=case) for case, row in zip(cases, rows, strict=True)
    ]


@pytest.mark.parametrize("case, shape", shapes([*CASES]))
def test_decode_step(case, shape):
    (sinks, window, topk), (dtype, q_dtype) = shape.pop("roles"), shape.pop("dtypes")
    roles = dict(sinks=sinks, window=window, topk=topk)
    decode.check_budgets(Problem(case, **roles, dtype=dtype, q_dtype=q_dtype, **shape, seed=1))


@pytest.mark.parametrize("case, shape", shapes([*prefill.SOME_CASES]))
def test_verify_step(case, shape):
    """Commits, tokens, drafts and what is taken back lie in the memory of the pages and of the scratch."""
    protect, (dtype, q_dtype), roles = shape["group"] % 3 * 17, shape.pop("dtypes"), shape.pop("roles")
    names = dict(zip(("sinks", "window", "topk"), roles, strict=True))
    p = Problem(case, protected=(0, protect), drafts=7, length=80, dtype=dtype, q_dtype=q_dtype, **names, **shape)
    rounds = [{0: (7, accepted), 1: (7 - accepted, 2)} for accepted in (5, 0, 3)]
    for isa in ISAS:
        verify.check_steps(p.prepare(), isa, rounds, [6, max(protect - 3, 20)])


PIECES = {
    "none": ((4, 140, 17), 0, [170]),
    "linear": ((3, 130, 0), 0, [150, 140]),
    "mlp": ((4, 16, 45), 0, [135]),
    "mlstm": ((1, 200, 30), 0, [17, 243]),
    "mlstm-immediate": ((2, 140, 10), 70, [50, 130]),
    "mlstm-softmax-cap": ((0, 1, 60), 33, [69, 1]),
}
"""Roles, protected tokens and chunks of windows and chunks beyond a piece of 128 tokens, and budgets beyond a tile."""


@pytest.mark.parametrize("case, shape", shapes([*prefill.SOME_CASES]))
def test_prefill_chunk(case, shape):
    roles, protect, chunks = PIECES.get(case, (shape["roles"], shape["group"] % 3 * 17, [1, 29, 60]))
    options = {name: shape[name] for name in ("size", "group", "slots", "heads", "step")}
    p = problem(case, protect, roles=roles, length=sum(chunks), seed=1, **options)
    expected = serve(p, [p.length])
    for isa in ISAS:
        check_same(serve(p, chunks, isa), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case, size, dtype", [("none", 80, F32), ("mass-mean", 16, F32), ("mlstm", 48, BF16)])
def test_biases_and_sinks(case, size, dtype, isa):
    """Biases lie in the last block of a prefix, which is filled in part; each query head has a sink."""
    options = dict(size=size, group=3, dtype=dtype, biased=(33,), has_sinks=True, seed=1)
    p = problem(case, 33, roles=(2, 5, 9), length=60, **options)
    for chunks in ([1, 29, 60], [0]):
        check_same(serve(p, chunks, isa), serve(p, [p.length]), 2e-5 if dtype == F32 else 2**-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(16, 2, BF16, 0), (80, 2, BF16, 33), (96, 3, BF16, 0), (96, 1, F32, 97)], ids=str)
def test_prefill_chunk_of_bfloat16(isa, shape):
    prefill.test_bfloat16_is_within_its_roundings(isa, *shape)


@pytest.mark.parametrize("isa", ISAS)
def test_prefill_chunk_with_unequal_budgets(isa):
    prefill.test_unequal_budgets_equal_single_heads(isa, "linear", (98, 300), 400, "reference")


def test_running_topk():
    running.test_equals_a_sort_for_every_query(impl="cpp")


@pytest.mark.parametrize("roles", [dict(sinks=5, window=2**63 - 1), dict(sinks=2**63 - 1, window=3)], ids=str)
def test_roles_beyond_all_lengths(roles):
    priority = torch.randn(2, 9)
    rank, cutoff = ops.running_topk(priority, **roles, topk=2, impl="cpp")
    assert (cutoff == 8).all() and torch.equal(rank, (-priority).argsort(-1).argsort(-1).int())
    p = Problem("none").prepare()
    with pytest.raises(ValueError, match="below 2\\^31"):
        _C.Rule(roles["sinks"], roles["window"], 1, p.rule.log_gamma, "none", {})


def test_no_tokens():
    none, log_gamma = torch.zeros(2, 0), torch.zeros(2, dtype=torch.float64)
    ops.online_topk(none, none.long(), 0, topk=0, window=1, log_gamma=log_gamma, impl="cpp")
    ops.running_topk(none, sinks=0, window=1, topk=0, impl="cpp")
    p = Problem().prepare()
    none, pages = p.budgets[:0], apart(p.layout, p.num_blocks)
    positions = none[:, 0].long()
    ops.decode_step(*p.inputs([]), pages, p.table[:0], positions, none, rule=p.rule, scale=1.0, impl="cpp")


def report(run):
    """Return the sanitizers' report on a call that they must end, from a process of its own."""
    torch.set_num_threads(1)  # a forked process has no other threads
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            try:
                os.dup2(file.fileno(), 2)
                run()
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        report_text = file.read()
    assert status, "nothing was reported"
    return report_text


@pytest.mark.parametrize("isa", ISAS)
def test_forbidden_value_is_reported(isa):
    p = Problem("none", requests=1, heads=1, dtype=BF16, q_dtype=BF16)
    pages, active, inputs = decode.served(p, 9)
    row = pages.v[p.table[0, 0, 0], 0, 7]
    poison(row.data_ptr() + row.nbytes - 8, 8)
    _C.set_isa(isa)
    error_text = report(lambda: p.run(pages, active, [9], *inputs, "cpp"))
    assert "ERROR: AddressSanitizer" in error_text and f"kvpop::{isa}::attend" in error_text, error_text


def test_forbidden_query_is_reported():
    pool = Pool(problem("none", roles=(2, 5, 9), length=20))
    q, k, v = (x[0] for x in pool.p.texts)
    poison(q.data_ptr() + q.nbytes - 8, 8)
    chunk = q, k, v, pool.pages, pool.table[:1], Chunks.of_request(0, len(q), pool.budgets[0], pool.p.rule.window)
    error_text = report(lambda: ops.serving.prefill_chunk(*chunk, rule=pool.p.rule, scale=1.0, impl="cpp"))
    assert "ERROR: AddressSanitizer" in error_text and "::prefill_attend" in error_text, error_text


def test_odd_address_is_reported():
    p = Problem("none")
    pages, active, (q, k, v) = decode.served(p, 9)
    odd = torch.frombuffer(bytearray(q.nbytes + 1), dtype=F32, offset=1).view(q.shape)
    error_text = report(lambda: p.run(pages, active, [9, 9], odd, k, v, "cpp"))
    assert "load of misaligned address" in error_text, error_text


def test_overflow_is_reported():
    """The window is one that the op itself refuses."""
    token, gamma = (torch.zeros(1, 2), torch.arange(2)[None]), torch.zeros(1, dtype=torch.float64)
    error_text = report(lambda: _C.online_topk(*token, 0, 1, 2**63 - 1, gamma, 1, False, None))
    assert "signed integer overflow" in error_text, error_text
