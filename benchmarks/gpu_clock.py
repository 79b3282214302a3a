"""Timing on a GPU: CUDA events, medians over rounds with several functions in turn, and CUDA graphs.

The GPU is kept busy while the host queues the timed work, so that launches, even those of a graph of a
thousand nodes, are not part of the time. Work that waits for the GPU itself, or takes the host longer to
queue, is timed with the host's share.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

ROUNDS, WARM_UP = 10, 3
COPIED = 1 << 30
"""Bytes of the copy that measures memory bandwidth."""
QUEUEING = 10_000_000
"""GPU cycles, some 5 ms, that the GPU waits before the timed work."""


def _once(run: Callable[[], object]) -> float:
    """Return the seconds of one call by the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUEING)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def paired(runs: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return name -> median seconds, with all functions called in turn in every round."""
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_once(run))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median seconds of a function."""
    return paired({"": run}, rounds)[""]


@functools.cache
def bandwidth() -> float:
    """Return the bytes per second that a large copy reads and writes together."""
    source = torch.zeros(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source))


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Return the stream on which graphs are recorded.

    There is only one, because every stream that a matrix product runs on keeps a workspace for good.
    """
    return torch.cuda.Stream()


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of ``run``.

    ``run`` is called twice: first to compile what has to be compiled, then to be recorded.
    """
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph
