"""Tiny models as transformers loads them, and policies for them.

Slow imports are inside the fixtures, because the process that distributes tests to workers also reads this
file.
"""

import functools

import pytest


@pytest.fixture(scope="module", autouse=True)
def small():
    from threads import one_thread

    with one_thread():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return ``make(kind)``, which returns (folder, model), built once."""
    from transformers import AutoModelForCausalLM

    from kvpop_vllm.testing import write_tiny_model

    @functools.cache
    def make(kind: str):
        folder = str(write_tiny_model(tmp_path_factory.mktemp(kind), kind))
        return folder, AutoModelForCausalLM.from_pretrained(folder).eval()

    return make


@pytest.fixture(scope="session")
def case(tiny, tmp_path_factory):
    """Return ``make(kind, policy, **options)``, which returns (model, Case), built once."""
    from engine.matrix import make_case

    built = {}

    def make(kind: str, policy: str, **options):
        key = kind, policy, *sorted(options.items())
        if key not in built:
            folder, model = tiny(kind)
            built[key] = model, make_case(folder, tmp_path_factory.mktemp("scorer"), policy, **options)
        return built[key]

    return make
