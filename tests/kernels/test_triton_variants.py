"""Serving compiles no Triton kernel again for other lengths, under the interpreter (test_triton_interpreted)."""

import functools

import pytest
import torch
from kernels.problems import problem
from kernels.served import INTERPRETED, Pool

from kvpop_vllm.kernels import ops

CASES = {
    "mlstm": ("mlstm-norm-skip", 0),
    "own decays": ("gate_scores-ages", 0),
    "after a prefix": ("key-norm", 18),
    "token by token": ("mass-mean", 0),
}
WARM_UP = 37, 1, 20, 3
"""Chunks of the prompt of a warm-up; the second call also has the next chunk of two other requests."""
PROMPTS = (32, 16, 8, 2), (16, 1, 1, 39), (48, 5, 7, 1), (33, 15, 9, 3)
"""Chunks of later prompts: one token, sizes that 16 divides, and others."""


class PretendedDriver:
    """Driver of a GPU that is not there, which runs nothing."""

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0

    @staticmethod
    def get_current_target():
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def variants(monkeypatch):
    """Return a set of the variants that launches ask for: names, and keys under which Triton would cache them on a GPU.

    The interpreter compiles nothing. Each launch is also one of Triton's own function for GPUs, whose compilation is
    declined by a hook.
    """
    from triton import JITFunction, knobs
    from triton.runtime import driver
    from triton.runtime.interpreter import InterpretedFunction

    launched, run = set(), InterpretedFunction.run

    @functools.cache
    def on_gpus(interpreted: InterpretedFunction) -> JITFunction:
        return JITFunction(interpreted.fn, **interpreted.kwargs)

    def decline(*, fn, key: str, **options) -> bool:
        launched.add((fn.name, key))
        return True

    def record(self, *args, grid, warmup, **options):
        kernel = on_gpus(self)
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
        texts = {name: str(named[name]) for name in constants if name in named}  # the hook gets constants as JSON
        kernel.warmup(grid=grid, **named | texts)
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(type(driver), "active", PretendedDriver)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", decline)
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
