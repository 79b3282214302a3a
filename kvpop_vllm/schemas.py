"""Reader of the JSON files of scorers, cartridges, compactors and calibrations: format, keys and values.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpop_vllm.config import MAX_BUDGET, RAISE_LENGTH, ConfigError

Rule = tuple[Callable[[Any], bool], str]
"""Function that says whether a value is right, and what a right value is, in words."""

FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
TEXT: Rule = (lambda value: isinstance(value, str), "a string")
NAME: Rule = (lambda value: isinstance(value, str) and bool(value), "a name")


def integer(low: int, high: int = MAX_BUDGET) -> Rule:
    """Return the rule of integers from ``low`` to ``high``."""
    # type(), since true and false are integers to isinstance()
    return lambda value: type(value) is int and low <= value <= high, f"an integer from {low} to {high}"


def optional(rule: Rule) -> Rule:
    """Return the rule of values that may also be null."""
    fits, words = rule
    return lambda value: value is None or fits(value), f"{words}, or null"


def one_of(choices: Iterable[str]) -> Rule:
    """Return the rule of strings among ``choices``."""
    choices = tuple(choices)
    return lambda value: value in choices, f"one of {', '.join(choices)}"


def check_same_model(made_for: Mapping, model: Mapping, source: str, remedy: str, name: str = "this one") -> None:
    """Check that a file was made for a model.

    Args:
        made_for: properties of the model that it was made for. Those of ``rope``, if it is there, are compared one by
            one.
        model: properties of the model, with ``wide_window`` of :class:`kvpop_vllm.model_shape.ModelShape` if it has
            one.
        source: name of the file in errors.
        remedy: what to give instead.
        name: name of the model in errors.
    """
    properties = [("a model", key, value, model.get(key)) for key, value in made_for.items() if key != "rope"]
    if "rope" in made_for:
        ours, theirs = made_for["rope"], model["rope"]
        properties += [("rotary embeddings", key, ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs})]
    # short texts make layers with windows count as full, so that the lists differ
    if made_for.get("layers") and model.get("wide_window"):
        remedy = RAISE_LENGTH.format(model["wide_window"])
    for kind, key, ours, theirs in properties:
        if ours != theirs:
            raise ConfigError(f"{source} was made for {kind} with {key} = {ours!r}, {name} has {theirs!r}: {remedy}")


@dataclass(frozen=True)
class Schema:
    """Format of a config file, and what its errors say.

    Attributes:
        kind: what the file describes.
        wrong: error for a value, with ``name``, ``rule`` and ``value``.
        missing: error for a key that is not there, with ``name``.
        advice: what to do about a wrong or missing value, with its colon, or an empty text.
    """

    kind: str
    wrong: str = "{name} must be {rule}, got {value!r}"
    missing: str = "key {name!r} is missing"
    advice: str = ""

    @property
    def header(self) -> dict:
        """First keys of a file."""
        return {"format": f"kvpop-{self.kind}", "version": 1}

    def body(self, raw: object, source: str) -> dict:
        """Return the keys of a decoded file without its header."""
        first = {name: raw.get(name) for name in self.header} if isinstance(raw, Mapping) else {}
        # True is 1 in Python
        if first != self.header or isinstance(first["version"], bool):
            raise ConfigError(
                f"{source} says format {first.get('format')!r} version {first.get('version')!r}, and is not that of a {self.kind} of"
                f" version 1: it must be a JSON object, whose format must be {self.header['format']!r}"
            )
        return {name: value for name, value in raw.items() if name not in first}

    def check_keys(self, values: Mapping, names: Collection[str], optional: Collection[str], source: str) -> None:
        """Check that there are no other keys than ``names``, and all of them but the optional ones."""
        if unknown := sorted(set(values) - set(names), key=str):
            raise ConfigError(f"{source} has an unknown key {unknown[0]!r}: remove it, or use a newer kvpop")
        if lacking := [name for name in names if name not in values and name not in optional]:
            raise ConfigError(f"{source}: {self.missing.format(name=lacking[0])}{self.advice}")

    def layers(self, values: Mapping, source: str) -> list[int]:
        """Return the key ``layers``: indices in the model of the layers that a file is for, empty if these are all."""
        layers, count = values.get("layers", []), values["num_layers"]
        numbers = isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers)
        if layers != [] and (not numbers or layers != sorted(set(layers)) or len(layers) != count):
            raise ConfigError(f"{source}: layers must be a list of {count} ascending indices of layers, got {layers!r}")
        return layers

    def check(self, values: Mapping, rules: Mapping[str, Rule], source: str) -> None:
        """Check values by their rules."""
        for name, (fits, rule) in rules.items():
            if not fits(values[name]):
                wrong = self.wrong.format(name=name, rule=rule, value=values[name])
                raise ConfigError(f"{source}: {wrong}{self.advice}")
