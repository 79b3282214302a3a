"""Threads of torch in tests: how many there are decides the last bits of what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_threads() -> Iterator[None]:
    """Afterwards there are as many as before, and ``torch.set_num_threads`` does what it did: vLLM's engine replaces it by nothing, for
    the rest of the process."""
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = setter
        torch._C.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more. Not by the public name, see above."""
    with same_threads():
        torch._C.set_num_threads(1)
        yield
