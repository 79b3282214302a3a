"""Fixtures of kernel tests."""

from __future__ import annotations

import pytest
import torch
from kernels.served import INTERPRETED, ISAS

from kvpop_vllm import _C


@pytest.fixture(autouse=True)
def fastest_isa_afterwards():
    """Restore the instruction set and the threads.

    The setter of threads is torch's own, because vLLM makes the public one a no-op once an engine has run.
    """
    threads = torch.get_num_threads()
    yield
    _C.set_isa(ISAS[-1])
    torch._C.set_num_threads(threads)


@pytest.fixture(autouse=INTERPRETED)
def poisoned():
    """Fill tensors of torch.empty with NaN, or with the largest value of an integer type."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cut(monkeypatch):
    """Cut the slots of a head among Triton's programs, and search them, in steps of 16."""
    if INTERPRETED:
        from kvpop_vllm.kernels.triton import decode_step as module

        monkeypatch.setattr(module, "SPLIT_SLOTS", 16)
        monkeypatch.setattr(module, "SEARCHED", 16)
