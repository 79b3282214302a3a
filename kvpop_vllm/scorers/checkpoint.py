"""Scorer files, format version 1, and the table of tensor names in full checkpoints.

An adapter folder holds ``kvpop_config.json`` and ``kvpop_scorer.safetensors`` with tensors
``layers.{i}.<name>``. A full checkpoint holds the same config as section ``kvpop`` of its ``config.json``,
and the same tensors under ``model.layers.{i}.self_attn.kvpop.<name>``, in the model's own files. Full checkpoints of
other authors are read by :mod:`kvpop_vllm.scorers.reader`.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json, write_whole
from kvpop_vllm.hub import local_folder
from kvpop_vllm.schemas import check_same_model
from kvpop_vllm.scorers import ScorerConfig, parse_config
from kvpop_vllm.scorers.kvzap_folder import is_kvzap, read_kvzap_config, read_kvzap_tensors
from kvpop_vllm.scorers.published_checkpoint import INDEX, MODEL_NAMES, is_published
from kvpop_vllm.scorers.reader import read_published
from kvpop_vllm.scorers.scorer_config import SCHEMA
from kvpop_vllm.tensor_files import reading, require_files, write_files

CONFIG_NAME = "kvpop_config.json"
TENSORS_NAME = "kvpop_scorer.safetensors"
MODEL_CONFIG, SECTION = "config.json", "kvpop"
T = TypeVar("T")

FULL_CHECKPOINT_NAMES = (
    (re.compile(r"^(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]*)\.self_attn\.kvpop\.(?P<name>.+)$"), "{name}"),
    (re.compile(r"^(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]*)\.self_attn\.retention_gate\.(?P<name>.+)$"), "{name}"),
)
"""Known tensor-name layouts of full checkpoints: that of this package and that of TRIM-KV's authors.

A row is (pattern with groups ``layer`` and ``name``, tensor name in the scorer format). The second column may
use every group of the pattern. Another published layout needs one more row.
"""


def check_shapes(config: ScorerConfig, layers: list[dict[str, tuple[int, ...]]], source: str) -> None:
    """Check that every layer has exactly the tensors that its config requires, with consistent sizes.

    Args:
        config: scorer config.
        layers: per layer, name -> shape.
        source: name of the file in errors.
    """
    sizes: dict[str, int] = {}
    shapes = config.shapes(layers[0])
    for i, layer in enumerate(layers):
        if unknown := sorted(set(layer) - set(shapes)):
            raise ConfigError(
                f"{source}: tensor layers.{i}.{unknown[0]} does not belong to this {config.scorer} scorer"
            )
        for name, shape in shapes.items():
            if name not in layer:
                raise ConfigError(f"{source}: tensor layers.{i}.{name} is missing")
            _check_shape(f"{source}: tensor layers.{i}.{name}", tuple(layer[name]), shape, sizes)


def _check_shape(label: str, actual: tuple[int, ...], shape: tuple, sizes: dict[str, int]) -> None:
    if len(actual) == len(shape):
        for axis, length in zip(shape, actual, strict=True):
            # a named axis has the size that its first tensor shows
            if isinstance(axis, str):
                sizes.setdefault(axis, length)
    # letters of sizes that no tensor has shown yet stay letters
    expected = tuple(sizes.get(axis, axis) for axis in shape)
    if actual != expected:
        raise ConfigError(f"{label} has shape {actual}, expected {expected}")
    if 0 in actual:
        raise ConfigError(f"{label} has shape {actual}: no size may be 0")


def check_tensors(config: ScorerConfig, layers: list[dict[str, torch.Tensor]], source: str) -> None:
    """Check shapes as :func:`check_shapes` does, and that every tensor is floating point and finite."""
    check_shapes(config, [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in layers], source)
    for i, tensors in enumerate(layers):
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ConfigError(
                    f"{source}: tensor layers.{i}.{name} holds values that are not finite floating-point numbers"
                )


def is_full_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder without a ``kvpop_config.json`` is a model whose config has a section of this package."""
    folder = Path(folder)
    if (folder / CONFIG_NAME).is_file() or not (folder / MODEL_CONFIG).is_file():
        return False
    config = read_json(folder / MODEL_CONFIG, "write the model again")
    return isinstance(config, dict) and SECTION in config and not is_published(folder)


