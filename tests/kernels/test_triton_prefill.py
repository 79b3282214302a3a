"""Triton's prefill under its interpreter, in the process that test_triton_interpreted starts.

With TRITON_INTERPRET=1 the tests of test_prefill_chunk, test_online_topk and test_regions run with this
implementation alone, and that process runs some of them.
"""

from __future__ import annotations

import os
import types
from dataclasses import replace

import pytest
import torch
from kernels import test_prefill_chunk as prefill
from kernels.factories import given_scores
from kernels.problems import SOME_CASES
from kernels.test_prefill_chunk import Problem, check_same

from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SEQUENTIAL = [case for case in SOME_CASES if Problem(case, 1, 2, 3, 4).rule.sequential]


@pytest.fixture
def poisoned():
    """Fill tensors of torch.empty with NaN, or with the largest value of an integer type."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(monkeypatch):
    """Use large tiles, because every operation takes an interpreter equally long."""
    from kvpop_vllm.kernels.triton import _prefill_attend

    monkeypatch.setattr(_prefill_attend, "_tiles", lambda wide, padded: (128, 64, 4))


@pytest.mark.usefixtures("poisoned", "few_programs")
class Interpreted:
    __test__ = INTERPRETED


class Parts:
    """One request whose tokens are given in parts, to ops and implementations in turn."""

    def __init__(self, problem: Problem):
        self.p, self.start, self.rows = problem, 0, []
        self.pages, self.table = problem.pages()

    def take(self, count: int, impl: str, op: str = "prefill_chunk"):
        """Process the next ``count`` tokens and return self."""
        p, end = self.p, self.start + count
        own = dict(rule=p.rule, scale=p.scale, impl=impl)
        steps = [(self.start, end)] if op == "prefill_chunk" else [(t, t + 1) for t in range(self.start, end)]
        for a, b in steps:
            q, k, v = (x[a:b] for x in (p.q, p.k, p.v))
            gate_scores = given_scores(p.rule, k)
            if op == "prefill_chunk":
                found = ops.prefill_chunk(
                    q, k, v, self.pages, self.table[0], a, p.budgets, gate_scores=gate_scores, **own
                )
            else:
                told = torch.tensor([a]), p.budgets.expand(1, -1)
                found = ops.decode_step(q, k, v, self.pages, self.table, *told, gate_scores=gate_scores, **own)
            self.rows.append(found)
        self.start = end
        return self

    def result(self):
        out, lse = (torch.cat(x) for x in zip(*self.rows, strict=True))
        return out, lse, self.p.held(self.pages, self.table)


@pytest.fixture
def small(monkeypatch):
    """Use sizes that make a short chunk use several of everything.

    Pieces have 16 tokens, tiles 16 rows and keys. Lists cover two blocks of queries and are made 16 keys at a
    time. Four slots are searched at a time.
    """
    from kvpop_vllm.kernels.triton import _prefill_attend, online_topk, prefill_chunk

    monkeypatch.setattr(prefill_chunk, "PIECE", 16)
    monkeypatch.setattr(online_topk, "BLOCK", 4)
    monkeypatch.setattr(_prefill_attend, "LISTED", 16)
    monkeypatch.setattr(_prefill_attend, "LIST_BYTES", 500)
    monkeypatch.setattr(_prefill_attend, "_tiles", lambda wide, padded: (16, 16, 4))


SHAPES = {
    "three query heads of 48": dict(case="mlp", group=3, size=48),
    "one query head of 80": dict(case="key-norm", group=1, size=80, slots=32),
    "no sinks, window 1": dict(case="linear", roles=(0, 1, 5)),
    "k = 0": dict(case="gate_scores", roles=(4, 16, 0)),
    "own decays": dict(case="gate_scores-ages", roles=(3, 6, 12)),
    "k = 0, own decays": dict(case="gate_scores-ages", roles=(4, 16, 0)),
    "fewer tokens than slots": dict(case="mlstm-softmax-cap", roles=(3, 5, 60)),
    "sinks and ring beyond the tokens": dict(case="none", roles=(40, 30, 2)),
    "state in several blocks": dict(case="mlstm-direct-values", size=64, heads=1),
    "norm and skip": dict(case="mlstm-norm-skip"),
    "read at once": dict(case="mlstm-immediate"),
}
TURNS = "mlstm", "mlstm-immediate", "gate_scores-ages"


class TestPrefillChunk(Interpreted):
    @pytest.mark.parametrize("case", SEQUENTIAL)
    def test_token_by_token(self, case):
        """Triton continues another implementation's request, and chunks equal decode steps to the bit."""
        p = Problem(case, 2, 4, 9, length=23, seed=len(case), heads=1)
        begun = Parts(p).take(20, "cpp")
        whole, cut = (Parts(p) for _ in range(2))
        for other in (whole, cut):
            other.start, other.rows, other.table = 20, list(begun.rows), begun.table
            other.pages = p.layout.view(begun.pages.raw.clone())
        check_same(whole.take(3, "triton").result(), p.decode())
        cut.take(1, "triton").take(1, "triton", "decode_step").take(1, "triton")
        assert torch.equal(cut.pages.raw, whole.pages.raw)
        assert all(torch.equal(a, b) for a, b in zip(whole.result()[:2], cut.result()[:2], strict=True))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape, small):
        """A short chunk has several tiles, lists and pieces."""
        options = dict(roles=(2, 8, 10)) | SHAPES[shape]
        p = Problem(options.pop("case"), *options.pop("roles"), length=44, seed=7, **options)
        check_same(p.prefill([34, 1, 9], "triton"), p.decode())

    def test_unequal_budgets(self):
        prefill.test_unequal_budgets_equal_single_heads("triton", [15, 40], "linear", 60)

    @pytest.mark.parametrize("case", TURNS)
    def test_all_take_turns(self, case):
        """Chunks and steps of all implementations take turns on the same pages."""
        p = Problem(case, 3, 6, 12, length=70, seed=1)
        turns = Parts(p).take(26, "reference").take(3, "triton").take(8, "cpp", "decode_step").take(9, "triton")
        turns.take(2, "reference", "decode_step").take(13, "triton").take(9, "cpp")
        check_same(turns.result(), p.decode())

    @pytest.mark.parametrize("size, group", [(64, 4), (80, 1)])
    def test_float16_is_within_its_roundings(self, size, group):
        """The error is that of weights rounded to 2^-11 of each, or by 2^-25 where they are smallest.

        The test is that of bfloat16 in test_prefill_chunk.
        """
        options = dict(length=100, size=size, group=group, seed=size)
        rounded, exact = (
            Problem("linear", 4, 8, 40, dtype=torch.float16, **options),
            Problem("linear", 4, 8, 40, **options),
        )
        exact.q, exact.k, exact.v = rounded.q.float(), rounded.k.float(), rounded.v.float()
        exact.rule.scorer.weight[:, size:] = 0
        rounded.rule = exact.rule
        out, lse, held = rounded.prefill([70, 30], "triton")
        expected, expected_lse, expected_held = exact.prefill([100])
        smallest = 2.0**-25 * rounded.budget * exact.v.abs().max()
        exact.v = exact.v.abs()
        magnitude = exact.prefill([100])[0]
        assert held == expected_held and out.dtype == torch.float16
        assert ((out.float() - expected).abs() <= 2.0**-10 * (magnitude + expected.abs()) + smallest).all()
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-5)

    def test_queries_wider_than_the_cache(self):
        """Products are then those of float32."""
        p = Problem("none", 2, 8, 10, length=40, group=3, dtype=torch.float16)
        p.q = p.q.float() + 2.0**-13
        out, lse, held = p.prefill([40], "triton")
        *eager, same = eager_runs(lambda: p.prefill([40]))
        assert all(held == eagerly for eagerly in same) and out.dtype == torch.float32
        p.k, p.v, p.layout = p.k.float(), p.v.float(), replace(p.layout, dtype=torch.float32)
        exact = p.prefill([40])
        for name, actual, wide, low in (("out", out, exact[0], eager[0]), ("lse", lse, exact[1], eager[1])):
            assert_within_budget(actual, wide.double(), low, name=name)

    def test_strided_inputs_equal_contiguous_ones(self):
        p = Problem("mlstm-direct-values", 2, 8, 10, length=45, seed=2)
        expected, q, k, v = p.prefill([45], "triton"), p.q, p.k, p.v
        packed = torch.cat([q, k, v], 1)
        p.q, p.k, p.v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
        found = p.prefill([45], "triton")
        assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True)) and found[2] == expected[2]

    def test_foreign_bytes_do_not_matter(self):
        """Pages hold NaN where nothing was written, and other blocks do not change."""
        p = Problem("linear", 2, 6, 9, length=60, seed=1)
        parts = Parts(p).take(33, "triton").take(27, "triton")
        others = torch.ones(parts.pages.num_blocks, dtype=torch.bool)
        others[parts.table.flatten().long()] = False
        assert parts.result()[0].isfinite().all() and (parts.pages.raw[others] == 255).all() and others.any()

    def test_no_tokens(self):
        p = Problem("mlstm", 2, 8, 10, length=20)
        parts = Parts(p).take(20, "triton")
        before = parts.pages.raw.clone()
        out, lse = ops.prefill_chunk(
            p.q[:0], p.k[:0], p.v[:0], parts.pages, parts.table[0], 20, p.budgets, rule=p.rule, scale=1.0, impl="triton"
        )
        assert out.shape == p.q[:0].shape and lse.shape == (0, 4) and torch.equal(parts.pages.raw, before)

    def test_what_it_does_not_take_is_refused(self):
        p = Problem("none", 2, 8, 10, length=4)
        pages, table = p.pages()

        def run(q, k, v, **changes):
            rule = replace(p.rule, **changes)
            ops.prefill_chunk(q, k, v, pages, table[0], 0, p.budgets, rule=rule, scale=1.0, impl="triton")

        with pytest.raises(ValueError, match="room for a state of 0 floats, the rule needs 1088"):
            run(p.q, p.k, p.v, moment_correction=True)
        with pytest.raises(TypeError, match="prefill_chunk in Triton takes .*, got torch.float64"):
            run(p.q.double(), p.k, p.v)
        with pytest.raises(ValueError, match="last axis"):
            run(p.q, p.k, torch.cat([p.v, p.v], -1)[..., ::2])
        with pytest.raises(ValueError, match="log_gamma must be contiguous torch.float64"):
            run(p.q, p.k, p.v, log_gamma=p.rule.log_gamma.float())
        assert (pages.raw == 255).all()

    def test_step_order_token_by_token(self):
        """A wrong start raises before anything is written, although decode steps would only return NaN."""
        p = Problem("mass-mean", 2, 4, 9, length=24)
        parts = Parts(p).take(20, "cpp")
        before = parts.pages.raw.clone()
        parts.start = 19
        with pytest.raises(ops.StepOrderError, match="starts at position 19, but its cache has seen 20"):
            parts.take(3, "triton")
        assert torch.equal(parts.pages.raw, before)


def test_every_case_is_there():
    """The few parameters of the tests above cover every case."""
    assert set(SOME_CASES) == {*SEQUENTIAL, *TURNS, *(options["case"] for options in SHAPES.values())}


def test_choice_of_implementation():
    def on(device, dtype, size=64):
        return types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 4, size))

    assert dispatch.select("prefill_chunk", on("cuda", torch.bfloat16, 256)) == "triton"
    assert dispatch.select("prefill_chunk", on("cuda", torch.float16, 80)) == "triton"
    assert dispatch.select("prefill_chunk", on("cuda", torch.float64)) == "reference"
    assert dispatch.select("prefill_chunk", on("cuda", torch.bfloat16, 512)) == "reference"
    assert dispatch.select("online_topk", on("cuda", torch.float32)) == "triton"
