"""Validation of the settings from the command line, ``additional_config`` and a scorer's config.

This module imports neither vLLM nor torch. The glue passes plain values.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from kvpop_vllm.flags import ENGINE, FLAGS, Setting, settings_of
from kvpop_vllm.roles import Retention

AUTO = "auto"
"""Value of ``--kv-policy`` that serves the recommendation of a calibration, or without one a policy that needs none."""
ADDITIONAL_CONFIG_KEY = "kv_policy"
DEFAULT_SINKS = 4
MAX_BUDGET = 2**24
"""Largest B in tokens, because positions and slots are int32 in the pages."""
RAISE_LENGTH = "raise --max-model-len above the window of {} tokens, up to which windows count as full attention"
"""Advice for texts that are so short that layers with windows count as layers with full attention."""

CORRECTIONS, ALLOCATORS = (settings_of(ENGINE)[name].choices for name in ("correction", "allocator"))


class ConfigError(ValueError):
    """Error for a configuration that cannot work. The message is one line that names what to change."""


def check_version(name: str, version: str, supported: str) -> None:
    """Check that a version of a package is supported.

    Args:
        name: the package, as errors call it. Pip knows it in lower case.
        version: its version.
        supported: the supported versions, as pip writes them.
    """
    try:
        fits = SpecifierSet(supported).contains(version, prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        raise ConfigError(f"{name} {version} is not supported: install {name.lower()}{supported}")


def check_spelling(additional_config: object) -> None:
    """Check that no key of ``additional_config`` is a misspelt or misplaced setting of this package.

    vLLM would ignore such a key, and serve densely or with other settings.
    """
    keys = [str(key) for key in additional_config] if isinstance(additional_config, Mapping) else []
    ours = [f"kv_{name}" for name in FLAGS] + ["kv_policies", "kvpop"]
    for key in keys:
        spelt = key.lower().replace("-", "_")
        # with our first letter only, because other plugins have keys too
        nearly = spelt.startswith("k") and difflib.get_close_matches(spelt, ours, cutoff=0.85)
        if key != ADDITIONAL_CONFIG_KEY and nearly:
            raise ConfigError(
                f"unknown key {key!r} in --additional-config: did you mean {ADDITIONAL_CONFIG_KEY!r}? All settings go into it"
            )
    if "policy" in keys and set(keys) & set(FLAGS) - {"policy"}:
        raise ConfigError(
            f"--additional-config has a policy's settings outside {ADDITIONAL_CONFIG_KEY!r}: put them into it"
        )


@dataclass(frozen=True)
class PolicySettings:
    """Settings as given by the user, before the model and the scorer are read.

    Attributes:
        policy: registered name.
        budget: B, tokens per KV head.
        compression: c with ``B = max-model-len / c``.
        sinks: s.
        window: w.
        threshold: gate score below which a token is evicted when it leaves the window, even if slots are free.
        scorer: folder with ``kvpop_config.json`` and ``kvpop_scorer.safetensors``.
        map: file of ``kvpop inspect-checkpoint`` that says how to read a full checkpoint of other authors.
        calibration: folder of ``kvpop calibrate``, or a JSON file with the shares of all heads.
        correction: correction of the outputs for evicted tokens, one of CORRECTIONS.
        allocator: distribution of the budget over layers and heads, one of ALLOCATORS.
        protect_prompt: tokens that are never evicted: True for each prompt, N for the first N tokens of a conversation,
            answers included, 0 or False for none.
        max_budget: largest budget that a request may ask for, by default the server's own.
        max_protect: most tokens that a request may protect, by default the server's own.
        reserve: True to begin a request only when all blocks that it will ever hold are free.
        inspect: True to serve the inspect page.
        cartridge: folder of each cartridge, by name.
    """

    policy: str
    budget: int | None = None
    compression: float | None = None
    sinks: int | None = None
    window: int | None = None
    threshold: float | None = None
    scorer: str | None = None
    map: str | None = None
    calibration: str | None = None
    correction: str | None = None
    allocator: str | None = None
    protect_prompt: bool | int | None = None
    max_budget: int | None = None
    max_protect: bool | int | None = None
    reserve: bool | None = None
    inspect: bool | None = None
    cartridge: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, mapping: Mapping) -> PolicySettings:
        """Return the settings in ``mapping``, after a check of names, types and ranges."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] must be a mapping such as {{'policy': 'streaming-llm', 'budget': 1024}}, got {mapping!r}"
            )
        engine_settings = settings_of(ENGINE)
        if unknown := sorted(set(mapping) - set(engine_settings), key=str):
            raise ConfigError(
                f"unknown key {unknown[0]!r} in {ADDITIONAL_CONFIG_KEY}: use {', '.join(engine_settings)}"
            )
        if mapping.get("cartridge") and "policy" not in mapping:
            # cartridges alone are served with everything else kept
            mapping = {**mapping, "policy": "full"}
        if not isinstance(mapping.get("policy"), str):
            raise ConfigError(f"{ADDITIONAL_CONFIG_KEY} needs a policy: give --kv-policy NAME or a 'policy' key")
        values = {name: _checked(setting, mapping.get(name)) for name, setting in engine_settings.items()}
        if values["budget"] is not None and values["compression"] is not None:
            raise ConfigError("--kv-budget and --kv-compression both set the budget: give only one of them")
        return cls(**values)


