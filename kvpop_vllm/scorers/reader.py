"""Reader of full checkpoints of other authors: the scorer's reading, its config and its tensors in our format.

Only JSON and safetensors files are opened. No code of the folder is imported. ``kvpop import`` may also read pickles,
by torch's restricted unpickler. Errors are ConfigErrors.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json, write_whole
from kvpop_vllm.model_shape import check_base, folder_sizes
from kvpop_vllm.schemas import Schema
from kvpop_vllm.scorers import ScorerConfig, make_config
from kvpop_vllm.scorers.config_keys import DECAY_RANGE, Facts, budgets_of, facts_of
from kvpop_vllm.scorers.readings import MOST, PIECES, REQUIRED, Pieces, Sizes, lacking, places, stacks
from kvpop_vllm.supported import base_keys, published_base
from kvpop_vllm.tensor_files import reading as naming_file
from kvpop_vllm.tensor_files import unpickled

logger = logging.getLogger("vllm.kvpop_vllm")
MAP_NAME = "kvpop_map.json"
INDEX = "model.safetensors.index.json"
MODEL_NAMES = re.compile(
    r"^(model\.)?(embed_tokens|norm|lm_head|layers\.\d+\."
    r"(self_attn\.([qkvo]_proj|qkv_proj|[qk]_norm|rotary_emb)|mlp\.(gate|up|down|gate_up)_proj|input_layernorm|post_attention_layernorm))\."
    r"(weight|bias|inv_freq|weight_(scale|scale_inv|packed|shape|zero_point|g_idx)|input_scale|[kv]_scale|qweight|qzeros|scales|g_idx)$"
)
"""Pattern of Llama's and Qwen3's own tensors, also quantised."""
_SCHEMA = Schema("map")
_FORMULA = {
    "inputs": ("key value", "value key"),
    "feature_map": ("hedgehog", "softmax"),
    "norm": (None, "rms", "layer"),
    "norm_weight": ("w", "1 + w"),
    "decay": ("logit", "log", "gamma", "constant"),
}
"""Choices of the map's ``formula``. Its other keys are numbers and ``delayed``."""
_AT_THE_END = 40.0
"""Logit of the sigmoid that is 1 in float64."""


@dataclass(frozen=True)
class Reading:
    """One way to read a scorer, the contents of a ``kvpop_map.json``.

    Attributes:
        pieces: place of each piece; see :data:`kvpop_vllm.scorers.readings.Pieces`.
        formula: how the pieces are combined.
        budget: ``sinks``, ``window`` and ``topk``; None for a number that the checkpoint does not say.
    """

    pieces: Pieces
    formula: dict[str, object]
    budget: dict[str, int | None]

    def to_json(self) -> dict:
        """Return the contents of the map."""
        return _SCHEMA.header | {"pieces": self.pieces, "formula": self.formula, **self.budget}

    @classmethod
    def from_json(cls, raw: object, source: str) -> Reading:
        """Check a decoded map and return it; ``source`` names it in errors."""
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
    words = re.findall(r"[a-z]+", place["axes"])
    bare = re.sub(r"[a-z1() ]", "", place["axes"])
    if bare or len(set(words)) < len(words) or set(words) - {"layer", "head", "part", "in", "out"}:
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


