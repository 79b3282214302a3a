"""Slots of a single request: the record of its numbers, and the settings that it is resolved from.

Settings are keys of ``SamplingParams.extra_args``, which are ``vllm_xargs`` over HTTP. They are checked and resolved
once, when the request arrives. The record is passed with the request to the block manager and to the workers
(:data:`RESOLVED`), and the planner of a step reads it. This module imports neither vLLM nor torch.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvpop_vllm.config import ConfigError, protected_tokens, protection

BUDGET, PROTECT, CARTRIDGES, SEED, REPORT = KEYS = (
    "kv_budget",
    "kv_protect_prompt",
    "kv_cartridges",
    "kv_seed",
    "kv_report",
)
"""Keys of a request."""
RESOLVED = "kvpop"
"""Key of ``extra_args`` of every request that a front end has checked. It holds the resolved :class:`RequestSlots`."""
OF_VLLM = ("kv_transfer_params", "kv_cache_report_mode")
"""Keys of vLLM with the same prefix as the keys of this package."""


class UnknownCartridge(ConfigError):
    """Error for a request that names a cartridge that the server does not have."""


class Compression(Protocol):
    """Way in which prompts are compressed at their end, such as :class:`kvpop_vllm.kernels.ops.PromptVotes`.

    Attributes:
        queries: number of a prompt's last queries that are stored.
        makes_slots: True if slots with biases are made of a prompt.
        adaptive_head_budgets: True if the heads of a layer divide their slots.
    """

    queries: int
    makes_slots: bool
    adaptive_head_budgets: bool

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state."""

    def after(self, slots: RequestSlots) -> RequestSlots:
        """Return what a request is after the end of its prompt, which is compressed there."""


class ServerSlots(Protocol):
    """Numbers of requests that ask for nothing, such as the cache spec of a layer.

    Attributes:
        protect: value of ``--kv-protect-prompt``, True for whole prompts.
        budget: B.
        window: w.
    """

    protect: bool | int
    budget: int
    window: int


class Placed(NamedTuple):
    """Cartridge in front of a prompt.

    Attributes:
        digest: digest of its files.
        slots: number of its slots per KV head.
    """

    digest: str
    slots: int


class RequestSlots(NamedTuple):
    """Slots of one request, from its admission to the plan of a step.

    Attributes:
        prefix: p, tokens of the protected prefix, those of cartridges included. The request may be shorter. Where
            prompts are compressed, the prompt.
        made_slots: number of the prefix's first tokens that are made slots with biases, not tokens.
        budget: B, in tokens.
        window: w, in tokens.
        seed: seed of the request's draws, or None for the seed that it has anyway.
        shift: number of tokens that the kernels do not count: those of a compressed prompt that are not retained.
        left: tokens of the compressed prompt, whose blocks precede those of the request in its row.
        cartridges: cartridges in front of the prompt, in order.
    """

    prefix: int
    made_slots: int
    budget: int
    window: int
    seed: int | None = None
    shift: int = 0
    left: int = 0
    cartridges: tuple[Placed, ...] = ()

    def begins_tail(self, start: int, end: int) -> bool:
        """Return whether the tail after the prefix begins with one of the tokens ``[start, end)``."""
        return 0 < self.prefix and start <= self.prefix < end


NUMBERS = {
    "prefix": "int64",
    "made_slots": "int64",
    "budget": "int32",
    "window": "int32",
    "seed": "int64",
    "shift": "int64",
    "left": "int64",
}
"""Numbers of :class:`RequestSlots` that are sent to a device, and their types."""
OPTIONS = {"windows": "window", "seeds": "seed"}
"""Numbers that ``ops.decode_step`` takes of every request besides its budget, by the name of the argument."""
KERNELS_TAKE = ("budget", *OPTIONS.values())
"""Numbers that kernels take of every decoded request. Prefixes are apart."""


def resolve(policy, extra_args: Mapping | None, prompt: int, placed: Sequence[Placed] = ()) -> RequestSlots:
    """Return the slots of a request. What it does not ask for is the server's.

    Budget and window are resolved as for a server with that budget.

    Args:
        policy: policy of the server, a :class:`kvpop_vllm.policies.Policy`.
        extra_args: what the request asks for.
        prompt: number of its own prompt tokens.
        placed: cartridges in front of them.
    """
    # keys of vLLM and of other plugins are left alone
    options = {
        key: value for key, value in (extra_args or {}).items() if str(key).startswith("kv_") and key not in OF_VLLM
    }
    if RESOLVED in (extra_args or {}):
        raise ConfigError(f"the key {RESOLVED!r} is reserved: leave it out")
    if unknown := sorted(set(options) - set(KEYS)):
        raise ConfigError(f"unknown key {unknown[0]!r}: use {', '.join(KEYS)}")
    if (report := options.get(REPORT)) is not None and not (isinstance(report, int) and report in (0, 1)):
        raise ConfigError(f"{REPORT} must be 0 or 1, got {report!r}")
    roles = policy.retention if options.get(BUDGET) is None else _retention(policy, options[BUDGET])
    protected, seed = _protected(policy, options.get(PROTECT), prompt), _seed(policy, options)
    cartridge_slots = sum(cartridge.slots for cartridge in placed)
    return RequestSlots(
        protected + cartridge_slots, cartridge_slots, roles.budget, roles.window, seed, cartridges=tuple(placed)
    )