def _checked(setting: Setting, value: object) -> object:
    """Return the value of a setting, parsed where it may be text."""
    # protect_prompt is a number, a truth value or a text
    if value is None or setting.protects:
        return protection(value, setting.flag)
    if setting.kind is dict:
        return _named(setting.flag, value)
    # True is an int in Python, but not a number of tokens
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if refusal := setting.refusal(value):
        raise ConfigError(f"{setting.flag} {refusal}")
    if setting.kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{setting.flag} must be true or false, got {value!r}")
    if setting.kind is str and not isinstance(value, str):
        raise ConfigError(f"{setting.flag} must be a folder name, got {value!r}")
    bounded = setting.minimum is not None
    # NaN and infinity are floats too, and are refused
    if setting.kind is float and not (
        number and abs(value) <= sys.float_info.max and (not bounded or value >= setting.minimum)
    ):
        bound = f" of at least {setting.minimum}" if bounded else ""
        raise ConfigError(f"{setting.flag} must be a number{bound}, got {value!r}")
    if setting.kind is int and not (number and isinstance(value, int) and value >= setting.minimum):
        raise ConfigError(f"{setting.flag} must be an integer of at least {setting.minimum}, got {value!r}")
    if setting.kind is int and value > MAX_BUDGET:
        raise ConfigError(f"{setting.flag} {value} is more than {MAX_BUDGET} tokens: lower it")
    return value


def _named(flag: str, value: object) -> dict[str, str]:
    """Return values by name, from a mapping or from texts NAME=VALUE."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, Sequence) and not isinstance(pairs, str) and not isinstance(value, Mapping):
        # the first "=" ends the name, since a folder may have more
        pairs = [tuple(str(entry).partition("=")[::2]) for entry in pairs]
    if not isinstance(pairs, list) or not all(isinstance(n, str) and isinstance(v, str) and n and v for n, v in pairs):
        raise ConfigError(f"{flag} takes one or more NAME=DIR, got {value!r}")
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{flag} names {twice[0]!r} twice: give each cartridge a name of its own")
    return dict(pairs)


def check_head_shares(shares: object, layers: int, heads: int, source: str) -> None:
    """Check that ``shares`` are parts of the long-range slots for all heads.

    Args:
        shares: ``[layers][H]``, numbers of at least 0 with a sum above 0. Only their ratios matter.
        layers: layers of the model.
        heads: H, KV heads of a layer.
        source: name of the file in errors.
    """
    rows = shares if isinstance(shares, Sequence) and not isinstance(shares, str) else ()
    fits = len(rows) == layers and all(isinstance(row, Sequence) and len(row) == heads for row in rows)
    flat = [share for row in rows for share in row] if fits else []
    numbers = all(isinstance(s, int | float) and not isinstance(s, bool) and 0 <= s < math.inf for s in flat)
    if not (fits and numbers and 0 < sum(flat) < MAX_BUDGET):
        raise ConfigError(
            f"{source}: shares must be {layers} lists of {heads} numbers of at least 0, one list for each layer of the model, with a sum above 0 and below {MAX_BUDGET}"
        )


def protection(value: object, asked_by: str = FLAGS["protect_prompt"]) -> bool | int | None:
    """Return the parsed number of protected tokens, True for the whole prompt, None if not given.

    Args:
        value: bool, number of tokens, "all", a decimal string, or None.
        asked_by: option that error messages name.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and (value == "all" or value.isdecimal()):
        value = True if value == "all" else int(value)
    if not isinstance(value, int) or not 0 <= value <= MAX_BUDGET:
        raise ConfigError(f"{asked_by} must be all or a number of tokens up to {MAX_BUDGET}, got {value!r}")
    return value


def protected_tokens(protect: bool | int, prompt: int) -> int:
    """Return p of a request. ``protect`` is True for the ``prompt`` tokens of its prompt, or a number of first tokens.

    A number does not depend on the prompt, so that all turns of a conversation have the same p.
    """
    return prompt if protect is True else int(protect)


@dataclass(frozen=True)
class TrainedBudget:
    """Window w and number of long-range slots k that a scorer was trained with."""

    window: int
    topk: int

    @property
    def slots(self) -> int:
        """Number of slots without sinks, ``B - s``."""
        return self.window + self.topk


