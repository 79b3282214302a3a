"""C++ implementation of ``running_topk``."""

from __future__ import annotations

from kvpop_vllm.kernels.dispatch import load_extension

_C = load_extension()


def running_topk(priority, *, sinks, window, topk):
    """Implement :func:`kvpop_vllm.kernels.ops.running_topk`."""
    return _C.running_topk(priority.double(), sinks, window, topk)
