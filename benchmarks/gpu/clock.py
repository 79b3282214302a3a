"""Timing on a GPU, by Triton's ``do_bench``: the GPU's clock, with an empty cache before each call."""

import functools
import statistics
import time
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


def device_times(run: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds that each kernel takes of the GPU in one call, by its name."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / 1e3 for event in profile.key_averages() if event.device_time_total}


def wall_milliseconds(run: Callable[[], object], times: int = 5) -> float:
    """Return the median milliseconds of a call until the GPU is done, by the host's clock."""
    durations = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        durations.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(durations[1:])


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays a CUDA graph of ``run``, which is called twice: to compile, and to be recorded.

    The function keeps ``run``, and so the tensors that the graph reads, alive.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return functools.partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """Replay a graph whose tensors ``run`` holds."""
    graph.replay()
