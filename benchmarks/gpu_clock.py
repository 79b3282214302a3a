"""Times on a GPU: events around what runs, medians over rounds, several in turn; and CUDA graphs of what is timed.

The GPU is kept busy while the host queues what is timed, so that the launches, of a graph of a thousand nodes too, are
no part of it. What waits for the GPU itself, or is queued for longer than that, is timed with the host's share of it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

ROUNDS, WARM_UP = 10, 3
COPIED = 1 << 30
"""Bytes of the copy that says what memory can do."""
QUEUEING = 10_000_000
"""Cycles of the GPU, some 5 ms, that it waits before what is timed."""


def _once(run: Callable[[], object]) -> float:
    """Seconds of the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUEING)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def paired(runs: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Name -> median seconds, all in turn in every round."""
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(_once(run))
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median."""
    return paired({"": run}, rounds)[""]


@functools.cache
def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.zeros(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source))


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """The one on which graphs are made: every stream that a matrix product runs on keeps a workspace for good."""
    return torch.cuda.Stream()


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``run``, which is called twice: done the first time, for what has to be compiled, and
    recorded."""
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph
