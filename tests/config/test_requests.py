"""Options of a request: the server's bounds and the resolved values, without an engine."""

from types import SimpleNamespace

import pytest

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.requests import RESOLVED, Placed, RequestSlots, UnknownCartridge, named, of_params, resolve

SHAPE = ModelShape("llama", 2, 2, 32, 4096, num_heads=4)


def server(policy="h2o", **settings):
    return policies.get(policy)(PolicySettings(policy, **{"budget": 64} | settings), SHAPE)


def test_nothing_asked_is_the_servers():
    roles = server(protect_prompt=8).retention
    for options in (None, {}, {"kv_transfer_params": {}}, {"other": 1}):
        assert resolve(server(protect_prompt=8), options, 10) == RequestSlots(8, 0, roles.budget, roles.window)
    assert of_params(None) is None and of_params(object()) is None


def test_slots_travel_with_the_sampling_parameters():
    """Slots are the same after another process has unpacked them, and are then unpacked once."""
    placed = (Placed("1", 64),)
    slots = resolve(server("random"), {"kv_cartridges": ["a"], "kv_seed": 5}, 50, placed)
    params = SimpleNamespace(extra_args={RESOLVED: [[*x] if isinstance(x, tuple) else x for x in slots]})
    params.extra_args[RESOLVED][-1] = [[*cartridge] for cartridge in placed]
    assert of_params(params) == slots and of_params(params) is of_params(params)
    assert of_params(params).cartridges[0].slots == 64


@pytest.mark.parametrize("budget", [16, 33, 64, 100])
@pytest.mark.parametrize("policy", ["h2o", "tova", "streaming-llm", "momentkv", "random"])
def test_a_budget_resolves_as_a_servers(policy, budget):
    retention = server(policy, budget=budget).retention
    slots = resolve(server(policy, max_budget=100), {"kv_budget": budget}, 10)
    assert (slots.budget, slots.window) == (retention.budget, retention.window)
    windowed = server(policy, max_budget=100, window=7)
    assert resolve(windowed, {"kv_budget": budget}, 10).window == 7


def test_protection():
    retention = server().retention
    assert resolve(server(max_protect=True), {"kv_protect_prompt": "all"}, 10) == RequestSlots(
        10, 0, 64, retention.window
    )
    assert resolve(server(max_protect=True), {"kv_protect_prompt": True}, 10).prefix == 10
    assert resolve(server(max_protect=20), {"kv_protect_prompt": "all"}, 20).prefix == 20
    assert resolve(server(max_protect=20), {"kv_protect_prompt": 20}, 5).prefix == 20
    assert resolve(server(protect_prompt=8), {"kv_protect_prompt": 0}, 50).prefix == 0
    assert resolve(server(protect_prompt=8), {"kv_budget": 64}, 50).prefix == 8
    assert resolve(server("random"), {"kv_seed": -3}, 50) == RequestSlots(
        50, 0, 64, server("random").retention.window, -3
    )


def test_cartridges_stand_before_the_protected_prompt():
    named_cartridges = {"a": Placed("1", 64), "b": Placed("2", 128), "again": Placed("1", 64)}
    options = {"kv_cartridges": ["b", "a"]}
    placed = named(options, named_cartridges)
    assert (
        placed == {"b": named_cartridges["b"], "a": named_cartridges["a"]}
        and list(placed) == ["b", "a"]
        and named({}, named_cartridges) == {}
    )
    slots = resolve(server("h2o"), options, 40, tuple(placed.values()))
    assert (slots.prefix, slots.made_slots, slots.cartridges) == (
        192,
        192,
        (named_cartridges["b"], named_cartridges["a"]),
    )
    with pytest.raises(ConfigError, match="twice, by two names of it"):
        named({"kv_cartridges": ["a", "again"]}, named_cartridges)
    with pytest.raises(UnknownCartridge, match="'c' does not exist: name one of a, b, again"):
        named({"kv_cartridges": ["c"]}, named_cartridges)
