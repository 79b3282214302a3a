"""Triton's kernels run by its interpreter on the CPU, in float32 and float16, all in one process.

Triton decides at import whether it interprets, so the classes named here are collected with
TRITON_INTERPRET=1 only. The interpreter runs programs one after another and cannot multiply bfloat16
matrices. Races are therefore not found here, and bfloat16 is only compiled (test_triton_compiled). Repeated
computations of the interpreter are cached (quicker_interpreter), except with KVPOP_PLAIN_INTERPRETER=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.served import INTERPRETED

QUICKER = os.environ.get("KVPOP_PLAIN_INTERPRETER") != "1"
ROOT = Path(__file__).parents[2]
TESTS = (
    "test_triton_serving.py",
    "test_triton_prefill.py",
    "test_running_topk.py",
    "test_sparse_attention.py::test_equals_the_definition",
    "test_sparse_attention.py::test_positions_before_heads_in_memory",
    "test_sparse_attention.py::test_queries_that_see_themselves_alone",
    "test_sparse_attention.py::TestTriton",
    "test_future_attention_mass.py::test_equals_the_definition",
    "test_future_attention_mass.py::test_float64_is_refused_by_triton",
    "test_delayed_mlstm.py::TestTriton",
    "test_online_topk.py",
    "test_begin_tail.py",
    "test_draws.py::TestTriton",
    "test_decode_step.py::test_victim_far_out_and_ties",
    "test_decode_step.py::test_strided_inputs_equal_contiguous_ones",
    "test_prefill_chunk.py::test_decay_steps_beyond_one[triton-3-linear]",
    "test_prefill_chunk.py::test_replay_raises_and_writes_nothing",
    "test_prefill_chunk.py::test_strided_inputs_equal_contiguous_ones",
    "test_prefill_chunk.py::test_no_tokens",
    "test_prefix.py::test_a_step_out_of_order_behind_a_prefix_is_refused",
    "test_regions.py::test_kernels_do_not_care_where_pages_lie[triton-gate_scores]",
    "../hf/test_triton.py",
    *(("test_triton_interpreted.py::TestQuickerInterpreter",) if QUICKER else ()),
)
"""Tests of Triton alone, tests of all implementations that are quick enough, and tests of transformers."""


def test_all_pass():
    paths = [str(ROOT / "tests/kernels" / test) for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", outcome.stdout)[1]) > 200
    assert not re.search("skipped|deselected", outcome.stdout)


def test_all_classes_are_named():
    """A class that is collected in the interpreter alone would never run if it was not named."""
    named = [test.partition("::") for test in TESTS]
    for file in (ROOT / "tests/kernels").glob("test_*.py"):
        written = set(re.findall(r"^class (Test\w+)", file.read_text(), re.M)) - {"TestQuickerInterpreter"}
        found = {name for path, _, name in named if path == file.name}
        assert written <= found or "" in found, file.name


def test_poison_poisons(poisoned):
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()


def now_and_before(owner, name):
    """Return the function of the quicker interpreter and Triton's original."""
    now = getattr(owner, name)
    return now, now.__wrapped__


class TestQuickerInterpreter:
    __test__ = INTERPRETED and QUICKER

    def test_dtypes(self):
        import triton.language as tl
        from triton.runtime import interpreter

        now, before = now_and_before(interpreter, "_get_np_dtype")
        scalars = [x for x in vars(tl).values() if type(x) is tl.dtype and x.name != "void"]
        assert len(scalars) > 10
        for scalar in (*scalars, *map(tl.pointer_type, scalars)):
            for kind in (scalar, tl.block_type(scalar, [4, 2])):
                assert now(kind) == now(kind) == before(kind), kind

    def test_shapes(self):
        import triton.language as tl

        def seen(x):
            own = {name: value for name, value in vars(x).items() if name != "handle"}
            return {name: list(map(str, v)) if isinstance(v, tl.tuple) else str(v) for name, v in own.items()}

        make_block, make_block_before = now_and_before(tl.block_type, "__init__")
        make, make_before = now_and_before(tl.tensor, "__init__")
        for shape in ([4, 2], [tl.constexpr(4), tl.constexpr(2)], [2, 4], [8], tl.tuple([4, 2])):
            for scalar in (tl.int32, tl.float16, tl.pointer_type(tl.float16), tl.pointer_type(tl.int32)):
                blocks = [tl.block_type.__new__(tl.block_type) for _ in range(3)]
                for block, init in zip(blocks, (make_block, make_block, make_block_before), strict=True):
                    init(block, scalar, shape)
                assert seen(blocks[0]) == seen(blocks[1]) == seen(blocks[2]) and blocks[0] == blocks[2]
                for of_type in (blocks[0], scalar):
                    tensors = [tl.tensor.__new__(tl.tensor) for _ in range(3)]
                    for tensor, init in zip(tensors, (make, make, make_before), strict=True):
                        init(tensor, "handle", of_type)
                        assert tensor.handle == "handle"
                    assert seen(tensors[0]) == seen(tensors[1]) == seen(tensors[2])

    @pytest.mark.parametrize("shape", [[3], [], [8.0], [4, 2.0], (8,), [np.int64(8)]], ids=str)
    def test_shapes_that_are_refused(self, shape):
        """A shape is refused even if an equal one has been accepted before."""
        import triton.language as tl

        def outcome(init):
            try:
                init(tl.block_type.__new__(tl.block_type), tl.int32, shape)
            except (AssertionError, AttributeError, TypeError, ValueError) as error:
                return type(error), str(error)

        tl.block_type(tl.int32, [8])
        tl.block_type(tl.int32, [4, 2])
        now, before = map(outcome, now_and_before(tl.block_type, "__init__"))
        assert now == before and now is not None

    def test_what_is_wrapped(self):
        import triton.language as tl

        now, before = now_and_before(tl.core, "_unwrap_if_constexpr")
        one = tl.constexpr(1)
        for value in (1, one, [one, [one]], (one, 2), 2.5, "x", None):
            assert now(value) == before(value) and type(now(value)) is type(before(value))
        assert list(now(tl.tuple([one, 2]))) == list(before(tl.tuple([one, 2])))

    def test_kernels_give_the_same_bits(self):
        """Training ops give equal bits, forward and backward, in float16, with gates and sums in float32."""
        from kernels.quicker_interpreter import as_it_was

        from kvpop_vllm.kernels import ops

        def results():
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(1, n, 24, 16, generator=generator).half().requires_grad_() for n in (4, 2, 2))
            gates = [torch.randn(1, 2, 24, generator=generator) for _ in range(2)]
            order = ops.running_topk(gates[0], sinks=2, window=5, topk=7, impl="triton")
            out, lse = ops.sparse_attention(q, k, v, *order, sinks=2, window=5, scale=0.25, impl="triton")
            mass = ops.future_attention_mass(q.detach(), k.detach(), lse, window=5, scale=0.25, impl="triton")
            h, state = ops.delayed_mlstm(q[:, :2].abs(), k.abs(), v, *gates, delay=3, chunk=16, impl="triton")
            grads = torch.autograd.grad(out.float().sum() + h.sum(), (q, k, v))
            return [*order, out, lse, mass, h, *state, *grads]

        now = results()
        with as_it_was():
            before = results()
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(now, before, strict=True))
