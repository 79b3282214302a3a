"""Peak memory of a function, as torch's CPU allocator sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest sum of live tensor bytes that were allocated while ``run`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    changes = []
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    live = peak = 0
    for _, size in sorted(changes, key=lambda c: c[0]):
        live += size
        peak = max(peak, live)
    return peak


def peak_growth(run: Callable[[int], object], short: int = 2048, long: int = 16384) -> float:
    """Exponent p of peak memory ~ S^p between two lengths: 1 is linear, 2 an S x S array."""
    run(256)
    return math.log(peak_bytes(lambda: run(long)) / peak_bytes(lambda: run(short))) / math.log(long / short)
