"""Installation of the ledger, the only place where vLLM's modules are changed."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpop_vllm.vllm_glue.ledger import ADDED, LEDGER, REGISTERED, Patch
from kvpop_vllm.vllm_glue.start import contract

if TYPE_CHECKING:
    from kvpop_vllm.policies import Policy

HTTP_SERVER = "vllm.entrypoints.launchers.app"
"""Module that every process with vLLM's HTTP server has loaded before it makes a config."""
_ROW = "_kvpop_row"
_DEFAULTS = {"__setstate__": lambda self, state: self.__dict__.update(state)}
"""Methods of Python that hold where a class defines none of its own."""


def _loads_cartridges() -> bool:
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _has_runner_v2() -> bool:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().use_v2_model_runner


CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "always": lambda policy: True,
    "HTTP server": lambda policy: HTTP_SERVER in sys.modules,
    "policy": lambda policy: policy is not None,
    "cartridges": lambda policy: policy is not None and bool(policy.settings.cartridge or _loads_cartridges()),
    "loading cartridges": lambda policy: policy is not None and _loads_cartridges(),
    "inspect page": lambda policy: policy is not None and bool(policy.settings.inspect),
    "CPU": lambda policy: policy is not None and _on_cpu(),
    "model runner V2": lambda policy: policy is not None and not _on_cpu() and _has_runner_v2(),
}
"""Conditions of the ledger's rows, which take the engine's policy, None without one."""


def install(process: str, policy: Policy | None = None) -> None:
    """Put the ledger's rows of a process in place, without those that are in place already; if one cannot be, none is.

    Args:
        process: process of vLLM that this is, as in the ledger.
        policy: policy of its engine, None without one.

    Raises:
        ConfigError: vLLM lacks a target, or a parameter on which its wrapper relies.
    """
    places = {}
    for row in LEDGER:  # one by one: finding the place of a row may load the module that a later one asks for
        if row.process == process and CONDITIONS[row.when](policy):
            places[row] = (_wrapper(row), *_place(row))
    for row, place in places.items():
        _put(row, *place)


def _wrapper(row: Patch) -> Callable:
    """Return the package's function of a row."""
    module, function = row.wrapper.split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)


def _place(row: Patch) -> tuple[Any, str]:
    """Return the module or class of a row's target, and the target's name in it.

    Raises:
        ConfigError: vLLM lacks it, or a parameter on which the wrapper relies.
    """
    if row.kind == REGISTERED:
        return None, ""
    module, path = row.target.split(":")
    *classes, name = path.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        if row.kind == ADDED:
            return owner, name
        parameters = inspect.signature(_function(owner, name)).parameters
    except (ImportError, AttributeError, KeyError):
        raise contract.missing([contract.described(row)]) from None
    kinds = [parameter.kind for parameter in parameters.values()]
    foreign = kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]  # a wrapper of another plugin
    if not foreign and not contract.fits(row.takes, list(parameters)):
        raise contract.missing([contract.described(row)])
    return owner, name


def _function(owner: Any, name: str) -> Callable:
    """Return a function of a module or class as it is defined, without the method that binds it."""
    defined = vars(owner).get(name) or _DEFAULTS[name]
    return getattr(defined, "__func__", defined)


def _put(row: Patch, ours: Callable, owner: Any, name: str) -> None:
    """Put a row in place unless it is."""
    if row.kind == REGISTERED:
        ours()
    elif row.kind == ADDED:
        setattr(owner, name, ours)
    elif not _wraps(row, _function(owner, name)):
        _wrap(row, ours, owner, name)


def _wraps(row: Patch, function: Callable | None) -> bool:
    """Return whether the wrapper of a row is a function, or one of those that it wraps."""
    while function is not None:
        if getattr(function, _ROW, None) is row:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _wrap(row: Patch, ours: Callable, owner: Any, name: str) -> None:
    """Have a function return ``ours(original, *args, **kwargs)``, with the installer first where a row opens a process."""
    original = _function(owner, name)
    if row.opens:
        ours = functools.partial(ours, functools.partial(install, row.opens))

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ours(original, *args, **kwargs)

    setattr(wrapper, _ROW, row)
    for method in ("cache_clear", "cache_info"):
        if hasattr(original, method):
            setattr(wrapper, method, getattr(original, method))
    kind = type(vars(owner).get(name))
    setattr(owner, name, kind(wrapper) if kind in (staticmethod, classmethod) else wrapper)
