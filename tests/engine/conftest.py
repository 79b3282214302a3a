"""Tiny models, and one watched engine for each model and policy, shared by all tests of a module. vLLM is imported where it is
needed: the process that only hands tests to workers reads this file before it starts them."""

from __future__ import annotations

import functools

import pytest
from engine.matrix import MATRIX, make_case

from kvpop_vllm.testing import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """``kind -> folder`` of a float32 model, written once."""

    @functools.cache
    def make(kind: str) -> str:
        return str(write_tiny_model(tmp_path_factory.mktemp(kind), kind))

    return make


@pytest.fixture(scope="session")
def case(tiny_model, tmp_path_factory):
    """``(kind, policy, scorer options) -> Case``, made once, with all that its judge learns."""

    @functools.cache
    def make(kind: str, policy: str, **options):
        return make_case(tiny_model(kind), tmp_path_factory.mktemp("scorer"), policy, **options)

    return make


@pytest.fixture(scope="module", params=MATRIX, ids="-".join)
def served(request, case):
    """A watched engine with room for everything."""
    from engine.driving import watched

    found = case(*request.param)
    with watched(found.model, found.settings, found.judge) as engine:
        yield engine


@pytest.fixture
def watch(case):
    """``(case, **options of LLM)`` -> context manager of a watched engine. One at a time: its patches are global."""
    from engine.driving import watched

    return lambda found, **options: watched(found.model, found.settings, found.judge, **options)
