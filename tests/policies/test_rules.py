"""The rule of some heads of a layer, as a tensor-parallel rank asks for it."""

from __future__ import annotations

import pytest
import torch
from policies.matrix import SMALL, made

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.policies.base import Order, Signal
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

HEADS = 4
KINDS = {
    "kvpop": ("kvpop", {"norm": True, "skip": True}),
    "kvpop-values-used-directly": ("kvpop", {"v_proj": False, "feature_map": "softmax", "delayed": False}),
    "kvpop-mlp": ("kvpop-mlp", {}),
    "kvpop-linear": ("kvpop-linear", {}),
    "streaming-llm": ("streaming-llm", None),
    "l2norm": ("l2norm", None),
    "tova": ("tova", None),
    "h2o": ("h2o", None),
    "momentkv": ("momentkv", None),
    "full": ("full", None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", q_heads=8, kv_heads=HEADS)


@pytest.fixture(params=KINDS)
def policy(request, model, tmp_path):
    name, options = KINDS[request.param]
    settings = {"scorer": None, "budget": None if name == "full" else 64}
    if options is not None:
        kind = policies.get(name).scorer_kind
        settings["scorer"] = str(write_random_scorer(tmp_path / "scorer", model, kind, decay_step=2, **options))
    return made(name, **settings)


def test_signals_of_a_gate_without_one_are_refused():
    declared = {"name": "declared", "signals": frozenset({Signal.KEY, Signal.HIDDEN})}
    cls = type("Declared", (policies.get("streaming-llm"),), declared)
    with pytest.raises(ConfigError, match="--kv-policy declared declares signals of a gate and has none"):
        cls(PolicySettings("declared", 64), SMALL)


def tensors(rule) -> dict[str, torch.Tensor]:
    found = {"log_gamma": rule.log_gamma, **(vars(rule.scorer) if rule.scorer else {})}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("parts", [[(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)]])
def test_ranks_together_have_every_head_once_and_in_order(policy, parts):
    whole = policy.rule(1, slice(0, HEADS))
    rules = [policy.rule(1, slice(*part)) for part in parts]
    assert {len(tensor) for tensor in tensors(whole).values()} == {HEADS}
    for name, tensor in tensors(whole).items():
        slices = [tensors(rule)[name] for rule in rules]
        assert [len(each) for each in slices] == [last - first for first, last in parts], name
        assert torch.equal(torch.cat(slices), tensor), name
        distinct = name != "log_gamma" or policy.scorer_kind is not None
        assert not distinct or not torch.equal(tensor[:1], tensor[1:2]), f"{name}: heads must differ to be told apart"
    for rule in rules:
        assert (rule.sinks, rule.window, rule.decay_step) == (whole.sinks, whole.window, whole.decay_step)
        assert type(rule.scorer) is type(whole.scorer)
        options = {k: v for k, v in vars(rule.scorer).items() if not isinstance(v, torch.Tensor)} if rule.scorer else {}
        assert all(getattr(whole.scorer, name) == value for name, value in options.items())


def test_layers_differ(policy):
    if policy.scorer_kind is not None:
        first, second = (tensors(policy.rule(layer, slice(0, HEADS))) for layer in (0, 1))
        assert not any(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "name, given, kept",
    [
        ("streaming-llm", {}, (4, 59)),
        ("l2norm", {}, (0, 1)),
        ("tova", {}, (0, 1)),
        ("h2o", {}, (0, 32)),
        ("h2o", {"sinks": 4}, (4, 30)),
        ("tova", {"sinks": 2, "window": 9}, (2, 9)),
        ("momentkv", {}, (1, 1)),
    ],
)
def test_default_sinks_and_windows(name, given, kept):
    policy = made(name, **given)
    assert (policy.retention.sinks, policy.retention.window) == kept
    rule = policy.rule(0, slice(1, 3))
    assert (rule.sinks, rule.window) == kept
    assert rule.coupled == (policy.order is Order.COUPLED) == (name in ("tova", "h2o", "momentkv"))


@pytest.mark.parametrize(
    "name, given, uses_moment_correction, floats",
    [
        ("streaming-llm", {}, False, 0),
        ("streaming-llm", {"correction": "moment"}, True, 32 * 34),
        ("h2o", {"correction": "moment"}, True, 32 * 34),
        ("momentkv", {}, True, 32 * 34),
        ("momentkv", {"correction": "moment"}, True, 32 * 34),
        ("momentkv", {"correction": "none"}, False, 32 * 34),
    ],
)
def test_corrections(name, given, uses_moment_correction, floats):
    policy = made(name, **given)
    rule = policy.layer_rule(0, slice(0, HEADS))
    assert rule.moment_correction == uses_moment_correction
    assert policy.state_floats == rule.state_floats(32) == floats


def test_correcting_a_learned_policy_adds_to_its_state(model, tmp_path):
    scorer = str(write_random_scorer(tmp_path / "scorer", model, "mlstm"))
    plain, corrected = (made("kvpop", None, scorer=scorer, correction=how) for how in ("none", "moment"))
    assert corrected.state_floats - plain.state_floats == 32 * 34
    assert plain.layer_rule(0, slice(0, 1)).state_floats(32) == plain.state_floats
    assert corrected.layer_rule(0, slice(0, 1)).state_floats(32) == corrected.state_floats


def test_nothing_to_correct_where_all_is_kept():
    with pytest.raises(ConfigError, match="--kv-policy full keeps every token: leave --kv-correction out"):
        made("full", None, correction="moment")