def is_published_scorer(folder: str | Path) -> bool:
    """Return whether a scorer's folder without a ``kvpop_config.json`` of ours is a full checkpoint of other authors."""
    if not is_published(folder):
        return False
    path = Path(folder) / CONFIG_NAME
    config = read_json(path, "write the scorer again") if path.is_file() else None
    # authors of checkpoints call their files by the same name
    return not isinstance(config, dict) or config.get("format") != SCHEMA.header["format"]


def read_config(folder: str | Path, map_file: str | None = None) -> ScorerConfig:
    """Return the config of a scorer. See :func:`read_scorer`."""
    path = local_folder(folder)
    if is_published_scorer(path):
        return read_published(path, map_file)[0]
    if map_file is not None:
        raise ConfigError(f"--kv-map is for full checkpoints of other authors, and {folder} is none: leave it out")
    if is_full_checkpoint(path):
        path = path / MODEL_CONFIG
        return parse_config(read_json(path, "write the model again")[SECTION], f"{path}, section {SECTION}")
    if not (path / CONFIG_NAME).is_file():
        if is_kvzap(path):
            return read_kvzap_config(path)
        advice = "point --kv-scorer at a folder written by 'kvpop init-scorer'"
        require_files(folder, CONFIG_NAME, kind="scorer", advice=advice)
    return parse_config(read_json(path / CONFIG_NAME, "write the scorer again"), str(path / CONFIG_NAME))


def write_shares(folder: str | Path, shares: Sequence[Sequence[float]]) -> None:
    """Write shares ``[layers][H]`` of heads, or none, into the config of a scorer's folder or of a full checkpoint.

    Raises:
        OSError: the file cannot be written.
    """
    config = read_config(folder)
    # through the parser, which checks the shares
    content = parse_config(config.to_json() | {"shares": [list(row) for row in shares]}, str(folder)).to_json()
    path = Path(folder) / CONFIG_NAME
    if is_full_checkpoint(folder):
        path = Path(folder) / MODEL_CONFIG
        content = read_json(path, "write the model again") | {SECTION: content}
    write_whole(path, json.dumps(content, indent=2) + "\n")


def read_scorer(folder: str | Path, map_file: str | None = None) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]]]:
    """Return the config of a scorer and, per layer, its tensors (float32).

    Args:
        folder: scorer folder, folder of a full checkpoint, also of other authors, of published gates of KVzap, or a
            name of the hub.
        map_file: how to read one of other authors, by default the only reading that fits.
    """
    path = local_folder(folder)
    if is_published_scorer(path):
        config, layers = read_published(path, map_file)
        check_tensors(config, layers, str(path))
        return config, layers
    config = read_config(path, map_file)
    if is_full_checkpoint(path):
        return config, layers_of(config, read_tensors(path, looks_like_scorer), str(path))
    if not (path / CONFIG_NAME).is_file():  # published gates of KVzap
        tensors = read_kvzap_tensors(path)
    else:
        path = path / TENSORS_NAME
        if not path.is_file():
            raise ConfigError(f"no scorer at {str(folder)!r}: {TENSORS_NAME} is missing")
        with reading(path):
            tensors = load_file(path)
    layers = split_layers(config, tensors.items(), str(path))
    check_tensors(config, layers, str(path))
    return config, layers


def files_of(folder: str | Path) -> tuple:
    """Return the folder of a scorer, and the names of files in it that tell it from others, first its config."""
    path = local_folder(folder)
    if is_published_scorer(path):  # its weights are too many to be read for this
        return path, *(name for name in (MODEL_CONFIG, INDEX) if (path / name).is_file())
    if not (path / CONFIG_NAME).is_file():  # a full checkpoint, or published gates of KVzap
        return path, MODEL_CONFIG, *sorted(file.name for file in path.glob("*.safetensors"))
    return path, CONFIG_NAME, TENSORS_NAME


