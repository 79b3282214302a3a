"""Triton's prefill under its interpreter, in the process that test_triton_interpreted starts."""

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch
from kernels import test_prefill_chunk as prefill
from kernels.problems import SOME_CASES, problem
from kernels.served import INTERPRETED, Pool, check_same, serve
from kernels.test_prefill_chunk import DECODE, SEQUENTIAL

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import assert_within_budget, eager_runs

F16, SHORT = torch.float16, (2, 3, 13)
SHAPES = {
    "three query heads of 48": ("mlp", [34, 1, 9], 0, dict(group=3, size=48)),
    "heads of 512": ("linear", [30, 10], 18, dict(dtype=F16, group=4, size=512, heads=1)),
    "one query head of 80": ("key-norm", [34, 1, 9], 0, dict(group=1, size=80, slots=32)),
    "no sinks, window 1": ("linear", [34, 1, 9], 0, dict(roles=(0, 1, 5), step=3)),
    "own decays": ("gate_scores-ages", [34, 1, 9], 0, dict(roles=(3, 6, 12))),
    "k = 0, own decays": ("gate_scores-ages", [34, 1, 9], 0, dict(roles=(4, 16, 0))),
    "fewer tokens than slots": ("mlstm-softmax-cap", [34, 1, 9], 0, dict(roles=(3, 5, 60))),
    "sinks and ring beyond the tokens": ("none", [34, 1, 9], 0, dict(roles=(40, 30, 2))),
    "state in several blocks": ("mlstm-direct-values", [34, 1, 9], 0, dict(size=64, heads=1)),
    "norm and skip": ("mlstm-norm-skip", [34, 1, 9], 0, {}),
    "read at once": ("mlstm-immediate", [34, 1, 9], 0, {}),
    "recency, within a prefix and beyond": ("none", [5, 17, 3, 15], 18, dict(group=1, unequal=True)),
    "float16, across a prefix's end": ("linear", [30, 10], 18, dict(dtype=F16, size=64, heads=1)),
    "own decays, one protected token is left": ("gate_scores-ages", [17, 1, 22], 18, dict(roles=SHORT)),
    "mlstm begins with the tail": ("mlstm-norm-skip", [18, 22], 18, dict(replay=9, roles=SHORT, heads=1)),
    "mlstm after a prefix, all at once": ("mlstm", [40], 18, dict(replay=9, roles=SHORT, heads=1)),
    "mlstm read at once, across": ("mlstm-immediate", [30, 10], 18, dict(roles=SHORT, heads=1)),
    "mean mass, across": ("mass-mean", [16, 5, 2], 18, dict(length=23, roles=SHORT, heads=1)),
    "threshold, from its end on": ("gate_scores-threshold-corrected", [18, 5], 18, dict(length=23, heads=1)),
    "whole blocks": ("gate_scores", [20, 20], 32, dict(roles=SHORT)),
    "biases, within a prefix and beyond": ("none", [5, 17, 3, 15], 18, dict(group=3, size=80, biased=(18,))),
    "biases of some, float16": ("linear", [30, 10], 18, dict(dtype=F16, size=64, biased=(7,))),
    "biases, mean mass": ("mass-mean", [16, 5, 2], 18, dict(length=23, roles=SHORT, biased=(17,))),
    "sinks, three query heads": ("mlp", [34, 1, 9], 0, dict(group=3, size=48, has_sinks=True)),
    "sinks, within a prefix and beyond": ("none", [5, 17, 3, 15], 18, dict(group=3, size=80, has_sinks=True)),
    "sinks, mean mass": ("mass-mean", [16, 5, 2], 18, dict(length=23, roles=SHORT, has_sinks=True)),
    "sinks, moments": ("moment-corrected", [16, 7], 0, dict(length=23, roles=SHORT, heads=1, has_sinks=True)),
}
"""Case, chunks, number of protected tokens, and options of the problem."""
TURNS = "mlstm", "mlstm-immediate", "gate_scores-ages"


def before_a_forbidden_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an int32 tensor. A read past its end stops the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.int32, count=tensor.numel(), offset=page - tensor.nbytes).view(
        tensor.shape
    )
    return copy.copy_(tensor)


