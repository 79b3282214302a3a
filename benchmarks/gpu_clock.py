"""Times on a GPU: events around what runs, medians over rounds, several in turn."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

ROUNDS, WARM_UP = 10, 3
COPIED = 1 << 30
"""Bytes of the copy that says what memory can do."""


def _once(run: Callable[[], object]) -> float:
    """Seconds of the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
