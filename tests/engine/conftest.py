"""Tiny models and cases, shared by all tests.

vLLM is imported inside the fixtures, because the process that distributes tests to workers also reads this
file.
"""

import functools
import os

import pytest
from engine.matrix import make_case

from kvpop_vllm.testing import write_mixed_model, write_tiny_model

collect_ignore_glob = [] if "KVPOP_PRETEND_CUDA" in os.environ else ["test_cuda_*.py"]
"""Modules that need the process with a pretended GPU, which test_cuda.py starts."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return ``make(kind)``, which returns the folder of a float32 model and writes it once."""

    @functools.cache
    def make(kind: str) -> str:
        return str(write_tiny_model(tmp_path_factory.mktemp(kind), kind))

    return make


@pytest.fixture(scope="session")
def case(tiny_model, tmp_path_factory):
    """Return ``make(kind, policy, **options)``, which builds a case once and keeps its judge's runs."""

    @functools.cache
    def make(kind: str, policy: str, **options):
        return make_case(tiny_model(kind), tmp_path_factory.mktemp("scorer"), policy, **options)

    return make


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Return ``make(kind)``, which writes the model of a family of mixed layers once and returns its folder and oracle."""

    @functools.cache
    def make(kind: str):
        from kvpop_vllm.testing import KindsOracle

        folder = write_mixed_model(tmp_path_factory.mktemp(kind), kind)
        return str(folder), KindsOracle(folder)

    return make


@pytest.fixture
def asynchronous(monkeypatch):
    """Leave asynchronous scheduling on, which vLLM switches off on a CPU although its runner there can do it."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_leave_on(cls, config):
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(update_and_leave_on))
