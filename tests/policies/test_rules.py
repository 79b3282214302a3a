"""The rule of some heads of a layer, as a tensor-parallel rank asks for it."""

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
    values = {"log_gamma": rule.log_gamma, **(vars(rule.scorer) if rule.scorer else {})}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("ranks", [[(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)]])
def test_ranks_together_have_every_head_once_and_in_order(policy, ranks):
    unsharded = policy.rule(1, slice(0, HEADS))
    rules = [policy.rule(1, slice(*part)) for part in ranks]
    assert {len(tensor) for tensor in tensors(unsharded).values()} == {HEADS}
    for name, tensor in tensors(unsharded).items():
        slices = [tensors(rule)[name] for rule in rules]
        assert [len(tensor_slice) for tensor_slice in slices] == [last - first for first, last in ranks], name
        assert torch.equal(torch.cat(slices), tensor), name
        distinct = name != "log_gamma" or policy.scorer_kind is not None
        assert not distinct or not torch.equal(tensor[:1], tensor[1:2]), f"{name}: heads must differ to be told apart"
    for rule in rules:
        assert (rule.sinks, rule.window, rule.decay_step) == (unsharded.sinks, unsharded.window, unsharded.decay_step)
        assert type(rule.scorer) is type(unsharded.scorer)
        options = {k: v for k, v in vars(rule.scorer).items() if not isinstance(v, torch.Tensor)} if rule.scorer else {}
        assert all(getattr(unsharded.scorer, name) == value for name, value in options.items())


@pytest.mark.parametrize("name", ["streaming-llm", "h2o", "momentkv", "kvpop"])
def test_corrections_add_moments_to_the_state(name, model, tmp_path):
    scorer = str(write_random_scorer(tmp_path / "scorer", model, "mlstm")) if name == "kvpop" else None
    plain, corrected = (made(name, None if scorer else 64, scorer=scorer, correction=how) for how in ("none", "moment"))
    for policy, uses_moments in ((plain, False), (corrected, True)):
        rule = policy.layer_rule(0, slice(0, HEADS))
        assert rule.moment_correction == uses_moments and policy.state_floats == rule.state_floats(32)
        assert rule.coupled == (policy.order is Order.COUPLED) == (name in ("h2o", "momentkv"))
    moments = 0 if name == "momentkv" else 32 * 34  # it ranks by them anyway
    assert corrected.state_floats == plain.state_floats + moments
