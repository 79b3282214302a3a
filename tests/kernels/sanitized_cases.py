"""Every C++ op at small shapes, for ``make sanitize``: problems of other tests, in memory without slack."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

import pytest
import torch
from kernels import sanitized
from kernels import test_decode_step as decode
from kernels import test_prefill_chunk as prefill
from kernels import test_prefix_attention as prefix
from kernels import test_running_topk as running
from kernels.problems import Problem
from kernels.served import ISAS, Pool, check_same, serve
from kernels.test_decode_step import (  # noqa: F401  (tests and fixtures that run here too)
    check_budgets,
    few_decisions_are_excused,
    test_a_threshold_counts_in_slot_1,
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
from kernels.test_running_topk import test_cutoffs_by_name, test_infinite_and_negative_zero_priorities  # noqa: F401

from kvpop_vllm import _C
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

    def copied(q, k, v, *rest, **options):
        return chunk(q.clone(), k.clone(), v.clone(), *rest, **options)

    monkeypatch.setattr(ops, "prefill_chunk", copied)
    for module in ("factories", "problems", "served", "test_decode_step"):
        monkeypatch.setattr(f"kernels.{module}.poisoned_pages", apart)
    torch.set_num_threads(2)


def test_the_sanitized_extension_runs():
    """The sanitized extension is loaded, and no other one."""
    assert Path(_C.__file__) == sanitized.EXTENSION
    assert ops.__file__ == str(sanitized.ROOT / "kvpop_vllm/kernels/ops/__init__.py")
    maps = Path("/proc/self/maps").read_text().split()
    assert {path for path in maps if "/_C." in path and "kvpop_vllm" in path} == {str(sanitized.EXTENSION)}


# Shapes of more than one block and tile, and of less.
DECODE = [
    dict(case="none", size=128, group=5, slots=16, dtype=BF16, q_dtype=BF16, topk=0),
    dict(case="linear", size=80, group=4, slots=48, dtype=BF16, q_dtype=F32, sinks=0, window=1),
    dict(case="mlp", size=96, group=3, slots=64, topk=61, heads=1),
    dict(case="mlstm", size=64, group=7, slots=64, dtype=BF16, q_dtype=BF16, window=40, topk=41, heads=1),
    dict(case="mlstm-norm-skip", size=32, group=1, slots=16, sinks=0, unequal=True),
    dict(case="mlstm-softmax-cap", size=16, group=2, slots=48, dtype=BF16, q_dtype=BF16, topk=3, window=1),
    dict(case="mlstm-direct-values", size=80, group=3, slots=16, topk=0, sinks=1),
    dict(case="mlstm-immediate", size=128, group=1, slots=48, dtype=BF16, q_dtype=F32, step=3),
    dict(case="mlstm-odd-widths", size=96, group=2, slots=16, unequal=True, requests=3),
    dict(case="mlstm", size=64, group=3, slots=16, dtype=BF16, q_dtype=BF16, window=3),
    dict(case="mlstm-immediate", size=32, group=1, slots=16, sinks=0, topk=20),
    dict(case="none", size=128, group=2, slots=16, dtype=BF16, q_dtype=BF16, unequal=True),
    dict(case="key-norm", size=48, group=1, slots=16, dtype=BF16, q_dtype=BF16, sinks=0, window=1),
    dict(case="mass-newest", size=64, group=5, slots=48, dtype=BF16, q_dtype=BF16, sinks=0, window=1, topk=61),
    dict(case="mass-mean", size=80, group=3, slots=16, sinks=3, unequal=True),
    dict(case="moment-corrected", size=64, group=3, slots=64, dtype=BF16, q_dtype=BF16, sinks=1, window=1, topk=30),
    dict(case="moment", size=32, group=7, slots=16, unequal=True),
    dict(case="mlstm-corrected", size=48, group=2, slots=16),
    dict(case="gate_scores-ages", size=80, group=2, slots=16),
    dict(case="gate_scores-threshold", size=64, group=1, slots=48, sinks=0, window=2, topk=40, unequal=True),
    dict(case="gate_scores-threshold-corrected", size=48, group=2, slots=16, dtype=BF16, q_dtype=F32),
]


@pytest.mark.parametrize("dtype, threads", [(BF16, 2), (BF16, 16), (F32, 16)])
def test_one_head_is_shared_among_threads(dtype, threads):
    decode.test_one_head_is_shared_among_threads(dtype, threads, 1)


@pytest.mark.parametrize("problem", DECODE, ids=lambda p: p["case"])
def test_decode_step(problem):
    check_budgets(Problem(**problem, seed=1))


# Chunk lengths and problem: windows and chunks beyond a piece of 128 tokens, budgets beyond a tile of 64.
PREFILL = [
    ([40], dict(case="none", sinks=0, window=1, topk=0, length=40, size=16, group=7, slots=16)),
    ([170], dict(case="none", sinks=4, window=140, topk=17, length=170, size=128, group=5, slots=48)),
    ([1, 13, 30], dict(case="linear", sinks=0, window=1, topk=5, length=90, size=80, group=1, slots=48, step=3)),
    ([150, 140], dict(case="linear", sinks=3, window=130, topk=0, length=290, size=32, group=4, slots=64)),
    ([135], dict(case="mlp", sinks=4, window=16, topk=45, length=135, size=96, group=3, slots=16)),
    ([128, 3], dict(case="mlstm", sinks=2, window=8, topk=10, length=131, size=64, group=2, slots=64)),
    ([17, 243], dict(case="mlstm", sinks=1, window=200, topk=30, length=260, size=32, slots=16, heads=1)),
    ([80], dict(case="mlstm-norm-skip", sinks=0, window=5, topk=60, length=80, size=80, group=7, slots=16)),
    ([69, 1], dict(case="mlstm-softmax-cap", sinks=3, window=5, topk=40, length=70, size=16, group=3, slots=48)),
    ([60], dict(case="mlstm-direct-values", sinks=2, window=8, topk=10, length=60, size=128, group=1, slots=16)),
    ([1, 29], dict(case="mlstm", sinks=2, window=5, topk=30, length=90, size=64, slots=16)),
    ([3, 177], dict(case="mlstm-immediate", sinks=0, window=9, topk=20, length=180, size=32, slots=16)),
    ([3, 87], dict(case="key-norm", sinks=0, window=1, topk=40, length=90, size=16, slots=16)),
    ([3, 87], dict(case="mass-newest", sinks=0, window=1, topk=60, length=90, size=32, group=5, slots=16)),
    ([3, 87], dict(case="moment-corrected", sinks=1, window=1, topk=40, length=90, size=32, group=3, slots=16)),
    ([40, 50], dict(case="mlstm-corrected", sinks=2, window=8, topk=10, length=90, size=48, slots=48)),
    ([40, 50], dict(case="mass-mean", sinks=1, window=20, topk=10, length=90, size=48, group=3, slots=48)),
    ([1, 89], dict(case="gate_scores-threshold", sinks=0, window=2, topk=40, length=90, size=32, group=3, slots=16)),
    ([50, 130], dict(case="mlstm-immediate", sinks=2, window=140, topk=10, length=180, size=48, group=5, heads=3)),
]


@pytest.mark.parametrize("chunks, problem", PREFILL, ids=lambda p: p["case"] if isinstance(p, dict) else "")
def test_prefill_chunk(chunks, problem):
    p = prefill.problem(**problem, seed=1)
    expected = serve(p, [p.length])
    for isa in ISAS:
        check_same(serve(p, chunks, isa), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(16, 2, BF16), (80, 2, BF16), (96, 3, BF16), (96, 1, F32)], ids=str)
def test_prefill_chunk_of_bfloat16(isa, shape):
    prefill.test_bfloat16_is_within_its_roundings(isa, *shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", prefix.SHAPES, ids=str)
def test_attention_to_a_prefix(shape, dtype, isa):
    prefix.test_it_is_a_softmax_over_these_tokens(shape, dtype, dtype, isa, make=apart)


@pytest.mark.parametrize("isa", ISAS)
def test_prefill_chunk_with_unequal_budgets(isa):
    prefill.test_unequal_budgets_equal_single_heads(isa, [98, 300])


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
        said = file.read()
    assert status, "nothing was reported"
    return said


@pytest.mark.parametrize("isa", ISAS)
def test_forbidden_value_is_reported(isa):
    p = Problem("none", requests=1, heads=1, dtype=BF16, q_dtype=BF16)
    pages, active, inputs = decode.served(p, 9)
    row = pages.v[p.table[0, 0, 0], 0, 7]
    poison(row.data_ptr() + row.nbytes - 8, 8)
    _C.set_isa(isa)
    said = report(lambda: p.run(pages, active, [9], *inputs, "cpp"))
    assert "ERROR: AddressSanitizer" in said and f"kvpop::{isa}::attend" in said, said


def test_forbidden_query_is_reported():
    pool = Pool(prefill.problem("none", 2, 5, 9, 20))
    q, k, v = (x[0] for x in pool.p.texts)
    poison(q.data_ptr() + q.nbytes - 8, 8)
    chunk = q, k, v, pool.pages, pool.table[0], 0, pool.budgets[0]
    said = report(lambda: ops.serving.prefill_chunk(*chunk, rule=pool.p.rule, scale=1.0, impl="cpp"))
    assert "ERROR: AddressSanitizer" in said and "::prefill_attend" in said, said


def test_odd_address_is_reported():
    p = Problem("none")
    pages, active, (q, k, v) = decode.served(p, 9)
    odd = torch.frombuffer(bytearray(q.nbytes + 1), dtype=F32, offset=1).view(q.shape)
    said = report(lambda: p.run(pages, active, [9, 9], odd, k, v, "cpp"))
    assert "load of misaligned address" in said, said


def test_overflow_is_reported():
    """The window is one that the op itself refuses."""
    told = (
        torch.zeros(1, 2),
        torch.arange(2)[None],
        0,
        1,
        2**63 - 1,
        torch.zeros(1, dtype=torch.float64),
        1,
        False,
        None,
    )
    said = report(lambda: _C.online_topk(*told))
    assert "signed integer overflow" in said, said
