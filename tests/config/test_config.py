"""Settings and retention: every rule is checked, and each message is one line that names the remedy."""

import dataclasses
import itertools

import pytest

from kvpop_vllm.config import (
    FLAGS,
    ConfigError,
    PolicySettings,
    Retention,
    ScorerShape,
    TrainedBudget,
    check_spelling,
    protected_tokens,
    resolve_retention,
)

DELAYED = ScorerShape(sinks=4, window=16, topk=44, delayed=True)
STATELESS = ScorerShape(sinks=4, window=16, topk=44, delayed=False)


def refusal(call, *args, **options):
    """Return the message of the ConfigError that the call raises, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def settings(**given):
    return PolicySettings.parse({"policy": "p", **given})


def test_all_keys_are_taken():
    given = {"policy": "kvpop", "budget": 64, "sinks": 0, "window": 1, "scorer": "folder"}
    assert PolicySettings.parse(given) == PolicySettings("kvpop", 64, None, 0, 1, "folder")
    assert settings(correction="moment").correction == "moment"
    assert "--kv-correction must be one of none, moment, got 'momentum'" in refusal(settings, correction="momentum")
    assert settings(compression=1.5).compression == 1.5
    assert settings(budget=None, sinks=None) == PolicySettings("p")


def test_every_setting_has_a_flag():
    assert list(FLAGS) == list(PolicySettings.__dataclass_fields__)
    assert FLAGS["policy"] == "--kv-policy" and all(f == f"--kv-{name.replace('_', '-')}" for name, f in FLAGS.items())


@pytest.mark.parametrize("given", ["kvpop", ["policy"], 3, None])
def test_not_a_mapping(given):
    message = refusal(PolicySettings.parse, given)
    assert "additional_config['kv_policy']" in message and repr(given) in message


@pytest.mark.parametrize("key", ["bugdet", "decide_every"])
def test_unknown_key_lists_the_known_ones(key):
    message = refusal(settings, **{key: 1})
    assert message.startswith(f"unknown key {key!r} ") and "budget" in message.split("use ")[1]


def test_unknown_allocator_lists_the_known_ones():
    assert refusal(settings, allocator="cone") == "--kv-allocator must be one of uniform, pyramid, ada, got 'cone'"


@pytest.mark.parametrize(
    "key",
    [
        "kv_polcy",
        "kvpolicy",
        "kv-policy",
        "KV_policy",
        "kv_policy ",
        "kv-policies",
        "kv_budget",
        "kv_scorer",
        "kv_sink",
        "kvpop",
    ],
)
def test_a_key_beside_ours_that_is_nearly_ours(key):
    assert "did you mean 'kv_policy'?" in refusal(check_spelling, {"kv_policy": {}, key: {}})


@pytest.mark.parametrize("other", [{}, {"kv_policy": {}}])
def test_settings_outside_their_key(other):
    assert "'kv_policy'" in refusal(check_spelling, {"policy": "streaming-llm", "budget": 64} | other)


@pytest.mark.parametrize(
    "other",
    [
        {"kv_policy": 3, "policy": 1, "kv_cache": 2, "kv_policy_log_folder": 3, 4: 5},
        {"compression": 2, "budget": 3, "kv_store": 4},
        None,
        "x",
    ],
)
def test_other_keys_are_other_peoples(other):
    check_spelling(other)


@pytest.mark.parametrize("given", [{}, {"budget": 64}, {"policy": None}, {"policy": 7}])
def test_a_policy_is_needed(given):
    assert "--kv-policy" in refusal(PolicySettings.parse, given)


@pytest.mark.parametrize(
    "name, value",
    [
        ("budget", 0),
        ("budget", -1),
        ("budget", 64.0),
        ("budget", "64"),
        ("budget", True),
        ("sinks", -1),
        ("sinks", 1.5),
        ("window", 0),
        ("window", False),
        ("compression", 0.99),
        ("compression", -2),
        ("compression", float("nan")),
        ("compression", float("inf")),
        ("compression", "4"),
        ("compression", True),
        ("scorer", 1),
        ("scorer", ["a"]),
    ],
)
def test_types_and_ranges(name, value):
    message = refusal(settings, **{name: value})
    assert message.startswith(f"{FLAGS[name]} ") and repr(value) in message


@pytest.mark.parametrize("name", ["budget", "sinks", "window"])
def test_more_tokens_than_positions_can_count(name):
    assert settings(**{name: 2**24}) is not None
    message = refusal(settings, **{name: 2**40})
    assert message.startswith(f"{FLAGS[name]} ") and "lower it" in message


@pytest.mark.parametrize(
    "given, kept",
    [
        (None, None),
        ("all", True),
        (True, True),
        (False, False),
        (0, 0),
        ("0", 0),
        (1, 1),
        ("17", 17),
        (2**24, 2**24),
    ],
)
def test_what_may_be_protected(given, kept):
    found = settings(protect_prompt=given).protect_prompt
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize("given", ["some", "ALL", "", " 1", "-1", -1, 1.0, "1.5", float("nan"), [1], {}, 2**24 + 1])
def test_what_may_not_be_protected(given):
    message = refusal(settings, protect_prompt=given)
    assert message == f"--kv-protect-prompt must be all or a number of tokens up to {2**24}, got {given!r}"


def test_too_many_tokens_to_protect_as_a_flag_says_it():
    assert refusal(settings, protect_prompt="1" * 30).endswith(f"up to {2**24}, got {'1' * 30}")


def test_how_much_of_a_prompt_is_protected():
    for protect, kept in ((True, (1, 5, 900)), (False, (0, 0, 0)), (0, (0, 0, 0)), (5, (1, 5, 5)), (1, (1, 1, 1))):
        assert tuple(protected_tokens(protect, prompt) for prompt in (1, 5, 900)) == kept


def test_budget_and_compression_exclude_each_other():
    message = refusal(settings, budget=64, compression=4)
    assert "--kv-budget" in message and "--kv-compression" in message


def test_budget_without_a_scorer():
    assert resolve_retention(settings(budget=64), 1000, None) == Retention(64, 4, 59)
    assert resolve_retention(settings(budget=64), 1000, None).topk == 1
    assert resolve_retention(settings(budget=64, sinks=0, window=16), 1000, None) == Retention(64, 0, 16)
    assert resolve_retention(settings(compression=3), 1000, None).budget == 333
    assert resolve_retention(settings(compression=2.5), 1000, None).budget == 400


def test_what_the_scorer_says_is_the_default():
    assert resolve_retention(settings(), 1000, DELAYED) == Retention(64, 4, 16)
    assert resolve_retention(settings(), 1000, DELAYED).topk == 44


def test_flags_override_a_scorers_budget_and_sinks():
    assert resolve_retention(settings(budget=128), 1000, DELAYED) == Retention(128, 4, 16)
    assert resolve_retention(settings(compression=10), 1000, DELAYED) == Retention(100, 4, 16)
    assert resolve_retention(settings(sinks=8), 1000, DELAYED) == Retention(68, 8, 16)
    assert resolve_retention(settings(window=32, budget=64), 1000, STATELESS) == Retention(64, 4, 32)


def test_a_delayed_scorers_window_is_fixed():
    assert resolve_retention(settings(window=16), 1000, DELAYED).window == 16
    message = refusal(resolve_retention, settings(window=32), 1000, DELAYED)
    assert "--kv-window 32" in message and "window 16" in message


def test_a_scorer_trained_with_several_windows():
    """A budget takes the window of the largest trained budget that it holds.

    Of equal trained budgets the first one counts.
    """
    budgets = [TrainedBudget(*t) for t in ((16, 44), (8, 12), (32, 92), (24, 36))]
    several = ScorerShape(4, 16, 44, True, tuple(budgets))
    assert resolve_retention(settings(), 1000, several) == Retention(64, 4, 16)
    for budget, window in ((14, 8), (24, 8), (63, 8), (64, 16), (127, 16), (128, 32), (999, 32)):
        assert resolve_retention(settings(budget=budget), 1000, several) == Retention(budget, 4, window)
    assert resolve_retention(settings(compression=5), 1000, several).window == 32
    assert resolve_retention(settings(budget=128, window=8), 1000, several).window == 8
    assert resolve_retention(settings(budget=128, window=11), 1000, several).window == 11
    for window in (7, 33):
        message = refusal(resolve_retention, settings(budget=128, window=window), 1000, several)
        assert f"--kv-window {window}" in message and "windows from 8 to 32" in message
    assert "--kv-budget to at least 13" in refusal(resolve_retention, settings(budget=12), 1000, several)
    assert resolve_retention(settings(sinks=0), 1000, several) == Retention(60, 0, 16)
    assert resolve_retention(settings(sinks=20), 1000, several) == Retention(80, 20, 16)
    immediate = dataclasses.replace(several, delayed=False)
    assert resolve_retention(settings(budget=128, window=90), 1000, immediate).window == 90
    assert resolve_retention(settings(budget=128), 1000, immediate).window == 32


def test_no_budget_to_be_had():
    message = refusal(resolve_retention, settings(), 1000, None)
    assert "--kv-policy p" in message and "--kv-budget" in message and "--kv-compression" in message


@pytest.mark.parametrize(
    "given, scorer, least",
    [
        ({"budget": 20}, DELAYED, 21),
        ({"budget": 20, "window": 16}, None, 21),
        ({"budget": 5}, None, 6),
        ({"budget": 1, "sinks": 0}, None, 2),
        ({"budget": 64, "sinks": 60}, DELAYED, 77),
    ],
)
def test_budget_too_small(given, scorer, least):
    message = refusal(resolve_retention, settings(**given), 1000, scorer)
    assert f"--kv-budget to at least {least}" in message


def test_the_remedy_is_the_option_that_set_the_budget():
    message = refusal(resolve_retention, settings(compression=100), 1000, DELAYED)
    assert "lower --kv-compression to at most 47.619" in message and "--kv-budget" not in message
    assert resolve_retention(settings(compression=47.619), 1000, DELAYED).topk == 1
    none = ScorerShape(sinks=4, window=16, topk=0, delayed=True)
    assert "set --kv-budget to at least 21" in refusal(resolve_retention, settings(), 1000, none)
    message = refusal(resolve_retention, settings(compression=1), 16, DELAYED)
    assert message.endswith("raise --max-model-len to at least 21")
    message = refusal(resolve_retention, settings(sinks=99), 64, None, keeps_all=True)
    assert message.endswith("raise --max-model-len to at least 101 or lower --kv-sinks")
    assert refusal(resolve_retention, settings(), 1, None, keeps_all=True).endswith("--max-model-len to at least 2")


def test_the_compression_named_does():
    """The compression that the message names is rounded and still small enough."""
    for length, window in itertools.product(range(30, 300, 7), range(1, 24)):
        message = refusal(resolve_retention, settings(compression=1000, window=window), length, None)
        named = float(message.rsplit(" ", 1)[1])
        assert resolve_retention(settings(compression=named, window=window), length, None).topk >= 1


def test_more_than_positions_can_count():
    huge = ScorerShape(sinks=4, window=16, topk=2**24, delayed=True)
    assert "--kv-budget" in refusal(resolve_retention, settings(), 1000, huge)
    assert "--max-model-len" in refusal(resolve_retention, settings(), 2**24 + 1, None, keeps_all=True)


def test_the_smallest_budgets_that_do():
    assert resolve_retention(settings(budget=21), 1000, DELAYED).topk == 1
    assert resolve_retention(settings(budget=6), 1000, None) == Retention(6, 4, 1)


def test_a_policy_that_keeps_everything():
    assert resolve_retention(settings(), 1000, None, keeps_all=True).budget == 1000
    assert resolve_retention(settings(budget=2000), 1000, None, keeps_all=True).budget == 2000
    assert resolve_retention(settings(), 3, None, keeps_all=True) == Retention(3, 1, 1)
    for given in ({"budget": 999}, {"compression": 2}):
        message = refusal(resolve_retention, settings(**given), 1000, None, keeps_all=True)
        assert "--kv-budget" in message and "--kv-compression" in message
