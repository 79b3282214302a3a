"""Triton's prefill under its interpreter, in the process that test_triton_interpreted starts.

With TRITON_INTERPRET=1 the tests of test_prefill_chunk, test_online_topk and test_regions run with this
implementation alone, and that process runs some of them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from kernels import test_prefill_chunk as prefill
from kernels.problems import SOME_CASES, Problem
from kernels.served import INTERPRETED, Pool, check_same, serve
from kernels.test_prefill_chunk import DECODE, problem

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

SEQUENTIAL = [case for case in SOME_CASES if problem(case, 1, 2, 3, 4).rule.sequential]


@pytest.fixture
def few_programs(monkeypatch):
    """Use large tiles, because every operation takes an interpreter equally long."""
    from kvpop_vllm.kernels.triton import _prefill_attend

    monkeypatch.setattr(_prefill_attend, "_tiles", lambda wide, padded: (128, 64, 4))


@pytest.mark.usefixtures("few_programs")
class Interpreted:
    __test__ = INTERPRETED


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
        p = problem(case, 2, 4, 9, length=23, seed=len(case), heads=1)
        pools, outs = [Pool(p), Pool(p)], []
        for pool, chunks in zip(pools, ([3], [1, 0, 1]), strict=True):
            pool.chunk(0, 20, "cpp")
            outs.append(pool.serve(chunks, "triton"))
        whole, cut = outs
        assert torch.equal(pools[0].pages.raw, pools[1].pages.raw)
        assert torch.equal(whole.out, cut.out) and torch.equal(whole.lse, cut.lse)
        check_same(whole, serve(p, DECODE).after(20))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape, small):
        """A short chunk has several tiles, lists and pieces."""
        options = dict(roles=(2, 8, 10)) | SHAPES[shape]
        p = problem(options.pop("case"), *options.pop("roles"), length=44, seed=7, **options)
        check_same(serve(p, [34, 1, 9], "triton"), serve(p, DECODE))

    def test_unequal_budgets(self):
        prefill.test_unequal_budgets_equal_single_heads("triton", [15, 40], "linear", 60)

    @pytest.mark.parametrize("case", TURNS)
    def test_all_take_turns(self, case):
        """Chunks and steps of all implementations take turns on the same pages."""
        p = problem(case, 3, 6, 12, length=62, seed=1)
        pool, outs = Pool(p), []
        turns = (
            (26, "reference"),
            (3, "triton"),
            (0, "cpp"),
            (0, "cpp"),
            (9, "triton"),
            (0, "reference"),
            (13, "triton"),
        )
        for count, impl in turns:
            outs.append(pool.chunk(0, count, impl) if count else pool.decode([0], impl))
        found, expected = pool.serve([9], "cpp"), serve(p, DECODE)
        check_same(found, expected.after(p.length - len(found.out)))
        out = torch.cat([each for each, _ in outs])
        torch.testing.assert_close(out, expected.out[: len(out)], rtol=0, atol=2e-5)

    @pytest.mark.parametrize("size, group", [(64, 4), (80, 1)])
    def test_float16_is_within_its_roundings(self, size, group):
        prefill.check_roundings_of(
            prefill.exact_one(size, group, torch.float16, torch.float16, 100, 40), [70, 30], "triton"
        )

    def test_queries_wider_than_the_cache(self):
        """Products are then those of float32."""
        options = dict(group=3, dtype=torch.float16)
        p = problem("none", 2, 8, 10, length=40, **options)
        found, exact = serve(p, [40], "triton"), p.exact_run()
        eager = eager_runs(lambda: tuple(serve(p, [40])[:2]))
        assert found.out.dtype == torch.float32 and torch.equal(found.held[40], exact.held[:, 39])
        for name, actual, wide, low in zip(("out", "lse"), found, exact, eager, strict=False):
            assert_within_budget(actual, wide, low, name=name)

    def test_what_it_does_not_take_is_refused(self):
        p = problem("none", 2, 8, 10, length=4)
        pages, (q, k, v) = Pool(p).pages, (x[0] for x in p.texts)

        def run(q, k, v, **changes):
            rule = replace(p.rule, **changes)
            ops.prefill_chunk(q, k, v, pages, p.table[0], 0, p.budgets[0], rule=rule, scale=1.0, impl="triton")

        for error, message, arguments, changes in (
            (ValueError, "room for a state of 0 floats, the rule needs 1088", (q, k, v), {"moment_correction": True}),
            (TypeError, "prefill_chunk in Triton takes .*, got torch.float64", (q.double(), k, v), {}),
            (ValueError, "last axis", (q, k, torch.cat([v, v], -1)[..., ::2]), {}),
            (ValueError, "log_gamma must be contiguous torch.float64", (q, k, v), {"log_gamma": p.rule.log_gamma.float()}),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                run(*arguments, **changes)
        assert (pages.raw == 255).all()


PREFIXED = {
    "recency": dict(case="none", group=1, heads=2, unequal=True),
    "float16": dict(case="linear", dtype=torch.float16, q_dtype=torch.float16, size=64),
    "own decays": dict(case="gate_scores-ages"),
    "mlstm": dict(case="mlstm-norm-skip", replay=9),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "mean mass": dict(case="mass-mean"),
    "threshold": dict(case="gate_scores-threshold-corrected"),
}


@functools.cache
def decoded(name):
    """Return a problem with a prefix of 18 tokens and the results of the reference's decode steps."""
    sizes = dict(heads=1, window=3, topk=13, protected=(18,))
    p = Problem(**(sizes | PREFIXED[name])).prepare()
    p.length = 23 if p.rule.sequential else 40
    return p, serve(p, DECODE)


class TestPrefillBehindAPrefix(Interpreted):
    @pytest.mark.parametrize("cuts", [[40], [18, 22], [17, 1, 22], [5, 17, 3, 15], [30, 10]], ids=str)
    @pytest.mark.parametrize("name", PREFIXED)
    def test_equals_decode_steps(self, name, cuts, monkeypatch):
        """Chunks lie within a prefix of 18 tokens, cross its end, begin at it and lie behind it."""
        from kvpop_vllm.kernels import prefix_attention

        monkeypatch.setattr(prefix_attention, "PIECE", 16)
        p, expected = decoded(name)
        if p.rule.sequential and len(cuts) > 2:
            cuts = [16, 5, 2]
        pools = Pool(p), Pool(p)
        found = pools[0].serve(cuts, "triton")
        pools[1].serve(DECODE, "reference")
        check_same(found, expected, 2e-3 if p.dtype == torch.float16 else 2e-5)
        for h in range(p.heads):
            held = [p.long_range(pool.pages, 0, h, p.length - 1) for pool in pools]
            scores = (torch.tensor([x[t] for t in held[1]]) for x in held)
            torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3 if p.dtype == torch.float16 else 1e-4)


def test_every_case_is_there():
    """The few parameters of the tests above cover every case."""
    assert set(SOME_CASES) == {*SEQUENTIAL, *TURNS, *(options["case"] for options in SHAPES.values())}
