"""C++ implementation of ``running_topk``."""

from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops.training import check_priorities

_C = load_extension()


def running_topk(priority, *, sinks, window, topk):
    """Implement :func:`kvpop_vllm.kernels.ops.running_topk`."""
    check_priorities(priority)
    return _C.running_topk(priority.double(), sinks, window, topk)