class TestPrefillChunk:
    __test__ = INTERPRETED

    @pytest.fixture(autouse=True)
    def few_programs(self, monkeypatch):
        """Use large tiles, because every operation takes an interpreter equally long."""
        from kvpop_vllm.kernels.triton import _prefill_attend
        from kvpop_vllm.kernels.triton._tiles import Tile

        monkeypatch.setattr(_prefill_attend, "tile_of", lambda table, wide, size: Tile(128, 64, 4, 1))

    @pytest.mark.parametrize("name", SHAPES)
    def test_shapes(self, name, small):
        """A short chunk has several tiles, lists and pieces, and lies anywhere relative to a prefix."""
        case, chunks, protect, options = SHAPES[name]
        p = problem(case, protect, **({"length": max(44, sum(chunks)), "seed": 7} | options))
        pools, atol = (Pool(p), Pool(p)), 2e-3 if p.dtype == F16 else 2e-5
        check_same(pools[0].serve(chunks, "triton"), pools[1].serve(DECODE, "reference"), atol)
        for h in range(p.heads):
            long_range = [p.long_range(pool.pages, 0, h, p.length - 1) for pool in pools]
            scores = (torch.tensor([x[t] for t in long_range[1]]) for x in long_range)
            torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3 if p.dtype == F16 else 1e-4)

    def test_a_table_is_not_read_beyond_its_end(self):
        """Without long-range slots, and with a budget of whole blocks, there is no page for the slot after the ring."""
        p = problem("none", roles=(4, 12, 0), length=40, heads=1)
        pool = Pool(p)
        assert p.table.numel() == 1
        pool.table = before_a_forbidden_page(p.table)
        check_same(pool.serve([30, 10], "triton"), serve(p, DECODE))

    def test_unequal_budgets(self):
        prefill.test_unequal_budgets_equal_single_heads("triton", "linear", (15, 40), 60, "reference")

    @pytest.mark.parametrize("case", TURNS)
    def test_all_take_turns(self, case):
        """Chunks and steps of all implementations take turns on the same pages."""
        p = problem(case, roles=(3, 6, 12), length=62, seed=1)
        pool, outs = Pool(p), []
        counts, impls = (26, 3, 0, 0, 9, 0, 13), ("reference", "triton", "cpp", "cpp", "triton", "reference", "triton")
        for count, impl in zip(counts, impls, strict=True):
            outs.append(pool.chunk(0, count, impl) if count else pool.decode([0], impl))
        actual, expected = pool.serve([9], "cpp"), serve(p, DECODE)
        check_same(actual, expected.after(p.length - len(actual.out)))
        out = torch.cat([part for part, _ in outs])
        torch.testing.assert_close(out, expected.out[: len(out)], rtol=0, atol=2e-5)

    @pytest.mark.parametrize("size, group", [(64, 4), (80, 1)])
    def test_float16_is_within_its_roundings(self, size, group):
        shape = dict(size=size, group=group, dtype=F16, length=100, roles=(4, 32, 40))
        prefill.check_roundings_of("triton", [70, 30], **shape)

    def test_queries_wider_than_the_cache(self):
        """Products are then those of float32."""
        p = problem("none", roles=(2, 8, 10), length=40, group=3, dtype=F16, q_dtype=torch.float32)
        served, exact = serve(p, [40], "triton"), p.exact_run()
        eager = eager_runs(lambda: tuple(serve(p, [40])[:2]))
        assert served.out.dtype == torch.float32 and torch.equal(served.retained[40], exact.retained[:, 39])
        for name, actual, wide, low in zip(("out", "lse"), served, exact, eager, strict=False):
            assert_within_budget(actual, wide, low, name=name)

    def test_what_it_does_not_take_is_refused(self):
        p = problem("none", length=4)
        pages, (q, k, v) = Pool(p).pages, (x[0] for x in p.texts)

        def run(q, k, v, **changes):
            rule = replace(p.rule, **changes)
            chunk = Chunks.of_request(0, len(q), p.budgets[0], rule.window)
            ops.prefill_chunk(q, k, v, pages, p.table[:1], chunk, rule=rule, scale=1.0, impl="triton")

        for error, message, arguments, changes in (
            (ValueError, "room for a state of 0 floats, the rule needs 1088", (q, k, v), {"moment_correction": True}),
            (TypeError, "prefill_chunk in Triton takes .*, got torch.float64", (q.double(), k, v), {}),
            (ValueError, "last axis", (q, k, torch.cat([v, v], -1)[..., ::2]), {}),
            (ValueError, "log_gamma must be contiguous torch.float64", (q, k, v), {"log_gamma": p.rule.log_gamma.float()}),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                run(*arguments, **changes)
        assert (pages.raw == 255).all()


def test_every_case_is_there():
    """The few parameters of the tests above cover every case."""
    assert set(SOME_CASES) <= {*SEQUENTIAL, *(case for case, *_ in SHAPES.values())}
