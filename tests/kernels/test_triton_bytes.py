"""Bytes that the kernels of a decode step move, counted in Triton's interpreter, and the floors in docs/kernels.md."""

import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.problems import Problem
from kernels.served import INTERPRETED

PAGE = Path(__file__).parents[2] / "docs/kernels.md"
QWEN = {"size": 128, "features": 128, "values": 128, "slots": 4096, "topk": 4096 - 256 - 4, "heads": 8, "itemsize": 2}
"""KVpop's mLSTM under Qwen3-8B in bfloat16, B = 4,096."""


def floors(size: int, features: int, values: int, slots: int, topk: int, heads: int, itemsize: int) -> dict[str, int]:
    """Return the least bytes that a layer's kernels move for a request, but for weights, which up to 16 requests share."""
    width = features // 2  # hedgehog: two features a column
    return {
        "_project": heads * 2 * size * (2 * width + values) * 4,
        "_cells": heads * 2 * features * values * 4,
        "search": heads * topk * 8,
        "_attend": heads * slots * 2 * size * itemsize,
    }


@contextmanager
def counted():
    """Yield a dict that gets the bytes that each kernel loads and stores, by its name."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    moved, running = {}, []
    originals = {name: getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store")}
    call = GridExecutor.__call__

    def noted(name):
        def access(self, ptrs, *arguments):
            mask = arguments[0 if name == "create_masked_load" else 1]
            size = ptrs.get_element_ty().primitive_bitwidth // 8
            addresses = np.unique(ptrs.data[mask.data])  # lanes that ask for the same word get it once
            moved[running[-1]] = moved.get(running[-1], 0) + len(addresses) * size
            return originals[name](self, ptrs, *arguments)

        return access

    def launch(self, *arguments, **options):
        running.append(self.fn.__name__)
        try:
            return call(self, *arguments, **options)
        finally:
            running.pop()

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(InterpreterBuilder, name, noted(name))
        patch.setattr(GridExecutor, "__call__", launch)
        yield moved


def full_pages(p: Problem, q: int):
    """Return pages whose slots are all in use, of requests that have seen q tokens."""
    generator = torch.Generator().manual_seed(1)
    pages = p.layout.view(
        torch.zeros(p.num_blocks, p.heads, p.layout.block_slots, p.layout.slot_bytes, dtype=torch.uint8)
    )
    for array in (pages.k, pages.v, pages.score):
        array.copy_(torch.randn(array.shape, generator=generator))
    pages.state.copy_(torch.rand(pages.state.shape, generator=generator))
    pages.position.copy_(torch.arange(pages.position.numel()).view(pages.position.shape) % 100)
    first = p.table[:, :, p.layout.state_blocks].long()
    pages.position[first, torch.arange(p.heads), 0] = q
    return pages


if INTERPRETED:

    @pytest.mark.parametrize("requests", [1, 3])
    def test_a_step_moves_little_more_than_its_floors(requests):
        """Weights are read once for all requests; inputs, outputs and what one kernel leaves for another come on top."""
        from kvpop_vllm.kernels.triton.decode_step import decode_step

        sizes = dict(heads=2, group=2, size=64, slots=64, sinks=4, window=60)
        p = Problem("mlstm", requests, topk=960, **sizes).prepare()
        pages, (q, k, v) = full_pages(p, 5000), p.inputs(range(requests))
        options = dict(rule=p.rule, scale=p.scale, windows=p.windows)
        with counted() as moved:
            decode_step(q, k, v, pages, p.table, torch.full((requests,), 5000), p.budgets, **options)
        scorer = p.rule.scorer
        lower_bounds = floors(64, scorer.features, scorer.value_size, 1024, 960, 2, 4)
        lower_bounds["_cells"] += lower_bounds.pop("search")
        assert moved.keys() == {"_project", "_cells", "_evict_and_insert", "_attend"}
        for kernel, floor in lower_bounds.items():
            floor *= 1 if kernel == "_project" else requests
            assert floor <= moved[kernel] <= 1.15 * floor, (kernel, moved[kernel], floor)
        assert moved["_evict_and_insert"] <= 0.1 * sum(lower_bounds.values()) * requests


def test_the_floors_of_the_page_are_those_of_the_formula():
    expected, text = floors(**QWEN), PAGE.read_text()
    rows = re.findall(r"(?m)^\| `(\w+)`(, search)? \| ([\d.]+) MB of", text[text.index("## Floors") :])
    page_floors = {"search" if search else kernel: float(megabytes) for kernel, search, megabytes in rows}
    assert page_floors == pytest.approx({kernel: floor / 1e6 for kernel, floor in expected.items()}, rel=0.02)


def test_the_step_of_the_page_follows_from_its_floors():
    """A step reads its weights, and in each of 36 layers the cache of all requests; a dense one all tokens."""
    text = PAGE.read_text()
    rate, weights, floor_bytes = 2.8e12, 15.1e9, floors(**QWEN)
    once = floor_bytes.pop("_project")
    rows = re.findall(
        r"(?m)^\| (\d+) \| (.+) \|$", text[text.index("36 layers of a step") : text.index("## Compression")]
    )
    assert [int(batch) for batch, _ in rows] == [1, 8, 64, 256]
    for batch, cells in rows:
        page_numbers = [float(cell.replace(",", "")) for cell in re.split(r" \| |, ", cells)]
        cache_bytes = 36 * (once + int(batch) * sum(floor_bytes.values()))
        dense = [36 * int(batch) * 8 * 2 * 128 * 2 * tokens for tokens in (16384, 65536)]
        read = cache_bytes, *dense
        expected = [x for number in read for x in (number / 1e9, number / rate * 1e3)]
        expected += [(weights + number) / rate * 1e3 for number in read]
        assert page_numbers == pytest.approx(expected, rel=0.08, abs=0.05), batch
