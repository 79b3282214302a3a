"""Timing on a GPU, by Triton's ``do_bench``: the GPU's clock, with an empty cache before each call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.testing import do_bench

COPIED = 1 << 30
"""Bytes of the copy that measures memory bandwidth."""


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call."""
    return do_bench(run, return_mode="median")


@functools.cache
def bandwidth() -> float:
    """Return the bytes per millisecond that a large copy reads and writes together."""
    source = torch.zeros(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / milliseconds(lambda: target.copy_(source))


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays a CUDA graph of ``run``, which is called twice: to compile, and to be recorded."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
