"""Peak memory of a function, measured by torch's CPU allocator or by the operating system."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of live tensor bytes that were allocated while ``run`` ran."""
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
    """Return the exponent p of peak memory ~ S^p between two lengths: 1 is linear, 2 an S x S array."""
    run(256)
    return math.log(peak_bytes(lambda: run(long)) / peak_bytes(lambda: run(short))) / math.log(long / short)


_RESIDENT = """
def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

run(256)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again
before = resident("VmRSS")
run(length)
print(resident("VmHWM") - before)
"""


def resident_bytes(source: str, length: int) -> int:
    """Return the peak bytes that ``run(length)`` adds to a new process, whatever allocates them.

    Args:
        source: Python code that defines ``run`` and may use ``length``.
    """
    program = f"length = {length}\n{source}{_RESIDENT}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def resident_growth(source: str, short: int = 2048, long: int = 16384) -> float:
    """Return the exponent of :func:`peak_growth` for resident memory."""
    return math.log(resident_bytes(source, long) / resident_bytes(source, short)) / math.log(long / short)
