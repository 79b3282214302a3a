"""Standing aside: stock servers start as they are, and engines that ask for a policy are refused in one line.

This is for a vLLM that the package does not fit. It uses little of vLLM, and nothing of the rest of the glue.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError
from kvpop_vllm.flags import FLAGS

logger = logging.getLogger("vllm.kvpop_vllm")

reason: str | None = None
"""Reason why the plugin does nothing in this process, None while it works."""


def stand_aside(why: str, guard: Callable[[], None]) -> None:
    """Refuse policies in this process, and warn, once for a server and its child processes.

    vLLM's command ends here if its arguments have one of the flags, which nothing has defined.

    Args:
        why: the reason.
        guard: has vLLM's configs refuse a policy in ``additional_config``, which would have no effect.
    """
    global reason
    reason = why
    if in_vllms_command() and _flags_given():
        refuse()
    if multiprocessing.parent_process() is None:
        logger.warning("kvpop_vllm does nothing: %s", why)
    try:
        guard()
    except Exception as error:  # a stock server starts with this vLLM too
        logger.warning("kv_policy in additional_config has no effect, and cannot be refused: %s", error)


def refuse() -> None:
    """Refuse a policy.

    Raises:
        ConfigError: always, but under vLLM's own command, which ends with one line and exit code 1.
    """
    with one_line_errors():
        raise ConfigError(f"--kv-policy cannot be served: {reason}")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a ConfigError into one line and exit code 1 under vLLM's own command; elsewhere raise it."""
    try:
        yield
    except ConfigError as error:
        if not in_vllms_command():
            raise
        sys.exit(f"kvpop: error: {error}")


def in_vllms_command() -> bool:
    """Return whether this process runs ``vllm``, or one of its modules."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(sys.argv[0]).name == "vllm" or (module is not None and module.name.startswith("vllm."))


def _flags_given() -> bool:
    return any(word.split("=")[0].replace("_", "-") in FLAGS.values() for word in sys.argv[1:])


def init_config(original, self, *args, **kwargs) -> None:
    """Wrap the constructor of vLLM's config: refuse a policy."""
    original(self, *args, **kwargs)
    _check(self)


def restore_config(original, self, state) -> None:
    """Wrap the restoring of a config from a pickle: refuse a policy; engine cores and workers get theirs in this way."""
    original(self, state)
    _check(self)


def _check(config) -> None:
    additional = getattr(config, "additional_config", None)
    if isinstance(additional, dict) and additional.get(ADDITIONAL_CONFIG_KEY) is not None:
        refuse()
