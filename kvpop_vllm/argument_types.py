"""Types of command-line arguments, for argparse."""

import argparse

from kvpop_vllm.config import ConfigError, protection


def non_negative(text: str) -> int:
    """0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def positive(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def protected(text: str) -> bool | int:
    """What of a prompt is never evicted: ``all`` (True) or a number of tokens."""
    try:
        return protection(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).replace("--kv-", "--")) from None
