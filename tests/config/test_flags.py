"""One table of settings, and everything that is made of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvpop_vllm import flags, policies
from kvpop_vllm.flags import CACHE, ENGINE, REQUEST, SETTINGS, settings_of

DOCUMENT = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()


@pytest.mark.parametrize("table", [flags.engine_table, flags.request_table])
def test_the_document_has_the_table(table):
    assert f"\n\n{table()}\n\n" in DOCUMENT


def test_the_cache_of_transformers_takes_its_settings():
    from kvpop_vllm.hf import KVpopCache

    taken = list(inspect.signature(KVpopCache).parameters)
    assert taken == ["model", *settings_of(CACHE)]


def test_the_keys_of_a_request():
    from kvpop_vllm import requests

    assert (
        (requests.BUDGET, requests.PROTECT, requests.CARTRIDGES, requests.SEED, requests.REPORT)
        == tuple(settings_of(REQUEST))
        == requests.KEYS
    )
    assert all(name.startswith("kv_") for name in requests.KEYS)


def test_names_are_unique_and_help_is_one_sentence():
    assert len({(each.name, each.where) for each in SETTINGS}) == len(SETTINGS)
    assert all(each.help.endswith(".") and "\n" not in each.help for each in SETTINGS)


def test_the_default_protection_is_that_of_the_policies():
    protecting = [name for name in policies.known() if policies.get(name).default_protect]
    said = settings_of(ENGINE)["protect_prompt"].default
    assert all(name in said for name in protecting) and len(protecting) == 3
