"""Fixtures of kernel tests."""

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


@pytest.fixture
def small(monkeypatch):
    """Use sizes that make a short chunk use several of everything.

    Pieces have 16 tokens, tiles 16 rows and keys. Lists cover two blocks of queries and are made 16 keys at a
    time. Four slots are searched at a time, and ranks are sorted 16 at a time.
    """
    from kvpop_vllm.kernels.triton import _prefill_attend, _prefill_plan, online_topk, running_topk
    from kvpop_vllm.kernels.triton._tiles import Tile

    monkeypatch.setattr(_prefill_plan, "PIECE", 16)
    monkeypatch.setattr(_prefill_plan, "WIDTH", 16)
    monkeypatch.setattr(online_topk, "BLOCK", 4)
    monkeypatch.setattr(running_topk, "BLOCK", 16)
    monkeypatch.setattr(_prefill_attend, "LISTED", 16)
    monkeypatch.setattr(_prefill_attend, "LIST_BYTES", 500)
    monkeypatch.setattr(_prefill_attend, "tile_of", lambda table, wide, size: Tile(16, 16, 4, 1))
