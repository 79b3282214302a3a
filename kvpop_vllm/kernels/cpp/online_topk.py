"""C++ implementation of ``online_topk``."""

from kvpop_vllm.kernels.dispatch import load_extension

_C = load_extension()


def online_topk(score, position, retained, *, topk, window, log_gamma, decay_step=1, ages=False, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.online_topk`."""
    return _C.online_topk(score, position, retained, topk, window, log_gamma, decay_step, ages, keys)
