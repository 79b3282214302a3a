"""Fixtures of kernel tests."""

from __future__ import annotations

import pytest
import torch
from kernels.served import INTERPRETED, ISAS
from threads import one_thread

from kvpop_vllm import _C


@pytest.fixture(autouse=True)
def one_thread_and_fastest_isa_afterwards():
    """Run on one thread, and restore the instruction set and the threads."""
    with one_thread():
        yield
    _C.set_isa(ISAS[-1])


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
