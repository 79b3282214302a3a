"""Hooks and fixtures for all tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "kernels/test_sanitizers.py",
    "engine/test_fidelity.py",
    "server/test_server.py",
    "server/test_several_servers.py",
    "engine/test_variants.py",
    "distill/test_trainer.py",
    "engine/test_tensor_parallel.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_prefill_chunk.py",
    "kernels/test_triton_interpreted.py",
    "engine/test_traffic.py",
    "evaluation/test_reasoner_comparison.py",
    "stress/test_soak.py",
    "server/test_faults.py",
    "server/test_observability.py",
    "server/test_readme.py",
    "engine/test_cartridges.py",
)
"""Modules that run first because they would leave other workers idle at the end.

``--no-loadscope-reorder`` keeps this order.
"""
SLOW = (
    "distill/test_eval_tasks.py",
    "distill/test_gate_phases.py",
    "distill/test_trainer.py",
    "engine/test_compiled.py",
    "engine/test_cuda.py",
    "engine/test_evaluation_backend.py",
    "engine/test_variants.py",
    "kernels/test_sanitizers.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_triton_interpreted.py",
)
"""Modules that `make test` leaves out, next to tests that carry the marker ``slow`` themselves."""
NIGHTLY = {
    "stress/test_soak.py": ["test_a_minute_of_load"],
    "distill/test_memory.py": ["[4B-8", "[8B-1-", "[8B-8-True-2"],
    "engine/test_executors.py": ["[h2o", "[streaming-llm", "[kvpop-options2"],
    "engine/test_first_tokens.py": ["[vase", "[random", "[h2o-pyramid"],
    "engine/test_kinds.py": ["qwen3_5_text-kvpop", "qwen3_5_text-h2o"],
    "engine/test_speculation.py": [
        "[stateless]",
        "[recency]",
        "[newest mass]",
        "[moments]",
        "[mass, fixed shares]",
        "[state, fixed shares]",
        "[gate over hidden states]",
        "[rounds]",
        "[rounds, statistics]",
    ],
    "engine/test_tensor_parallel.py": [
        "[trimkv",
        "[kvpop-options0]",
        "[attention-matching",
        "[streaming-llm",
        "[dms-query",
    ],
    "engine/test_traffic.py": ["[h2o]", "[snapkv]", "[momentkv]", "[vase]"],
    "kernels/test_sanitizers.py": ["test_make_sanitize"],
    "server/test_published_server.py": ["[two API servers]"],
    "server/test_several_servers.py": [
        "[two API servers]",
        "[two engines]",
        "test_an_engine_of_another_node",
        "test_nodes_with_engines_and_api_servers_of_their_own",
    ],
    "server/test_wheel_installed.py": ["test_an_installed_wheel_serves"],
}
"""Parts of the names of tests that `make test-all` leaves out, by module. They take minutes, and others make most of their claims."""


def pytest_collection_modifyitems(items):
    """Move the modules of `LONGEST_FIRST` to the front, and mark what is slow or nightly.

    Slow are the modules of `SLOW`, every test of another implementation than the fastest one here, and what is nightly.
    """
    import torch  # noqa: F401  (the extension's libraries)

    from kvpop_vllm import _C

    missing = [name for name in (*LONGEST_FIRST, *SLOW, *NIGHTLY) if not (TESTS / name).is_file()]
    assert not missing, f"LONGEST_FIRST, SLOW and NIGHTLY name files that are gone: {missing}"
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    slower = {"reference", *_C.isa_levels()[:-1]}
    items.sort(key=lambda item: order.get(_module(item), len(order)))
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        nightly = any(part in item.name for part in NIGHTLY.get(_module(item), ()))
        if nightly:
            item.add_marker("nightly")
        if nightly or _module(item) in SLOW or any(isinstance(value, str) and value in slower for value in parameters):
            item.add_marker("slow")


def pytest_runtest_setup(item):
    """Skip what is slow after the time ``KVPOP_SLOW_UNTIL``, in seconds since 1970.

    Processors differ by a factor of six. On a slow one `.ci/run` would exceed its time, and no test would count.
    """
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("KVPOP_SLOW_UNTIL", "inf")):
        pytest.skip("slow, and the time KVPOP_SLOW_UNTIL is over: run it without that variable")


def _module(item) -> str:
    return "/".join(item.path.parts[-2:])


@pytest.fixture
def run_kvpop(capfd):
    """Function that runs a command line of ``kvpop`` and returns status, output and errors."""
    from kvpop_vllm.cli import main

    def run(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tiny Qwen3 model, which no test changes."""
    from kvpop_vllm.testing import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def kvpop(folder, run_kvpop, monkeypatch):
    """Function that runs a command line in the folder of a package's tests; see ``run_kvpop``."""
    monkeypatch.chdir(folder)
    return run_kvpop


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_process():
    """Give every module the same number of torch threads, because tests compare bits with other processes."""
    from threads import same_threads

    with same_threads():
        yield