@dataclass
class Checkpoint:
    """Full checkpoint of other authors in a folder.

    Attributes:
        folder: the folder.
        sizes: sizes of the model, as :func:`kvpop_vllm.model_shape.folder_sizes` returns them.
        facts: what its config says about the scorer.
        shapes: shapes of the scorer's tensors by name.
        files: file of each tensor by name.
    """

    folder: Path
    sizes: dict
    facts: Facts
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]
    _unpickled: dict[str, torch.Tensor] = field(default_factory=dict)
    _read: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def small(self) -> Sizes:
        """Sizes that readings depend on."""
        return Sizes(self.sizes["num_layers"], self.sizes["num_kv_heads"], self.sizes["head_dim"])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, float32."""
        if name in self._unpickled:
            return self._unpickled[name].float()
        if name not in self._read:
            with naming_file(self.files[name]), safe_open(self.files[name], "pt") as file:
                self._read[name] = file.get_tensor(name)
        tensor = self._read[name]
        if not tensor.is_floating_point():
            raise ConfigError(f"{self.folder}: tensor {name} holds {tensor.dtype}, and scorers are of floating point")
        return tensor.float()


def is_published(folder: str | Path) -> bool:
    """Return whether a folder is a full checkpoint of other authors, by its ``config.json``."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    config = read_json(path, "give the folder of a Hugging Face model")
    return isinstance(config, Mapping) and published_base(config) is not None