def of_params(params: object) -> RequestSlots | None:
    """Return the slots of a request from its sampling parameters, or None if nobody has resolved it."""
    options = getattr(params, "extra_args", None) or {}
    record = options.get(RESOLVED)
    if record is not None and not isinstance(record, RequestSlots):  # as it comes from another process
        *numbers, cartridges = record
        record = options[RESOLVED] = RequestSlots(*numbers, tuple(Placed(*cartridge) for cartridge in cartridges))
    return record


def of_request(params: object, server: ServerSlots, prompt: int) -> RequestSlots:
    """Return the slots of a request. One that nobody has resolved has the server's.

    Args:
        params: its sampling parameters.
        server: what holds for requests that ask for nothing.
        prompt: number of its prompt tokens.
    """
    if (record := of_params(params)) is not None:
        return record
    return RequestSlots(protected_tokens(server.protect, prompt), 0, server.budget, server.window)


def protects_prompt(params: object, server: ServerSlots) -> bool:
    """Return whether a request protects its whole prompt, so that a later turn of its conversation protects more.

    Args:
        params: its sampling parameters.
        server: slots of requests that ask for nothing.
    """
    value = (getattr(params, "extra_args", None) or {}).get(PROTECT)
    return (server.protect if value is None else protection(value, PROTECT)) is True


def wants_report(params: object) -> bool:
    """Return whether sampling parameters ask for a report of what the cache did."""
    return bool((getattr(params, "extra_args", None) or {}).get(REPORT))


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _retention(policy, budget: object):
    if not _integer(budget):
        raise ConfigError(f"{BUDGET} must be a whole number of tokens, got {budget!r}")
    if budget < 1:
        raise ConfigError(f"{BUDGET} must be at least 1, got {budget}")
    # policies with one budget refuse any other below, with a reason of their own
    if budget > policy.max_budget and not policy.one_budget:
        raise ConfigError(f"{BUDGET} {budget} is more than this server allows: lower it to at most {policy.max_budget}")
    try:
        return policy.retention_of(budget)
    except ConfigError as error:
        # the user has given the key, and not the flag
        raise ConfigError(str(error).replace("--kv-budget", BUDGET)) from None


def _protected(policy, value: object, prompt: int) -> int:
    if value is None:
        return protected_tokens(policy.protect, prompt)
    if not (value is True or value == "all" or (_integer(value) and value >= 0)):
        raise ConfigError(f'{PROTECT} must be "all" or a whole number of tokens, got {value!r}')
    if policy.compresses:
        raise ConfigError(f"--kv-policy {policy.name} holds the prompt until its end anyway: leave {PROTECT} out")
    protect, allowed = protection(value, PROTECT), policy.max_protect
    tokens = protected_tokens(protect, prompt)
    # a number counts in full, also where the prompt is shorter
    requested = tokens if protect is True else protect
    if allowed is not True and requested > allowed:
        if not allowed:
            raise ConfigError(
                f"this server protects no prompts: leave {PROTECT} out, or have it started with --kv-max-protect"
            )
        raise ConfigError(
            f"{PROTECT} asks for {requested} tokens, more than this server allows: lower it to at most {allowed}"
        )
    return tokens


def named(extra_args: Mapping | None, cartridges: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return the cartridges that a request asks for, by name and in order.

    Args:
        extra_args: what the request asks for.
        cartridges: those of the server, by name.

    Raises:
        UnknownCartridge: the server has no cartridge of a name.
    """
    names = (extra_args or {}).get(CARTRIDGES)
    if names is None:
        return {}
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{CARTRIDGES} must be a list of names, got {names!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{CARTRIDGES} names a cartridge twice: name each once")
    for name in names:
        if name not in cartridges:
            advice = (
                f"name one of {', '.join(cartridges)}"
                if cartridges
                else "this server has none, start it with --kv-cartridge"
            )
            raise UnknownCartridge(f"the cartridge {name!r} does not exist: {advice}")
    placed = {name: cartridges[name] for name in names}
    # the same slots at two places would count twice in every softmax
    if len({cartridge.digest for cartridge in placed.values()}) < len(placed):
        raise ConfigError(f"{CARTRIDGES} names a cartridge twice, by two names of it: name each once")
    return placed


def _seed(policy, options: Mapping) -> int | None:
    seed = options.get(SEED)
    if seed is None:
        return None
    # signed or not: draws take a seed modulo 2**64
    if not _integer(seed) or not -(2**63) <= seed < 2**64:
        raise ConfigError(f"{SEED} must be a whole number of 64 bits, got {seed!r}")
    if not policy.draws:
        raise ConfigError(f"--kv-policy {policy.name} draws nothing: leave {SEED} out")
    return seed