@dataclass(frozen=True)
class ScorerShape:
    """Retention settings of a scorer's config.

    Attributes:
        sinks: s.
        window: w.
        topk: k, long-range slots.
        delayed: True if a token is scored when it leaves the window.
        trained: all budgets that the scorer was trained with, if there were several.
    """

    sinks: int
    window: int
    topk: int
    delayed: bool
    trained: tuple[TrainedBudget, ...] = ()

    def window_for(self, slots: int) -> int:
        """Return the window of the largest trained budget that fits into ``slots``.

        If none fits, the window of the smallest one is returned. ``slots`` is ``B - s``.
        """
        budgets = self.trained or (TrainedBudget(self.window, self.topk),)
        fitting = [trained for trained in budgets if trained.slots <= slots] or [
            min(budgets, key=lambda trained: trained.slots)
        ]
        return max(fitting, key=lambda trained: trained.slots).window

    def check_window(self, window: int, flag: str) -> None:
        """Check that a delayed scorer was trained with the given window.

        A delayed scorer reads out a token when it leaves the window, and was trained at certain distances
        only.
        """
        windows = [trained.window for trained in self.trained] or [self.window]
        if self.delayed and not min(windows) <= window <= max(windows):
            trained_windows = (
                f"windows from {min(windows)} to {max(windows)}"
                if min(windows) < max(windows)
                else f"window {windows[0]}"
            )
            raise ConfigError(
                f"{flag} {window} is not what the delayed scorer was trained with, {trained_windows}: leave {flag} out"
            )


def resolve_retention(
    settings: PolicySettings,
    max_model_len: int,
    scorer: ScorerShape | None,
    *,
    keeps_all: bool = False,
    sinks: int = DEFAULT_SINKS,
    window_share: float = 1.0,
    window: int | None = None,
) -> Retention:
    """Return budget, sinks and window. Flags override the scorer's config.

    Args:
        settings: the user's settings.
        max_model_len: longest sequence, in tokens.
        scorer: retention settings of the scorer's config, if there is one.
        keeps_all: True if the policy never evicts, so that B is max_model_len.
        sinks: default s without a scorer.
        window_share: without a scorer, the fraction of ``B - s`` that is the default w.
        window: default w without a scorer, if it does not depend on the budget.
    """
    if settings.sinks is not None:
        sinks = settings.sinks
    elif scorer:
        sinks = scorer.sinks
    elif keeps_all:  # a prompt shorter than the sinks would leave too few slots
        sinks = 0
    budget = _budget(settings, max_model_len, scorer, sinks, keeps_all)
    if scorer and settings.window is not None:
        scorer.check_window(settings.window, "--kv-window")
    if scorer:
        window = scorer.window_for(budget - sinks)
    elif window is None:  # one long-range slot at least
        window = max(1, min(int(window_share * (budget - sinks)), budget - sinks - 1))
    window = settings.window if settings.window is not None else window
    smallest = sinks + window + 1
    if budget < smallest:
        # a larger budget may get a larger trained window, which needs an even larger budget
        while scorer and settings.window is None and smallest < sinks + scorer.window_for(smallest - sinks) + 1:
            smallest = sinks + scorer.window_for(smallest - sinks) + 1
        remedy = _remedy(settings, max_model_len, smallest, keeps_all)
        raise ConfigError(f"a budget of {budget} is too small for {sinks} sinks + window {window} + 1: {remedy}")
    if budget > MAX_BUDGET:
        lower = "lower --max-model-len" if keeps_all else "set a lower --kv-budget"
        raise ConfigError(f"a budget of {budget} is more than {MAX_BUDGET} tokens: {lower}")
    return Retention(budget, sinks, window)


def _remedy(settings: PolicySettings, max_model_len: int, smallest: int, keeps_all: bool) -> str:
    """Return the advice for a budget below ``smallest``, in terms of the option that set it."""
    if keeps_all or (settings.compression is not None and max_model_len < smallest):
        lower = [f"lower {FLAGS[name]}" for name in ("sinks", "window") if getattr(settings, name)]
        return " or ".join([f"raise --max-model-len to at least {smallest}", *lower])
    if settings.compression is not None:
        # rounded down, so that the advice is enough
        return f"lower --kv-compression to at most {1000 * max_model_len // smallest / 1000}"
    return f"{'raise' if settings.budget else 'set'} --kv-budget to at least {smallest}"


def _budget(
    settings: PolicySettings, max_model_len: int, scorer: ScorerShape | None, sinks: int, keeps_all: bool
) -> int:
    if keeps_all:
        if settings.compression not in (None, 1) or (settings.budget or max_model_len) < max_model_len:
            raise ConfigError(
                f"--kv-policy {settings.policy} keeps every token: leave --kv-budget and --kv-compression out"
            )
        return max(settings.budget or 0, max_model_len)
    if settings.budget is not None:
        return settings.budget
    if settings.compression is not None:
        return int(max_model_len / Fraction(str(settings.compression)))  # 28 / 1.12 is 25, not 24.999...
    if scorer is not None:
        return sinks + scorer.window + scorer.topk
    raise ConfigError(f"--kv-policy {settings.policy} needs a budget: give --kv-budget or --kv-compression")
