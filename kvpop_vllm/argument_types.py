"""Types of command-line arguments, and options that take the values of a setting, for argparse."""

import argparse
import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction

from kvpop_vllm.config import ConfigError, protection
from kvpop_vllm.flags import SETTINGS, Setting

UNITS = {
    "": 1,
    **{u: 1000 ** (i + 1) for i, u in enumerate("KMG")},
    **{f"{u}i": 1024 ** (i + 1) for i, u in enumerate("KMG")},
}
"""Bytes of each unit prefix: powers of 1000, and of 1024 for Ki, Mi, Gi."""


def non_negative(text: str) -> int:
    """Return an integer of at least 0. Raises as :func:`_number`."""
    return _number(text, int, lambda value: value >= 0, "at least 0")


def positive(text: str) -> int:
    """Return an integer of at least 1. Raises as :func:`_number`."""
    return _number(text, int, lambda value: value >= 1, "at least 1")


def temperature(text: str) -> float:
    """Return a finite number of at least 0. Raises as :func:`_number`."""
    return _number(text, float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def share(text: str) -> float:
    """Return a number above 0 and at most 1. Raises as :func:`_number`."""
    return _number(text, float, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _number(text: str, kind: type, fits: Callable[[float], bool], allowed: str) -> float:
    """Return a number of a kind and range.

    Raises:
        argparse.ArgumentTypeError: it is out of range.
        ValueError: it is not a number of this kind.
    """
    value = kind(text)
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
    return value


def protected(text: str) -> bool | int:
    """Return the number of prompt tokens that are never evicted. ``all`` is True.

    Raises:
        argparse.ArgumentTypeError: the text is neither ``all`` nor a number of tokens.
    """
    try:
        return protection(text)
    except ConfigError as error:
        # options of kvpop lack the prefix of vLLM's flags
        raise argparse.ArgumentTypeError(str(error).replace("--kv-", "--")) from None


def memory(text: str) -> int:
    """Return a size in bytes.

    Args:
        text: a number, optionally with K, M, G (1000) or Ki, Mi, Gi (1024), optionally with B.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?|)B?", text.strip())
    # exact, where a float would round large sizes
    count = int(Fraction(match[1]) * UNITS[match[2]]) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 536870912, 512MiB or 40GB")
    return count


def _allowed(setting: Setting, text: str) -> str:
    if refusal := setting.refusal(text):
        raise argparse.ArgumentTypeError(refusal.replace("--kv-", "--"))
    return text


def add_setting(parser: argparse._ActionsContainer, name: str, help: str, **options) -> None:
    """Add an option of a `kvpop` subcommand that takes the values of a setting.

    Args:
        parser: parser or group of the subcommand.
        name: name of the setting. The option is called like it.
        help: help of the option.
        options: more arguments of ``add_argument``, such as ``nargs``.
    """
    setting = next(entry for entry in SETTINGS if entry.name == name)
    values = {"type": setting.kind, "metavar": setting.metavar}
    if setting.files_go_to:
        values["type"] = functools.partial(_allowed, setting)
    elif setting.choices:
        values = {"choices": setting.choices}
    elif setting.protects:
        values["type"] = protected
    elif setting.kind is int:
        values["type"] = positive if setting.minimum else non_negative
    parser.add_argument(f"--{name.replace('_', '-')}", help=help, **values, **options)