def open_checkpoint(folder: str | Path, *, pickles: bool = False) -> Checkpoint:
    """Return a folder's checkpoint, its tensors unread.

    Args:
        folder: folder of a full checkpoint.
        pickles: True to read pickled weights where there are no safetensors files (``kvpop import``).

    Raises:
        ConfigError: it is none, its base is not served, or it has no weights that may be read.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", "give the folder of a full checkpoint")
    base = published_base(config) if isinstance(config, Mapping) else None
    if base is None:
        raise ConfigError(
            f"{folder}: neither model type nor architecture in config.json names KVpop: give a KVpop checkpoint"
        )
    check_base(base, folder / "config.json")
    sizes = folder_sizes(folder)
    facts = facts_of(config, frozenset(_model_keys(config, base)), str(folder / "config.json"))
    shapes, files, in_memory = _shapes(folder, pickles)
    if odd := [name for name in shapes if not name.isprintable()]:
        raise ConfigError(f"{folder}: {odd[0]!r} is no name of a tensor: give another checkpoint")
    _check_base_tensors(shapes, sizes, folder)
    scorer = {name: shape for name, shape in shapes.items() if not MODEL_NAMES.match(name)}
    if not scorer:
        raise ConfigError(f"{folder} has no tensors but the base model's, so no scorer: give --kv-scorer DIR")
    return Checkpoint(folder, sizes, facts, scorer, files, in_memory)


def _model_keys(config: Mapping, base: str) -> set[str]:
    more = {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "name_or_path"}
    return {*base_keys(config, base), *more}


def _shapes(folder: Path, pickles: bool) -> tuple[dict, dict[str, Path], dict[str, torch.Tensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "copy the folder again")
        weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(weight_map, Mapping) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"{folder / INDEX} has no weight_map: copy the folder again")
        listed = sorted(set(weight_map.values()))
        if missing := sorted(set(listed) - {path.name for path in folder.iterdir() if path.is_file()}):
            raise ConfigError(f"{folder} has no file {missing[0]!r}, which its index names: complete the folder")
        paths = [folder / file for file in listed]
    if not paths:
        return _unpickle(folder, pickles)
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        with naming_file(path), safe_open(path, "pt") as file:
            for name in file.keys():
                if name in shapes:
                    raise ConfigError(
                        f"{folder}: tensor {name!r} is in {files[name].name} and in {path.name}: remove one"
                    )
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), path
    return shapes, files, {}


def _unpickle(folder: Path, pickles: bool) -> tuple[dict, dict[str, Path], dict[str, torch.Tensor]]:
    paths = sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ConfigError(f"{folder} has no safetensors files: complete the folder")
    if not pickles:
        raise ConfigError(
            f"{folder} has no safetensors files, and {paths[0].name} is a pickle: convert it with 'kvpop import'"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors |= unpickled(path, "give a checkpoint's folder")
    return {name: tuple(t.shape) for name, t in tensors.items()}, {}, tensors


def _check_base_tensors(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping, folder: Path) -> None:
    """Check that keys and values have the heads that ``config.json`` says, in every layer."""
    width = sizes["num_kv_heads"] * sizes["head_dim"]
    for layer in range(sizes["num_layers"]):
        for part in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            shape = shapes.get(name, shapes.get(name.removeprefix("model.")))
            if shape is None:
                raise ConfigError(f"{folder}: the base model's tensor {name} is missing: complete the folder")
            if len(shape) == 2 and shape[0] != width:
                raise ConfigError(
                    f"{folder}: {name} is {list(shape)}, and config.json says {width} rows: one of the two is wrong"
                )


def readings(checkpoint: Checkpoint) -> list[Reading]:
    """Return all readings that fit, up to :data:`kvpop_vllm.scorers.readings.MOST`."""
    return [reading for pieces in _places(checkpoint) for reading in _with_formula(checkpoint, pieces)][:MOST]


def _places(checkpoint: Checkpoint) -> list[Pieces]:
    all_stacks = stacks(checkpoint.shapes, checkpoint.small, str(checkpoint.folder))
    return places(all_stacks, checkpoint.small, str(checkpoint.folder))


def _with_formula(checkpoint: Checkpoint, pieces: Pieces) -> list[Reading]:
    facts, source = checkpoint.facts, f"{checkpoint.folder / 'config.json'}"
    for key, piece in (("norm", "norm"), ("skip", "skip"), ("value_projection", "value")):
        says = facts[key]
        if says is not None and bool(says) != (piece in pieces):
            verb = "is no such tensor" if says else "is one"
            raise ConfigError(f"{source}: {facts.names[key]} is {says!r}, and there {verb}: one of the two is wrong")
    columns, values = (_width(checkpoint, pieces, piece) for piece in ("query", "score"))
    low, high = facts["decay_range"] or (facts["decay_min"] or DECAY_RANGE[0], facts["decay_max"] or DECAY_RANGE[1])
    dim = checkpoint.small.dim
    by_size = {dim // 2: ["hedgehog"], dim: ["softmax"]}.get(columns, ["hedgehog", "softmax"])
    feature_maps = [facts["feature_map"]] if facts["feature_map"] else by_size
    fitting = []
    for feature_map, norm, decay in itertools.product(
        feature_maps, _norms(checkpoint, pieces), _decays(checkpoint, pieces)
    ):
        features = columns * (2 if feature_map == "hedgehog" else 1)
        budgets = budgets_of(facts, features * values // (2 * dim), source)
        ends = (facts["gamma"], facts["gamma"]) if decay == "constant" else (low, high)
        formula = {
            "inputs": "key value",
            "feature_map": feature_map,
            "gate_softcap": facts["gate_softcap"] or None,
            "delayed": facts["delayed"] is not False,
            "norm": norm[0],
            "norm_weight": norm[1],
            "decay": decay,
            "decay_min": ends[0],
            "decay_max": ends[1],
            "decay_step": facts["decay_step"] or 1,
        }
        fitting += [Reading(pieces, formula, budget) for budget in budgets]
    return fitting


def _width(checkpoint: Checkpoint, pieces: Pieces, piece: str) -> int:
    return _arranged(checkpoint, pieces[piece], 0, PIECES[piece][1]).shape[-1]


def _norms(checkpoint: Checkpoint, pieces: Pieces) -> list[tuple[str | None, str]]:
    """Return the norms that fit, with how their weights are meant."""
    if "norm" not in pieces:
        return [(None, "w")]
    name, says = pieces["norm"]["tensor"].lower(), checkpoint.facts["norm"]
    kinds = [says] if isinstance(says, str) else ["rms"] if "rms" in name else ["layer"] if "layernorm" in name or "layer_norm" in name else ["rms", "layer"]  # fmt: skip
    means = [_arranged(checkpoint, pieces["norm"], i, ("head", "out")).mean() for i in range(checkpoint.small.layers)]
    return [(kind, "w" if float(torch.stack(means).mean()) > 0.5 else "1 + w") for kind in kinds]


def _decays(checkpoint: Checkpoint, pieces: Pieces) -> list[str]:
    """Return the meanings of the decay that its name, the config and its values allow."""
    facts, source = checkpoint.facts, str(checkpoint.folder)
    if "decay" not in pieces:
        if facts["gamma"] is None:
            raise ConfigError(
                f"{source}: no tensor is the decay, and config.json says none: see 'kvpop inspect-checkpoint {source}'"
            )
        return ["constant"]
    name = pieces["decay"]["tensor"].rsplit(".", 1)[-1].lower()
    if name in ("weight", "param"):
        name = pieces["decay"]["tensor"].rsplit(".", 2)[-2].lower()
    by_name = next((kind for hint, kind in (("logit", "logit"), ("alpha", "logit"), ("log", "log"), ("gamma", "gamma")) if hint in name), None)  # fmt: skip
    named = facts["decay"] or by_name
    values = torch.stack([_arranged(checkpoint, pieces["decay"], i, ("head",)) for i in range(checkpoint.small.layers)])
    able = {"logit": True, "log": bool((values <= 0).all()), "gamma": bool(((values > 0) & (values <= 1)).all())}
    if named and not able[named]:
        raise ConfigError(
            f"{source}: {pieces['decay']['tensor']} is called {named}, and its values are none: one of the two is wrong"
        )
    return [named] if named else [kind for kind, fits in able.items() if fits]


def read_map(path: str | Path) -> Reading:
    """Return the reading in a map."""
    return Reading.from_json(read_json(path, "write it with 'kvpop inspect-checkpoint'"), str(path))


def write_map(path: Path, reading: Reading) -> None:
    """Write a reading as a map."""
    write_whole(path, json.dumps(reading.to_json(), indent=2) + "\n")


def reading_of(checkpoint: Checkpoint, map_file: str | Path | None = None) -> Reading:
    """Return the reading in a map, or the only one that fits.

    Raises:
        ConfigError: none fits, or several do.
    """
    if map_file is not None:
        return read_map(map_file)
    if checkpoint.facts.findings:
        raise ConfigError(
            f"{checkpoint.facts.findings[0]}; or give a map (--kv-map), which 'kvpop inspect-checkpoint' writes"
        )
    fitting, folder = readings(checkpoint), checkpoint.folder
    if len(fitting) == 1:
        for line in assumed(checkpoint, fitting[0]):
            _warn_once(line)
        return fitting[0]
    if not fitting:
        raise ConfigError(f"{folder}: {why_none(checkpoint)}: see 'kvpop inspect-checkpoint {folder}'")
    number = f"{len(fitting)}" if len(fitting) < MOST else f"at least {MOST}"
    raise ConfigError(
        f"{folder}: its scorer can be read in {number} ways ({'; '.join(differences(fitting))}): run 'kvpop inspect-checkpoint"
        f" {folder}', mend the {MAP_NAME} that it writes, and give it with --kv-map"
    )


def assumed(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Return a line of what neither the tensors nor the config say about a reading's formula, none if they say all."""
    facts, formula = checkpoint.facts, reading.formula
    names = [name for name in ("feature_map", "gate_softcap", "delayed", "decay_step") if facts[name] is None]
    if formula["decay"] == "logit" and facts["decay_range"] is None:
        names += [name for name in ("decay_min", "decay_max") if facts[name] is None]
    listed = ", ".join(f"{name} {formula[name]}" for name in names)
    return [f"{checkpoint.folder}: assumed, because config.json does not say it: {listed}"] if names else []


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def why_none(checkpoint: Checkpoint) -> str:
    """Return why no reading fits."""
    missing = lacking(stacks(checkpoint.shapes, checkpoint.small, str(checkpoint.folder)), checkpoint.small)
    if missing:
        return f"no tensor of its scorer can be the {missing[0]}"
    return "its scorer's tensors do not make a scorer together, by their names and sizes"


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
    more = f" part {place['part']}" if "part" in place else ""
    for name, words in (("slice", "columns"), ("rows", "rows")):
        more += f", {words} {place[name][0]} to {place[name][1]}" if name in place else ""
    return f"{place['tensor']} as {place['axes'] or 'one number'}{more}"


