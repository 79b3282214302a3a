"""Tests of policies from other packages."""

import sys

import pytest
from policies.matrix import made
from policies.outside import HOOKS, PROJECTION, importable, install

from kvpop_vllm import policies
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.roles import Retention


@pytest.fixture
def folder(tmp_path):
    with importable(tmp_path):
        yield tmp_path


def refusal(name):
    with pytest.raises(ConfigError) as caught:
        policies.get(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def named(output: str) -> list[str]:
    """Return the policies that `kvpop policies` lists."""
    return [line.split()[0] for line in output.splitlines() if not line.startswith(" ")]


def test_a_policy_from_outside(folder, capsys):
    assert "projection" not in policies.known() and "projection" not in refusal("nonsense")
    install(folder)
    assert policies.known()[-1] == "projection" and "full, projection" in refusal("nonsense")
    assert "outside_policies" not in sys.modules, "imported though nobody asked for it"
    policy = made("projection")
    assert policy.rule(1, slice(2, 4)).scorer.weight.shape == (2, 32) and policy.retention.window == 15
    assert main(["policies"]) in (0, None)
    assert named(capsys.readouterr().out) == [*policies.POLICIES, "projection"]


def test_a_package_that_overrides_hooks(folder):
    """The base class calls what a package overrides, which finds the base's own behaviour by ``super()``."""
    install(folder, "hooks = outside_hooks:Hooks", "outside-hooks", HOOKS)
    shape = ModelShape("llama", 4, 4, 32, 1024, num_heads=8)
    policy = policies.get("hooks")(PolicySettings("hooks", 128), shape)
    calls = sys.modules["outside_hooks"].CALLS
    assert calls == ["prepare", "check_realised", "scorer_shape", "check_retention", "shares"]
    assert policy.notes == ["made"] and policy.retention == Retention(128, 2, 8)
    assert policy.protect is True and policy.max_protect is True and policy.graph == "hooks" and not policy.shifted
    uniform = policies.get("hooks")(PolicySettings("hooks", 128, allocator="uniform"), shape)
    assert uniform.shares().tolist() == [[127, 128, 128, 128]] * 4 and uniform.one_budget
    assert policy.shares()[0, 1] > 128 > policy.shares()[-1, 1]
    rule = policy.layer_rule(0, slice(1, 3))
    assert rule.log_gamma.tolist() == [-0.5, -0.5] and rule.compresses and not rule.moment_correction
    assert policy.state_floats == rule.state_floats(32)
    calls.clear()
    policy.check_ranks(1)
    assert calls == ["check_ranks"]
    with pytest.raises(ConfigError, match="at most two ranks"):
        uniform.check_ranks(4)
    with pytest.raises(ConfigError, match="window of at most 100"):
        policies.get("hooks")(PolicySettings("hooks", 128, window=101), shape)
    with pytest.raises(ConfigError, match="gives all requests one budget"):
        policy.retention_of(64)


def test_what_is_wrong_with_it(folder):
    install(folder, "tova = outside_policies:Projection")
    assert "policy 'tova' is brought by outside-policies and kvpop_vllm: uninstall" in refusal("tova")
    install(folder, "other = outside_policies:Projection", "outside-other")
    assert (
        "entry point 'other' of outside-other must be a kvpop_vllm.policies.base.Policy with name = 'other'"
        in refusal("other")
    )
    install(folder, "plain = outside_plain:value", "outside-plain", "value = 3\n")
    assert "entry point 'plain' of outside-plain must be" in refusal("plain")
    install(folder, "broken = outside_broken:Projection", "outside-broken", "import nothing_of_this_name\n")
    assert "policy 'broken' of outside-broken cannot be imported" in refusal("broken")
    install(folder, "absent = outside_policies:Absent", "outside-absent")
    assert "policy 'absent' of outside-absent cannot be imported" in refusal("absent")
    install(folder, "other = outside_more:Projection", "outside-more", PROJECTION)
    assert "policy 'other' is brought by outside-more, outside-other: uninstall all but one" in refusal("other")


def test_a_class_that_says_too_little(folder, capsys):
    """A policy class that lacks declarations is refused by name, and the other policies are still listed."""
    little = PROJECTION.replace('paper = "-"', "").replace("def rule", "def role")
    install(folder, "projection = outside_little:Projection", "outside-little", little)
    assert "policy 'projection' of outside-little does not say paper, rule: mend that package" in refusal("projection")
    assert main(["policies"]) in (0, None)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == refusal("projection") and named("\n".join(lines)) == list(policies.POLICIES)


@pytest.mark.parametrize(
    "change, message",
    [
        (("signals =", 'default_correction = "momentum"\n    signals ='), "declares the correction 'momentum'"),
        (("signals =", "order = Order.COUPLED\n    signals ="), "declares the order 'attention-coupled', but its rule scores by DotProduct"),
    ],
)  # fmt: skip
def test_declarations_that_do_not_hold(folder, change, message):
    code = PROJECTION.replace("import Policy, Signal", "import Order, Policy, Signal").replace(*change)
    install(folder, "projection = outside_other:Projection", "outside-other", code)
    with pytest.raises(ConfigError, match=message):
        made("projection").layer_rule(0, slice(0, 4))