def split_layers(config: ScorerConfig, tensors: Iterable[tuple[str, T]], source: str) -> list[dict[str, T]]:
    """Return tensors named ``layers.{i}.<name>`` (or their shapes) as one dict per layer.

    Floating-point tensors are converted to float32.
    """
    layers: list[dict[str, T]] = [{} for _ in range(config.num_layers)]
    for name, tensor in tensors:
        # no leading zeros, so that a layer has one spelling
        match = re.match(r"^layers\.(0|[1-9][0-9]{0,8})\.(.+)$", name)
        if match is None or int(match[1]) >= config.num_layers:
            raise ConfigError(f"{source}: unexpected tensor {name!r}")
        # both layouts at once would leave open which tensor counts
        if match[2] in layers[int(match[1])]:
            raise ConfigError(f"{source}: tensor {name!r} is there under two names")
        # tensors may be shapes instead
        floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        layers[int(match[1])][match[2]] = tensor.float() if floating else tensor
    return layers


def write_scorer(folder: str | Path, config: ScorerConfig, layers: list[dict[str, torch.Tensor]]) -> None:
    """Check tensors and write them as an adapter folder, float32.

    Each file appears complete or not at all. The config is written last: a folder without it holds no scorer.

    Raises:
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    check_tensors(config, layers, str(folder))
    flat = {
        f"layers.{i}.{name}": t.detach().to(torch.float32, copy=True).contiguous()  # tied tensors share memory
        for i, layer in enumerate(layers)
        for name, t in layer.items()
    }
    write_files(folder, CONFIG_NAME, config.to_json(), TENSORS_NAME, flat)


def read_tensors(folder: str | Path, selects: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's safetensors files whose names are wanted."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with reading(path), safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if selects(name)}
    return tensors


def full_checkpoint_name(name: str) -> str | None:
    """Return ``layers.{i}.<name>`` for a full checkpoint's scorer tensor, or None if no layout matches."""
    for pattern, target in FULL_CHECKPOINT_NAMES:
        if match := pattern.match(name):
            return f"layers.{match['layer']}.{target.format(**match.groupdict())}"
    return None


def full_checkpoint_target(layer: int, name: str) -> str:
    """Return the name of ``layers.{layer}.<name>`` in a full checkpoint written by this package."""
    return f"model.layers.{layer}.self_attn.kvpop.{name}"


def looks_like_scorer(name: str) -> bool:
    """Return whether a tensor of a full checkpoint belongs to a scorer, in a known or an unknown layout."""
    return full_checkpoint_name(name) is not None or "kvpop" in name.lower()


def check_layout(names: Iterable[str], source: str) -> None:
    """Check that a full checkpoint has scorer tensors, all under names of a known layout."""
    names = list(names)
    unknown = [n for n in names if looks_like_scorer(n) and full_checkpoint_name(n) is None]
    if not unknown and any(full_checkpoint_name(n) for n in names):
        return
    listed = unknown or [n for n in names if not MODEL_NAMES.match(n)]
    # numbers of layers say nothing here, and one name stands for all of them
    listed = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "{i}", n) for n in listed})
    raise ConfigError(
        f"{source}: scorer tensors must be named model.layers.{{i}}.self_attn.kvpop.<name>; names found that are neither "
        f"theirs nor the model's own: {', '.join(listed) or 'none'}; give --kv-scorer DIR, or add this layout to "
        "FULL_CHECKPOINT_NAMES in kvpop_vllm/scorers/checkpoint.py"
    )


def layers_of(
    config: ScorerConfig, tensors: Mapping[str, T], source: str, check: Callable = check_tensors
) -> list[dict[str, T]]:
    """Return the scorer tensors of a full checkpoint (or their shapes) as one dict per layer.

    Args:
        config: scorer config.
        tensors: by their names in the checkpoint. The model's own are left out.
        source: names the checkpoint in errors.
        check: :func:`check_tensors`, or :func:`check_shapes` for shapes.
    """
    check_layout(tensors, source)
    named = ((full_checkpoint_name(name), value) for name, value in tensors.items())
    layers = split_layers(config, ((name, value) for name, value in named if name), source)
    check(config, layers, source)
    return layers


def check_model(config: ScorerConfig, *, source: str, **model) -> None:
    """Check that a scorer was made for the model of the given sizes. ``source`` names the scorer in errors.

    What the scorer's config does not say is not compared.
    """
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "hidden_size", "layers")
    # what a config leaves out or null says nothing about the model
    made_for = {name: size for name in names if (size := getattr(config, name, None)) is not None}
    check_same_model(made_for, {"layers": ()} | model, source, "give a scorer for this model with --kv-scorer")
