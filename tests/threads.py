"""Torch threads in tests, whose number decides the last bits of results, and the dtype that this processor multiplies fast."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPE = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
"""Dtype of models of real size: products in bfloat16 take 100 times as long on processors without AVX-512."""


@contextmanager
def same_threads() -> Iterator[None]:
    """Restore the number of torch threads and ``torch.set_num_threads`` at the end.

    vLLM's engine replaces that function by one that does nothing, for the rest of the process.
    """
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = setter
        torch._C.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one torch thread, because tiny models gain nothing from more.

    The private setter is called because vLLM's engine disables the public one, see :func:`same_threads`.
    """
    with same_threads():
        torch._C.set_num_threads(1)
        yield


def core_for_each_of_two() -> dict[str, str]:
    """Return environment variables that give each of two workers or engines of vLLM a core.

    Two engines share the first memory node, because vLLM 0.33 gives each engine a node of its own otherwise.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "CPU_VISIBLE_MEMORY_NODES": "0,0"}
