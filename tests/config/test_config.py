"""Settings and the retention that follows from them. What is refused is in tests/test_refusals.py."""

import dataclasses

from kvpop_vllm.config import (
    FLAGS,
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


def settings(**options):
    return PolicySettings.parse({"policy": "p", **options})


def test_every_setting_has_a_flag():
    assert list(FLAGS) == list(PolicySettings.__dataclass_fields__)
    assert FLAGS["policy"] == "--kv-policy" and all(f == f"--kv-{name.replace('_', '-')}" for name, f in FLAGS.items())


def test_other_keys_are_other_peoples():
    check_spelling({"kv_policy": 3, "policy": 1, "kv_cache": 2, "kv_policy_log_folder": 3, 4: 5})
    for wrong_settings in ({"compression": 2, "budget": 3, "kv_store": 4}, None, "x"):
        check_spelling(wrong_settings)


def test_what_may_be_protected():
    same = [(parsed, parsed) for parsed in (None, True, False, 0, 1, 2**24)]
    for value, parsed in (*same, ("all", True), ("0", 0), ("17", 17)):
        protect = settings(protect_prompt=value).protect_prompt
        assert protect == parsed and type(protect) is type(parsed)


def test_how_much_of_a_prompt_is_protected():
    for protect, expected in ((True, (1, 5, 900)), (False, (0, 0, 0)), (0, (0, 0, 0)), (5, (5, 5, 5)), (1, (1, 1, 1))):
        assert tuple(protected_tokens(protect, prompt) for prompt in (1, 5, 900)) == expected


def test_budget_without_a_scorer():
    assert resolve_retention(settings(budget=64), 1000, None) == Retention(64, 4, 59)
    assert resolve_retention(settings(budget=64), 1000, None).topk == 1
    assert resolve_retention(settings(budget=64, sinks=0, window=16), 1000, None) == Retention(64, 0, 16)
    assert resolve_retention(settings(compression=3), 1000, None).budget == 333
    assert resolve_retention(settings(compression=2.5), 1000, None).budget == 400


def test_what_the_scorer_says_is_the_default():
    assert resolve_retention(settings(), 1000, DELAYED) == Retention(64, 4, 16)
    assert resolve_retention(settings(), 1000, DELAYED).topk == 44
    assert resolve_retention(settings(window=16), 1000, DELAYED).window == 16


def test_flags_override_a_scorers_budget_and_sinks():
    assert resolve_retention(settings(budget=128), 1000, DELAYED) == Retention(128, 4, 16)
    assert resolve_retention(settings(compression=10), 1000, DELAYED) == Retention(100, 4, 16)
    assert resolve_retention(settings(sinks=8), 1000, DELAYED) == Retention(68, 8, 16)
    assert resolve_retention(settings(window=32, budget=64), 1000, STATELESS) == Retention(64, 4, 32)


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
    assert resolve_retention(settings(sinks=0), 1000, several) == Retention(60, 0, 16)
    assert resolve_retention(settings(sinks=20), 1000, several) == Retention(80, 20, 16)
    immediate = dataclasses.replace(several, delayed=False)
    assert resolve_retention(settings(budget=128, window=90), 1000, immediate).window == 90
    assert resolve_retention(settings(budget=128), 1000, immediate).window == 32


def test_the_smallest_budgets_that_do():
    assert resolve_retention(settings(budget=21), 1000, DELAYED).topk == 1
    assert resolve_retention(settings(budget=6), 1000, None) == Retention(6, 4, 1)


def test_a_policy_that_keeps_everything():
    assert resolve_retention(settings(), 1000, None, keeps_all=True).budget == 1000
    assert resolve_retention(settings(budget=2000), 1000, None, keeps_all=True).budget == 2000
    assert resolve_retention(settings(), 3, None, keeps_all=True) == Retention(3, 0, 2)
