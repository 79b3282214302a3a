"""One table of settings, and everything that is made of it."""

import inspect
from pathlib import Path

import pytest

from kvpop_vllm import policies
from kvpop_vllm.flags import CACHE, ENGINE, REQUEST, SETTINGS, settings_of

DOCUMENT = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()


def engine_table() -> str:
    """Return the table of flags, keys and arguments in ``docs/flags.md``."""
    lines = ["| flag | key and `KVpopCache` argument | default | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        if REQUEST in setting.applies_to:
            continue
        flag = (
            f"`{setting.flag} {setting.metavar}`".replace("|", "\\|").replace(" `", "`")
            if ENGINE in setting.applies_to
            else "-"
        )
        only = "" if len(setting.applies_to) > 1 else f" ({setting.applies_to[0]} only)"
        lines.append(f"| {flag} | `{setting.name}`{only} | {setting.default or '-'} | {setting.meaning}. |")
    return "\n".join(lines)


def request_table() -> str:
    """Return the table of the keys of a request in ``docs/flags.md``."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, setting in settings_of(REQUEST).items():
        lines.append(f"| `{name}` | {setting.metavar} | {setting.default or 'of the server'} | {setting.meaning}. |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", [engine_table, request_table])
def test_the_document_has_the_table(table):
    assert f"\n\n{table()}\n\n" in DOCUMENT


def test_the_cache_of_transformers_takes_its_settings():
    from kvpop_vllm.hf import KVpopCache

    parameters = list(inspect.signature(KVpopCache).parameters)
    assert parameters == ["model", *settings_of(CACHE)]


def test_the_keys_of_a_request():
    from kvpop_vllm import requests

    assert (
        (requests.BUDGET, requests.PROTECT, requests.CARTRIDGES, requests.SEED, requests.REPORT)
        == tuple(settings_of(REQUEST))
        == requests.KEYS
    )
    assert all(name.startswith("kv_") for name in requests.KEYS)


def test_names_are_unique_and_help_is_one_sentence():
    assert len({(setting.name, setting.applies_to) for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.help.endswith(".") and "\n" not in setting.help for setting in SETTINGS)


def test_the_default_protection_is_that_of_the_policies():
    protecting = [name for name in policies.known() if policies.get(name).default_protect]
    default = settings_of(ENGINE)["protect_prompt"].default
    assert all(name in default for name in protecting) and len(protecting) == 3
