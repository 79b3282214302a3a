"""Cache settings of a single request.

They are keys of ``SamplingParams.extra_args``, which are ``vllm_xargs`` over HTTP. They are checked and
resolved once, when the request arrives. The resolved numbers are passed with the request to the block manager
and to the workers (:data:`RESOLVED`). This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvpop_vllm.config import ConfigError, protected_tokens, protection

if TYPE_CHECKING:
    from kvpop_vllm.policies import Policy

BUDGET, PROTECT, CARTRIDGES, SEED, REPORT = KEYS = (
    "kv_budget",
    "kv_protect_prompt",
    "kv_cartridges",
    "kv_seed",
    "kv_report",
)
"""Keys of a request."""
RESOLVED = "kvpop"
"""Key of ``extra_args`` of every checked request, with the resolved :class:`RequestCache`, None if it asked for nothing."""
OF_VLLM = ("kv_transfer_params", "kv_cache_report_mode")
"""Keys of vLLM with the same prefix as the keys of this package."""


class UnknownCartridge(ConfigError):
    """Error for a request that names a cartridge that the server does not have."""


class Placed(NamedTuple):
    """Cartridge in front of a prompt.

    Attributes:
        digest: digest of its files.
        slots: number of its slots per KV head.
    """

    digest: str
    slots: int


class RequestCache(NamedTuple):
    """Resolved numbers of one request.

    Attributes:
        protected: p, in tokens, those of cartridges included.
        budget: B, in tokens.
        window: w, in tokens.
        seed: seed of the request's draws, or None for the seed that it has anyway.
        cartridges: cartridges in front of the prompt, in order.
    """

    protected: int
    budget: int
    window: int
    seed: int | None = None
    cartridges: tuple[Placed, ...] = ()

    @property
    def made(self) -> int:
        """Number of the request's first tokens that are slots of cartridges."""
        return sum(each.slots for each in self.cartridges)


def resolve(
    policy: Policy, extra_args: Mapping | None, prompt: int, placed: Sequence[Placed] = ()
) -> RequestCache | None:
    """Return the resolved settings of a request, or None if it asks for nothing.

    Budget and window are resolved as for a server with that budget.

    Args:
        policy: policy of the server.
        extra_args: what the request asks for.
        prompt: number of its own prompt tokens.
        placed: cartridges in front of them.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, is too large or too small, or the policy
            does not support it.
    """
    asked = {
        key: value for key, value in (extra_args or {}).items() if str(key).startswith("kv_") and key not in OF_VLLM
    }
    if RESOLVED in (extra_args or {}):
        raise ConfigError(f"the key {RESOLVED!r} is reserved: leave it out")
    if not asked:
        return None
    if unknown := sorted(set(asked) - set(KEYS)):
        raise ConfigError(f"unknown key {unknown[0]!r}: use {', '.join(KEYS)}")
    if (report := asked.get(REPORT)) is not None and not (isinstance(report, int) and report in (0, 1)):
        raise ConfigError(f"{REPORT} must be 0 or 1, got {report!r}")
    kept = policy.retention if asked.get(BUDGET) is None else _retention(policy, asked[BUDGET])
    protected, seed = _protected(policy, asked.get(PROTECT), prompt), _seed(policy, asked)
    return RequestCache(protected + sum(p.slots for p in placed), kept.budget, kept.window, seed, tuple(placed))


def of_params(params: object) -> RequestCache | None:
    """Return the resolved settings in sampling parameters, or None if the request asked for nothing."""
    told = (getattr(params, "extra_args", None) or {}).get(RESOLVED)
    if told is None:
        return None
    *numbers, cartridges = told
    return RequestCache(*numbers, tuple(Placed(*each) for each in cartridges))


def is_checked(params: object) -> bool:
    """Return whether sampling parameters come from a front end that has checked what the request asks for."""
    return RESOLVED in (getattr(params, "extra_args", None) or {})


def wants_report(params: object) -> bool:
    """Return whether sampling parameters ask for a report of what the cache did."""
    return bool((getattr(params, "extra_args", None) or {}).get(REPORT))


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _retention(policy: Policy, budget: object):
    if not _integer(budget):
        raise ConfigError(f"{BUDGET} must be a whole number of tokens, got {budget!r}")
    if budget < 1:
        raise ConfigError(f"{BUDGET} must be at least 1, got {budget}")
    if budget > policy.max_budget and not policy.one_budget:
        raise ConfigError(f"{BUDGET} {budget} is more than this server allows: lower it to at most {policy.max_budget}")
    try:
        return policy.retention_of(budget)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--kv-budget", BUDGET)) from None


def _protected(policy: Policy, asked: object, prompt: int) -> int:
    if asked is None:
        return protected_tokens(policy.protect, prompt)
    if not (asked is True or asked == "all" or (_integer(asked) and asked >= 0)):
        raise ConfigError(f'{PROTECT} must be "all" or a whole number of tokens, got {asked!r}')
    if policy.compresses:
        raise ConfigError(f"--kv-policy {policy.name} holds the prompt until its end anyway: leave {PROTECT} out")
    protect, most = protection(asked, PROTECT), policy.max_protect
    tokens = protected_tokens(protect, prompt)
    wanted = tokens if protect is True else protect
    if most is not True and wanted > most:
        if not most:
            raise ConfigError(
                f"this server protects no prompts: leave {PROTECT} out, or have it started with --kv-max-protect"
            )
        raise ConfigError(
            f"{PROTECT} asks for {wanted} tokens, more than this server allows: lower it to at most {most}"
        )
    return tokens


def named(extra_args: Mapping | None, known: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return the cartridges that a request asks for, by name and in order.

    Args:
        extra_args: what the request asks for.
        known: cartridges of the server, by name.

    Raises:
        UnknownCartridge: the server has no cartridge of a name.
        ConfigError: what is asked for is no list of names, or one is there twice.
    """
    names = (extra_args or {}).get(CARTRIDGES)
    if names is None:
        return {}
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{CARTRIDGES} must be a list of names, got {names!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{CARTRIDGES} names a cartridge twice: name each once")
    for name in names:
        if name not in known:
            those = f"name one of {', '.join(known)}" if known else "this server has none, start it with --kv-cartridge"
            raise UnknownCartridge(f"the cartridge {name!r} does not exist: {those}")
    placed = {name: known[name] for name in names}
    if len({each.digest for each in placed.values()}) < len(placed):
        raise ConfigError(f"{CARTRIDGES} names a cartridge twice, by two names of it: name each once")
    return placed


def _seed(policy: Policy, asked: Mapping) -> int | None:
    seed = asked.get(SEED)
    if seed is None:
        return None
    if not _integer(seed) or not -(2**63) <= seed < 2**64:
        raise ConfigError(f"{SEED} must be a whole number of 64 bits, got {seed!r}")
    if not policy.draws:
        raise ConfigError(f"--kv-policy {policy.name} draws nothing: leave {SEED} out")
    return seed