def describe(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Return a reading in a few lines."""
    lines = [f"{checkpoint.folder}: the scorer is read as"]
    lines += [f"  {piece}: {describe_place(place)}" for piece, place in reading.pieces.items()]
    lines.append("  " + ", ".join(f"{name} {value}" for name, value in reading.formula.items() if value is not None))
    lines.append("  " + ", ".join(f"{name} {value}" for name, value in reading.budget.items()))
    if checkpoint.facts.unread:
        names = ", ".join(sorted(checkpoint.facts.unread)[:12])
        lines.append(f"  not read in config.json: {names}")
    return lines


def load(checkpoint: Checkpoint, reading: Reading) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]]]:
    """Return a checkpoint's scorer config and, per layer, its tensors under the names of our format, float32.

    Raises:
        ConfigError: the map names a tensor that is not there or does not fit, or a number of tokens is unknown.
    """
    source, formula = str(checkpoint.folder), reading.formula
    if unknown := [name for name, number in reading.budget.items() if number is None]:
        raise ConfigError(
            f"{source}: config.json does not say {' and '.join(unknown)}: write a map with 'kvpop inspect-checkpoint {source}', add"
            " them, and give it with --kv-map"
        )
    layers = [_layer(checkpoint, reading, i) for i in range(checkpoint.small.layers)]
    decay = {"step": formula["decay_step"], "min": formula["decay_min"], "max": formula["decay_max"]}
    if formula["decay"] in ("log", "gamma"):
        decay |= _logits(layers, formula["decay"], source)
    elif formula["decay"] == "constant":
        for tensors in layers:
            tensors["decay_logit"] = torch.zeros(checkpoint.small.heads)
    config = make_config(
        checkpoint.sizes,
        "mlstm",
        source=source,
        decay=decay,
        norm="norm" in reading.pieces,
        skip="skip" in reading.pieces,
        **{name: formula[name] for name in ("feature_map", "gate_softcap", "delayed")},
        **reading.budget,
    )
    return config, layers


def _layer(checkpoint: Checkpoint, reading: Reading, layer: int) -> dict[str, torch.Tensor]:
    heads, dim = checkpoint.small.heads, checkpoint.small.dim
    tensors = {PIECES[p][0]: _arranged(checkpoint, place, layer, PIECES[p][1]) for p, place in reading.pieces.items()}
    for name in ("igate.bias", "fgate.bias", "out.bias"):
        tensors.setdefault(name, torch.zeros(heads))
    if reading.formula["norm"] is not None and reading.formula["norm_weight"] == "1 + w":
        tensors["norm.weight"] = 1 + tensors["norm.weight"]
    if reading.formula["inputs"] == "value key":
        for name in ("q_proj", "k_proj", "v_proj", "igate.weight", "fgate.weight", "skip.weight"):
            if name in tensors:
                tensors[name] = tensors[name].roll(dim, 1)
    if reading.formula["norm"] == "layer":  # the readout is linear in the values: centred values give a centred readout
        identity = torch.cat([torch.zeros(dim, dim), torch.eye(dim)]).expand(heads, -1, -1)
        values = tensors.get("v_proj", identity)
        tensors["v_proj"] = values - values.mean(-1, keepdim=True)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _arranged(checkpoint: Checkpoint, place: Mapping, layer: int, axes: tuple[str, ...]) -> torch.Tensor:
    """Return one layer's piece with the given axes, float32."""
    template, sizes = place["tensor"], checkpoint.small
    if "{head}" in template:
        heads = [template.replace("{head}", str(i)) for i in range(sizes.heads)]
        rest = tuple(axis for axis in axes if axis != "head")
        return torch.stack([_one(checkpoint, place, name, layer, rest) for name in heads])
    return _one(checkpoint, place, template, layer, axes)


def _one(checkpoint: Checkpoint, place: Mapping, name: str, layer: int, axes: tuple[str, ...]) -> torch.Tensor:
    stacked = "{layer}" not in name
    name = name.replace("{layer}", str(layer))
    if name not in checkpoint.shapes:
        raise ConfigError(f"{checkpoint.folder} has no tensor {name}, which {MAP_NAME} names: mend the map")
    tensor, sizes = checkpoint.tensor(name), checkpoint.small
    counts = {"layer": sizes.layers, "head": sizes.heads, "in": 2 * sizes.dim}
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", place["axes"])]
    words = [axis for group in groups for axis in group if axis != "1"]
    if "rows" in place:
        if not tensor.dim() or place["rows"][1] > len(tensor):
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[slice(*place["rows"])]
    if len(groups) != tensor.dim():
        raise _misfit(checkpoint, name, tensor, place)
    lengths = []
    for group, length in zip(groups, tensor.shape, strict=True):
        parts = [counts.get(axis, 0) for axis in group if axis != "1"]
        fixed = math.prod(part for part in parts if part)
        if length % fixed or parts.count(0) > 1 or (not parts.count(0) and fixed != length):
            raise _misfit(checkpoint, name, tensor, place)
        lengths += [part or length // fixed for part in parts]
    tensor = tensor.reshape(lengths)
    order = [axis for axis in ("layer", "part", *axes) if axis in words]
    if sorted(order) != sorted(words):
        raise _misfit(checkpoint, name, tensor, place)
    tensor = tensor.permute([words.index(axis) for axis in order])
    if "layer" in words and stacked:
        tensor = tensor[layer]
    if "part" in words:
        if place["part"] >= tensor.shape[0]:
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[place["part"]]
    if "slice" in place:
        first, end = place["slice"]
        if end > tensor.shape[-1]:
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[..., first:end]
    for i, axis in enumerate(axes):  # left out: of length 1, or shared by all heads
        if axis not in words:
            tensor = tensor.unsqueeze(i).expand(
                *tensor.shape[:i], counts["head"] if axis == "head" else 1, *tensor.shape[i:]
            )
    return tensor


def _misfit(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, place: Mapping) -> ConfigError:
    shape = list(checkpoint.shapes[name])
    return ConfigError(
        f"{checkpoint.folder}: tensor {name} is {shape}, which axes {place['axes']!r} do not describe: mend the map"
    )


def _logits(layers: list[dict[str, torch.Tensor]], kind: str, source: str) -> dict[str, float]:
    """Replace decays that are given themselves by logits; return the range of gamma that they are of."""
    raw = torch.stack([tensors["decay_logit"] for tensors in layers]).double()
    if kind == "gamma" and not bool(((raw > 0) & (raw <= 1)).all()):
        raise ConfigError(f"{source}: the decay is said to be gamma, and has values outside 0 to 1: mend the map")
    logs = raw.log() if kind == "gamma" else raw
    if not bool((logs <= 0).all()) or not bool((logs > -20).all()):
        raise ConfigError(f"{source}: the decay is said to be {kind}, and has values that are none: mend the map")
    slack = max(float(logs.max() - logs.min()), 1e-6)
    low, high = float(logs.min()) - slack, min(0.0, float(logs.max()) + slack)
    share = ((logs - low) / (high - low)).clamp(0, 1)
    for tensors, row in zip(layers, share, strict=True):
        tensors["decay_logit"] = torch.logit(row).clamp(-_AT_THE_END, _AT_THE_END).float()
    return {"min": math.exp(low), "max": math.exp(high)}


def read_published(folder: str | Path, map_file: str | Path | None = None, *, pickles: bool = False):
    """Return the config and tensors of a full checkpoint's scorer; see :func:`load`."""
    checkpoint = open_checkpoint(folder, pickles=pickles)
    return load(checkpoint, reading_of(checkpoint, map_file))
