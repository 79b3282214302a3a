"""Map of a published scorer, ``kvpop_map.json``: the tensor of each piece, and how the pieces are combined.

Errors are ConfigErrors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json, write_whole
from kvpop_vllm.schemas import Schema
from kvpop_vllm.scorers.tensor_matching import PIECES, REQUIRED, Pieces

MAP_NAME = "kvpop_map.json"
_SCHEMA = Schema("map")
_FORMULA = {
    "inputs": ("key value", "value key"),
    "feature_map": ("hedgehog", "softmax"),
    "norm": (None, "rms", "layer"),
    "norm_weight": ("w", "1 + w"),
    "decay": ("logit", "log", "gamma", "constant"),
}
"""Choices of the map's ``formula``. Its other keys are numbers and ``delayed``."""


@dataclass(frozen=True)
class Reading:
    """One way to read a scorer, the contents of a ``kvpop_map.json``.

    Attributes:
        pieces: place of each piece. See :data:`kvpop_vllm.scorers.tensor_matching.Pieces`.
        formula: how the pieces are combined.
        budget: ``sinks``, ``window`` and ``topk``, None for a number that the checkpoint does not say.
    """

    pieces: Pieces
    formula: dict[str, object]
    budget: dict[str, int | None]

    def to_json(self) -> dict:
        """Return the contents of the map."""
        return _SCHEMA.header | {"pieces": self.pieces, "formula": self.formula, **self.budget}

    @classmethod
    def from_json(cls, raw: object, source: str) -> Reading:
        """Check a decoded map and return it. ``source`` names it in errors."""
        body = _SCHEMA.body(raw, source)
        _SCHEMA.check_keys(body, ("pieces", "formula", "sinks", "window", "topk"), (), source)
        pieces, formula = body["pieces"], body["formula"]
        if not isinstance(pieces, Mapping) or not isinstance(formula, Mapping):
            raise ConfigError(f"{source}: pieces and formula must be objects: write it with 'kvpop inspect-checkpoint'")
        for piece, place in pieces.items():
            _check_place(piece, place, source)
        if missing := [piece for piece in REQUIRED if piece not in pieces]:
            raise ConfigError(f"{source}: pieces has no {missing[0]!r}: name its tensor")
        names = (*_FORMULA, "gate_softcap", "delayed", "decay_min", "decay_max", "decay_step")
        _SCHEMA.check_keys(formula, names, (), f"{source}: formula")
        for name, choices in _FORMULA.items():
            if formula[name] not in choices:
                listed = ", ".join(json.dumps(choice) for choice in choices)
                raise ConfigError(f"{source}: formula.{name} must be one of {listed}, got {formula[name]!r}")
        if (formula["norm"] is not None) != ("norm" in pieces):
            raise ConfigError(f"{source}: formula.norm and the piece 'norm' go together: give both or none")
        if (formula["decay"] == "constant") == ("decay" in pieces):
            raise ConfigError(f"{source}: formula.decay is 'constant' where there is no piece 'decay', and only there")
        return cls(dict(pieces), dict(formula), {name: body[name] for name in ("sinks", "window", "topk")})


def _check_place(piece: str, place: object, source: str) -> None:
    if piece not in PIECES:
        raise ConfigError(f"{source}: {piece!r} is no piece of a scorer: use {', '.join(PIECES)}")
    # both bounds at once: keys that must be there, and keys that may
    if not isinstance(place, Mapping) or not {"tensor", "axes"} <= place.keys() <= {
        "tensor",
        "axes",
        "part",
        "slice",
        "rows",
    }:
        raise ConfigError(
            f"{source}: {piece} must be an object of tensor, axes and perhaps part, slice or rows, got {place!r}"
        )
    if not isinstance(place["tensor"], str) or not isinstance(place["axes"], str):
        raise ConfigError(f"{source}: tensor and axes of {piece} must be texts")
    words = [word for word in re.findall(r"\w+", place["axes"]) if word != "1"]
    groups = re.findall(r"\((?:\w+ )*\w+\)|\w+", place["axes"])
    if (
        # joined again, the groups must give the text, so that nothing else is in it
        " ".join(groups) != place["axes"]
        or len(set(words)) < len(words)
        or set(words) - {"layer", "head", "part", "in", "out"}
    ):
        raise ConfigError(
            f"{source}: axes of {piece} must be of layer, head, part, in, out and 1, got {place['axes']!r}"
        )
    part = place.get("part")
    if ("part" in words) != (part is not None) or not (part is None or (type(part) is int and part >= 0)):
        raise ConfigError(f"{source}: {piece} needs a number 'part' if its axes have one, and only then")
    for name in ("slice", "rows"):
        ends = place.get(name, [0, 1])
        numbers = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
        if not numbers or not 0 <= ends[0] < ends[1]:
            raise ConfigError(f"{source}: {name} of {piece} must be two numbers, first and end, got {ends!r}")


def read_map(path: str | Path) -> Reading:
    """Return the reading in a map."""
    return Reading.from_json(read_json(path, "write it with 'kvpop inspect-checkpoint'"), str(path))


def write_map(path: Path, reading: Reading) -> None:
    """Write a reading as a map."""
    write_whole(path, json.dumps(reading.to_json(), indent=2) + "\n")


def differences(fitting: list[Reading]) -> list[str]:
    """Return what readings differ in, one text for each piece or key, at most three."""
    texts = []
    for piece in PIECES:
        places_of = {
            json.dumps(reading.pieces.get(piece), sort_keys=True): reading.pieces.get(piece) for reading in fitting
        }
        if len(places_of) > 1:
            texts.append(f"{piece}: {' or '.join(sorted({describe_place(place) for place in places_of.values()})[:3])}")
    for name in (*fitting[0].formula, *fitting[0].budget):
        values = list(dict.fromkeys(str((reading.formula | reading.budget)[name]) for reading in fitting))
        if len(values) > 1:
            texts.append(f"{name}: {' or '.join(values)}")
    return texts[:3]


def describe_place(place: Mapping | None) -> str:
    """Return where a piece is, in one text."""
    if place is None:
        return "nothing"
    part_name = f" part {place['part']}" if "part" in place else ""
    for name, words in (("slice", "columns"), ("rows", "rows")):
        part_name += f", {words} {place[name][0]} to {place[name][1]}" if name in place else ""
    return f"{place['tensor']} as {place['axes'] or 'one number'}{part_name}"
