"""Registry of eviction policies: one file and one class per paper.

Other packages add policies through the entry-point group ``kvpop_vllm.policies``.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import importlib
import shutil
import textwrap
from collections.abc import Mapping
from importlib.metadata import entry_points

from kvpop_vllm.calibration.shares import recommended
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.policies.base import Order, Policy

NAMES = (
    "kvpop trimkv dms kvzap streaming_llm l2norm h2o tova momentkv random_attention snapkv pyramidkv adakv attention_matching"
    " vase rkv triattention full"
).split()
"""Modules of built-in policies, in the order of `kvpop policies`."""
MODULES = [importlib.import_module(f"{__name__}.{name}") for name in NAMES]

POLICIES: dict[str, type[Policy]] = {
    cls.name: cls
    for module in MODULES
    for cls in vars(module).values()
    # with a name of their own: bases such as kvpop._Scored have none
    if isinstance(cls, type) and cls.__module__ == module.__name__ and "name" in vars(cls)
}
"""Built-in policies by name: the classes with a name in :data:`MODULES`."""

ENTRY_POINTS = "kvpop_vllm.policies"
"""Entry-point group for policies of other packages.

An entry is ``name = "module:Class"``. The class is a :class:`Policy` with that name.
"""


def known() -> list[str]:
    """Return the names of all policies, built-in ones first. Policies of other packages are not imported."""
    return [*POLICIES, *sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)} - set(POLICIES))]


def get(name: str) -> type[Policy]:
    """Return the policy class registered under ``name``."""
    # two packages may bring the same name, and none of them wins silently
    brought = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
    packages = ", ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in brought))
    if brought and (name in POLICIES or len(brought) > 1):
        ours = " and kvpop_vllm" if name in POLICIES else ""
        raise ConfigError(f"policy {name!r} is brought by {packages}{ours}: uninstall all but one")
    if name in POLICIES:
        return POLICIES[name]
    if not brought:
        raise ConfigError(f"unknown policy {name!r}: --kv-policy takes {', '.join(known())}")
    try:
        cls = brought[0].load()
    # importing runs the package's code, which may raise anything
    except Exception as error:
        raise ConfigError(f"policy {name!r} of {packages} cannot be imported ({error!r}): mend that package") from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)) or getattr(cls, "name", None) != name:
        raise ConfigError(
            f"entry point {name!r} of {packages} must be a kvpop_vllm.policies.base.Policy with name = {name!r}, got {cls!r}"
        )
    lacking = [attribute for attribute in ("paper", "cost") if not isinstance(getattr(cls, attribute, None), str)]
    # instantiating the class would raise a TypeError that names no package
    lacking += sorted(cls.__abstractmethods__)
    if lacking:
        raise ConfigError(f"policy {name!r} of {packages} does not say {', '.join(lacking)}: mend that package")
    return cls


def parse_settings(values: Mapping) -> PolicySettings:
    """Return the settings in a mapping (:meth:`PolicySettings.parse`), with what ``auto`` stands for in its place."""
    return recommended(PolicySettings.parse(values))


def loadable() -> tuple[list[type[Policy]], list[str]]:
    """Return the loadable policies and one error message per policy that fails to load."""
    classes, broken = [], []
    for name in known():
        try:
            classes.append(get(name))
        except ConfigError as error:
            broken.append(str(error))
    return classes, broken


def describe() -> str:
    """Return a paragraph per policy, as wide as the terminal, and one line per policy that fails to load.

    A paragraph has the name and the paper, the kind of scorer that the policy needs, signals, order, state and
    cost per step.
    """
    classes, broken = loadable()
    indent = max(len(cls.name) for cls in classes) + 2
    width = max(60, shutil.get_terminal_size().columns)
    lines = []
    for cls in classes:
        # where the order follows from a scorer's config, the class has a property here
        order = cls.order.value if isinstance(cls.order, Order) else "static, or aged for decay step > 1"
        facts = {
            "needs a scorer of kind": cls.scorer_kind,
            "needs": "statistics of the model (--kv-calibration)" if cls.calibrated else "",
            "scores from": ", ".join(sorted(signal.value for signal in cls.signals)),
            "order": order,
            "state per layer and KV head": cls.state.strip("-"),  # "-" is none, and empty facts are left out
            "cost per step": cls.cost,
        }
        paragraph = {cls.name.ljust(indent): cls.paper}
        paragraph |= {f"{' ' * indent}{name}: ": fact for name, fact in facts.items() if fact}
        for begins, text in paragraph.items():
            lines += textwrap.wrap(text, width, initial_indent=begins, subsequent_indent=" " * (indent + 2))
    return "\n".join(lines + broken)
