"""Peak memory of a function, measured by torch's CPU allocator."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of live tensor bytes that were allocated while ``run`` ran."""
    gc.collect()
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
