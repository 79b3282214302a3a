"""Options of a request: the server's bounds and the resolved values, without an engine."""

from __future__ import annotations

import pytest

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.requests import RequestCache, of_params, resolve

SHAPE = ModelShape("llama", 2, 2, 32, 4096, num_heads=4)


def server(policy="h2o", **settings):
    return policies.get(policy)(PolicySettings(policy, **{"budget": 64} | settings), SHAPE)


def refusal(function, *args, **options) -> str:
    with pytest.raises(ConfigError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_asked_is_nothing_resolved():
    for asked in (None, {}, {"kv_transfer_params": {}}, {"other": 1}):
        assert resolve(server(), asked, 10) is None
    assert of_params(None) is None and of_params(object()) is None


@pytest.mark.parametrize("budget", [16, 33, 64, 100])
@pytest.mark.parametrize("policy", ["h2o", "tova", "streaming-llm", "momentkv", "random"])
def test_a_budget_resolves_as_a_servers(policy, budget):
    own = server(policy, budget=budget).retention
    found = resolve(server(policy, max_budget=100), {"kv_budget": budget}, 10)
    assert (found.budget, found.window) == (own.budget, own.window)
    given = server(policy, max_budget=100, window=7)
    assert resolve(given, {"kv_budget": budget}, 10).window == 7


def test_protection():
    kept = server().retention
    assert resolve(server(max_protect=True), {"kv_protect_prompt": "all"}, 10) == RequestCache(10, 64, kept.window)
    assert resolve(server(max_protect=True), {"kv_protect_prompt": True}, 10).protected == 10
    assert resolve(server(max_protect=20), {"kv_protect_prompt": "all"}, 20).protected == 20
    assert resolve(server(max_protect=20), {"kv_protect_prompt": 20}, 5).protected == 5
    assert resolve(server(protect_prompt=8), {"kv_protect_prompt": 0}, 50).protected == 0
    assert resolve(server(protect_prompt=8), {"kv_budget": 64}, 50).protected == 8
    assert resolve(server("random"), {"kv_seed": -3}, 50) == RequestCache(50, 64, server("random").retention.window, -3)


@pytest.mark.parametrize(
    "policy, settings, asked, message",
    [
        ("h2o", {}, {"kv_budget": 65}, "lower it to at most 64"),
        ("h2o", {}, {"kv_budget": True}, "kv_budget must be a whole number of tokens, got True"),
        ("h2o", {}, {"kv_budget": -5}, "kv_budget must be at least 1, got -5"),
        ("h2o", {}, {"kv_budget": float("nan")}, "kv_budget must be a whole number of tokens, got nan"),
        ("h2o", {"window": 20}, {"kv_budget": 20}, "raise kv_budget to at least 21"),
        ("h2o", {}, {"kv_protect_prompt": 1}, "this server protects no prompts"),
        ("h2o", {"max_protect": 30}, {"kv_protect_prompt": 31}, "asks for 31 tokens, more than this server allows"),
        ("h2o", {"max_protect": 30}, {"kv_protect_prompt": "all"}, "asks for 40 tokens, more than this server allows"),
        ("h2o", {}, {"kv_protect_prompt": "40"}, 'must be "all" or a whole number of tokens'),
        ("h2o", {}, {"kv_seed": 1}, "draws nothing: leave kv_seed out"),
        ("random", {}, {"kv_seed": 2**64}, "must be a whole number of 64 bits"),
        ("random", {}, {"kv_seed": 1.0}, "must be a whole number of 64 bits"),
        ("h2o", {"allocator": "pyramid"}, {"kv_budget": 60}, "gives all requests one budget here: leave kv_budget out"),
        ("adakv", {}, {"kv_budget": 60}, "gives all requests one budget here: leave kv_budget out"),
        ("snapkv", {"allocator": "ada"}, {"kv_budget": 60}, "gives all requests one budget here: leave kv_budget out"),
        ("full", {"budget": None}, {"kv_budget": 60}, "gives all requests one budget here: leave kv_budget out"),
        ("snapkv", {}, {"kv_protect_prompt": 1}, "holds the prompt until its end anyway: leave kv_protect_prompt out"),
        ("h2o", {}, {"kv_policy": "tova"}, "unknown key 'kv_policy'"),
        ("h2o", {}, {"kvpop": [1, 2, 3, None]}, "the key 'kvpop' is reserved"),
    ],
)
def test_refusals_of_requests(policy, settings, asked, message):
    assert message in refusal(resolve, server(policy, **settings), asked, 40)


@pytest.mark.parametrize(
    "policy, settings, message",
    [
        ("h2o", {"max_budget": 63}, "--kv-max-budget 63 is below the server's own budget: raise it to at least 64"),
        ("h2o", {"allocator": "pyramid", "max_budget": 80}, "leave --kv-max-budget out"),
        ("adakv", {"max_budget": 80}, "leave --kv-max-budget out"),
        ("full", {"budget": None, "max_budget": 8192}, "gives all requests one budget here: leave --kv-max-budget out"),
        ("h2o", {"protect_prompt": True, "max_protect": 9}, "raise it to all"),
        ("h2o", {"protect_prompt": 10, "max_protect": 9}, "raise it to at least 10"),
        ("random", {"max_protect": 9}, "raise it to all"),
        ("snapkv", {"max_protect": True}, "leave --kv-max-protect out"),
        ("snapkv", {"protect_prompt": True}, "leave --kv-protect-prompt out"),
        ("snapkv", {"correction": "moment"}, "leave --kv-correction out"),
        ("snapkv", {"budget": 32}, "too small for 0 sinks + window 32 + 1: raise --kv-budget to at least 33"),
    ],
)
def test_refusals_of_servers(policy, settings, message):
    assert message in refusal(server, policy, **settings)
    assert message
