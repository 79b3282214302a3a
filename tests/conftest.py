"""Hooks and fixtures for all tests."""

from __future__ import annotations

import os

import pytest

LONGEST_FIRST = (
    "engine/test_fidelity.py",
    "server/test_server.py",
    "engine/test_variants.py",
    "distill/test_trainer.py",
    "kernels/test_sanitizers.py",
    "engine/test_tensor_parallel.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_prefill_chunk.py",
    "kernels/test_triton_interpreted.py",
)
"""Modules that run first because they would leave other workers idle at the end.

``--no-loadscope-reorder`` keeps this order.
"""


def pytest_collection_modifyitems(items):
    """Move the modules of `LONGEST_FIRST` to the front and keep the order of all others."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_process():
    """Give every module the same number of torch threads, because tests compare bits with other processes."""
    from threads import same_threads

    with same_threads():
        yield


if os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("KVPOP_PLAIN_INTERPRETER") != "1":
    from kernels.quicker_interpreter import quicken

    quicken()
