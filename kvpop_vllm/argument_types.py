"""Types of command-line arguments, for argparse."""

import argparse

from kvpop_vllm.config import ConfigError, protection


def non_negative(text: str) -> int:
    """Return an integer of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is negative.
    """
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def positive(text: str) -> int:
    """Return an integer of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is less.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def protected(text: str) -> bool | int:
    """Return the number of prompt tokens that are never evicted; ``all`` is True.

    Raises:
        argparse.ArgumentTypeError: the text is neither ``all`` nor a number of tokens.
    """
    try:
        return protection(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).replace("--kv-", "--")) from None
