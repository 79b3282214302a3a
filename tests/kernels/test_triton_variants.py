"""Serving compiles no Triton kernel again for other lengths, under the interpreter (test_triton_interpreted)."""

from __future__ import annotations

import inspect

import pytest
import torch
from kernels.problems import problem
from kernels.served import INTERPRETED, Pool

from kvpop_vllm.kernels import ops

CASES = {
    "mlstm": ("mlstm-norm-skip", 0),
    "own decays": ("gate_scores-ages", 0),
    "behind a prefix": ("key-norm", 18),
    "token by token": ("mass-mean", 0),
}
WARM_UP = 37, 1, 20, 3
"""Chunks of the prompt of a warm-up; the second call also has the next chunk of two other requests."""
PROMPTS = (32, 16, 8, 2), (16, 1, 1, 39), (48, 5, 7, 1), (33, 15, 9, 3)
"""Chunks of later prompts: one token, sizes that 16 divides, and others."""


@pytest.fixture
def variants(monkeypatch):
    """Return a set of the variants that launches ask for: names, and what Triton compiles for of each argument.

    The interpreter compiles nothing. Triton's own function says what a launch on a GPU would specialise.
    """
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from triton.runtime.interpreter import InterpretedFunction

    launched, run = set(), InterpretedFunction.run

    def record(self, *args, grid, warmup, **options):
        parameters, fixed = inspect.signature(self.fn).parameters, self.kwargs.get("do_not_specialize") or ()
        named = dict(zip(parameters, args, strict=False)) | options
        variant = [self.fn.__name__]
        for name, value in sorted(named.items()):
            if name in parameters and "constexpr" not in str(parameters[name].annotation):
                value = native_specialize_impl(BaseBackend, value, False, name not in fixed, True)
            variant.append(f"{name}: {value}")
        launched.add(tuple(variant))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return launched


def serve(case: str, protect: int, chunks: tuple[int, ...]) -> None:
    """Serve a prompt in chunks, the second one together with those of other requests, and then four steps of all."""
    length = sum(chunks) + 5
    pool = Pool(problem(case, protect, protect, protect, length=length, roles=(3, 5, 12), heads=1, seed=7, size=32))
    for index, count in enumerate(chunks):
        pool.chunks({0: count} | ({1: chunks[0], 2: chunks[-1]} if index == 1 else {}), "triton")
    for _ in range(4):
        pool.decode([0, 1, 2], "triton")


class TestVariants:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", CASES)
    def test_serving_adds_none_after_a_warm_up(self, variants, small, name):
        case, protect = CASES[name]
        prompts = PROMPTS if name != "token by token" else [tuple(min(count, 4) for count in p) for p in PROMPTS]
        serve(case, protect, WARM_UP)
        warm = set(variants)
        names = {variant[0] for variant in warm}
        assert {"_attend", "_evict_and_insert"} <= names
        assert ("_steps" if name == "token by token" else "_attend_keys") in names
        for chunks in prompts:
            serve(case, protect, chunks)
        assert variants - warm == set()

    def test_ranks_of_other_lengths_add_none(self, variants, small):
        lengths = 70, 64, 65, 96, 33, 127
        for length in lengths:
            ops.running_topk(torch.randn(1, 2, length), sinks=1, window=4, topk=6, impl="triton")
        assert sorted(variant[0] for variant in variants) == ["_count", "_descend", "_split", "_split"]
