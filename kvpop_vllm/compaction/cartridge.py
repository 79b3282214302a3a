"""Cartridge files, format version 1: a compact KV cache of a corpus, for one base model.

A folder holds ``kvpop_cartridge.json`` and ``kvpop_cartridge.safetensors``. Per layer i the latter has

=====================  ==============  ===================================================================
tensor                 shape           content
=====================  ==============  ===================================================================
``layers.{i}.k``       ``[H, P, D]``   keys, rotated, on the cartridge's own timeline
``layers.{i}.v``       ``[H, P, D]``   values, of the same dtype: float32, float16 or bfloat16
``layers.{i}.bias``    ``[H, P]``      float32, added to the scaled logit of the slot. All layers or none
=====================  ==============  ===================================================================

A request's own tokens go on at ``next_position`` of the cartridge's timeline. To let them go on at P, the keys
are turned by ``P - next_position`` (:func:`turned`) in layers that rotate (:func:`rope_at`). A file that holds a pickle
is never opened.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from safetensors import safe_open

from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import add_file, check_new, read_json
from kvpop_vllm.hub import local_folder
from kvpop_vllm.rope import check_rope, rope_at, rope_of, turned
from kvpop_vllm.schemas import NAME, Rule, Schema, integer
from kvpop_vllm.tensor_files import reading, require_files, write_folder

__all__ = [
    "Cartridge",
    "CartridgeConfig",
    "layer_at",
    "looks_like_cartridge",
    "read_cartridge",
    "read_config",
    "rope_at",
    "rope_of",
    "turned",
    "write_cartridge",
]

SCHEMA = Schema(
    "cartridge", "{name} is {value!r}, not {rule}", "there is no {name!r}", advice=": write the cartridge again"
)
CONFIG_NAME = "kvpop_cartridge.json"
TENSORS_NAME = "kvpop_cartridge.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of keys and values, by their names in a safetensors file."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Suffixes of files that hold pickles."""
MAX_POSITION = 2**31 - 1
"""Largest position, because positions are int32 in the pages."""

MODEL_RULES = {"model_type": NAME, **{name: integer(1, 1 << 14) for name in ("num_layers", "num_kv_heads", "head_dim")}}
"""Rules of the fields for the base model."""
RULES = MODEL_RULES | {"method": NAME, "slots": integer(1), "next_position": integer(0, MAX_POSITION)}
"""Rules of single fields of a cartridge's config."""

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys ``[H, P, D]``, values ``[H, P, D]`` and biases ``[H, P]`` or None."""


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """Config of a file that was made for one base model.

    Attributes:
        schema: format of the file.
        rules: rules of single values.
        optional: keys that a file may lack.
        model_type: model type of the base model.
        num_layers: layers of the base model.
        num_kv_heads: H.
        head_dim: D.
        rope: rope parameters of the base model, see :func:`rope_of`.
        base: digests of the base model, see :func:`kvpop_vllm.compaction.base_model.base_digests`.
        provenance: further JSON.
    """

    schema: ClassVar[Schema]
    rules: ClassVar[dict[str, Rule]]
    optional: ClassVar[tuple[str, ...]] = ()

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: dict
    base: dict
    provenance: dict

    @classmethod
    def from_dict(cls, raw: object, source: str) -> Self:
        """Return the checked config of a decoded file. ``source`` names it in errors."""
        values = cls.schema.body(raw, source)
        cls.schema.check_keys(values, [key.name for key in fields(cls)], cls.optional, source)
        config = cls(**values)
        config.check(source)
        return config

    def to_dict(self) -> dict:
        """Return the contents of the file, after a check."""
        self.check(f"this {self.schema.kind}")
        return self.schema.header | asdict(self)

    def check(self, source: str) -> None:
        """Check all values."""
        self.schema.check(vars(self), self.rules, source)
        check_rope(self.rope, source)
        if not isinstance(self.base, Mapping) or set(self.base) != {"config", "weights"}:
            raise ConfigError(f"{source}: base must hold the digests config and weights{self.schema.advice}")
        if not all(isinstance(digest, str | None) for digest in self.base.values()):
            raise ConfigError(f"{source}: the digests of base must be text{self.schema.advice}")
        if not isinstance(self.provenance, Mapping):
            raise ConfigError(f"{source}: provenance must be an object{self.schema.advice}")


@dataclass(frozen=True, kw_only=True)
class CartridgeConfig(MadeFor):
    """Contents of ``kvpop_cartridge.json``.

    Attributes:
        slots: P, a multiple of 64.
        next_position: position of the first own token on the cartridge's timeline.
        method: how the cartridge was made.
        head: token ids with which the slots begin. A request's prompt begins with them too, and its own tokens are
            those after them. Empty if own tokens are the whole prompt.
    """

    schema = SCHEMA
    rules = RULES
    optional = ("head",)

    slots: int
    next_position: int
    method: str
    head: list = field(default_factory=list)

    def check(self, source: str) -> None:
        """Check all values. See :meth:`MadeFor.check`."""
        super().check(source)
        if self.slots % BLOCK_SLOTS:
            raise ConfigError(
                f"{source}: {self.slots} slots are not a multiple of {BLOCK_SLOTS}: pad with slots of bias -1e30"
            )
        if not isinstance(self.head, list) or not all(type(token) is int and token >= 0 for token in self.head):
            raise ConfigError(f"{source}: head must be a list of token ids{SCHEMA.advice}")
        if len(self.head) > self.next_position:
            raise ConfigError(f"{source}: head has more tokens than next_position: write the cartridge again")


class Cartridge(NamedTuple):
    """A cartridge in memory.

    Attributes:
        config: its config.
        layers: keys, values and biases of every layer.
        digest: sha256 of its two files.
    """

    config: CartridgeConfig
    layers: list[Layer]
    digest: str


def layer_at(
    config: CartridgeConfig, index: int, layer: Layer, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a layer's slots for the positions from ``first`` on, float32. Own tokens go on after them.

    Args:
        config: the cartridge's.
        index: index of the layer.
        layer: keys, values and biases of some of its heads.
        first: position of the first slot.

    Returns:
        Keys and values ``[H, P, D]``, and biases ``[H, P]``, 0 where there are none.
    """
    k, v, bias = layer
    # own tokens follow the slots, at first + P
    k = turned(k.float(), first + config.slots - config.next_position, rope_at(config.rope, index))
    return k, v.float(), torch.zeros(k.shape[:2]) if bias is None else bias


def looks_like_cartridge(folder: str | Path) -> bool:
    """Return whether a folder has the config of a cartridge."""
    return (Path(folder) / CONFIG_NAME).is_file()


def read_config(folder: str | Path) -> CartridgeConfig:
    """Read and check ``kvpop_cartridge.json``."""
    folder = local_folder(folder)
    path = folder / CONFIG_NAME
    if not path.is_file():
        _refuse_pickle(folder)
        require_files(folder, CONFIG_NAME, kind="cartridge", advice="give a folder that 'kvpop compact' wrote")
    return CartridgeConfig.from_dict(read_json(path, "write the cartridge again"), str(path))


def _refuse_pickle(folder: Path) -> None:
    """Raise a ConfigError if a path is a pickle, or a folder with one."""
    files = [folder] if folder.is_file() else sorted(folder.iterdir()) if folder.is_dir() else []
    for path in files:
        if path.suffix in PICKLES:
            raise ConfigError(f"{path} is a pickle, which could run code: convert it with 'kvpop import {path} DIR'")


def read_cartridge(folder: str | Path) -> Cartridge:
    """Read and check a cartridge. Nothing is loaded before names, shapes and dtypes are right."""
    folder = local_folder(folder)
    config, path = read_config(folder), folder / TENSORS_NAME
    if not path.is_file():
        _refuse_pickle(path.parent)
        require_files(folder, TENSORS_NAME, kind="cartridge", advice="copy the whole folder")
    with reading(path), safe_open(path, "pt") as file:
        headers = {name: file.get_slice(name) for name in file.keys()}
        tensors = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        names = _check_headers(config, tensors, str(path))
        # a layer without biases has None for their name, and keeps it
        layers = [tuple(name and file.get_tensor(name) for name in layer) for layer in names]
    _check_values(layers, str(path))
    return Cartridge(config, layers, digest_of(folder, CONFIG_NAME, TENSORS_NAME))


def _check_headers(config: CartridgeConfig, headers: dict, source: str) -> list[tuple[str, str, str | None]]:
    """Check names, shapes and dtypes, and return the names of each layer's keys, values and biases."""
    size = (config.num_kv_heads, config.slots, config.head_dim)
    biased = "layers.0.bias" in headers
    names, dtype = [], None
    for i in range(config.num_layers):
        for part, shape in {"k": size, "v": size, **({"bias": size[:2]} if biased else {})}.items():
            name = f"layers.{i}.{part}"
            if name not in headers:
                raise ConfigError(f"{source}: tensor {name} is missing: write the cartridge again")
            actual_shape, kind = headers[name]
            if actual_shape != shape:
                raise ConfigError(
                    f"{source}: tensor {name} has shape {actual_shape}, expected {shape}: write the cartridge again"
                )
            # the first tensor's dtype is that of all keys and values
            dtype = dtype or kind
            allowed = ("F32",) if part == "bias" else tuple(DTYPES) if kind == dtype else (dtype,)
            if kind not in allowed:
                raise ConfigError(
                    f"{source}: tensor {name} has dtype {kind}, expected {' or '.join(allowed)}: write the cartridge again"
                )
        names.append((f"layers.{i}.k", f"layers.{i}.v", f"layers.{i}.bias" if biased else None))
    if unknown := sorted(set(headers) - {name for layer_names in names for name in layer_names}):
        raise ConfigError(f"{source}: unexpected tensor {unknown[0]!r}: write the cartridge again")
    return names


def _check_values(layers: Sequence[Layer], source: str) -> None:
    """Raise a ConfigError that names the first tensor with values that are not finite."""
    for i, layer in enumerate(layers):
        for part, tensor in zip(("k", "v", "bias"), layer, strict=True):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise ConfigError(f"{source}: tensor layers.{i}.{part} holds NaN or infinity: make the cartridge again")


def digest_of(folder: Path, *names: str) -> str:
    """Return the sha256 of these files in a folder, with their sizes."""
    digest = hashlib.sha256()
    for name in names:
        # sizes too, so that bytes cannot move from one file to the next unseen
        digest.update((folder / name).stat().st_size.to_bytes(8, "little"))
        add_file(digest, folder / name)
    return digest.hexdigest()


def write_cartridge(folder: str | Path, config: CartridgeConfig, layers: Sequence[Layer]) -> None:
    """Check a cartridge and write its folder, whole or not at all.

    Raises:
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    check_new(folder)
    named = {
        f"layers.{i}.{part}": tensor.detach().cpu().contiguous()
        for i, layer in enumerate(layers)
        for part, tensor in zip(("k", "v", "bias"), layer, strict=True)
        if tensor is not None
    }
    codes = {dtype: code for code, dtype in DTYPES.items()}
    headers = {
        name: (tuple(tensor.shape), codes.get(tensor.dtype, str(tensor.dtype))) for name, tensor in named.items()
    }
    content = config.to_dict()
    _check_headers(config, headers, str(folder))
    _check_values(layers, str(folder))
    write_folder(folder, CONFIG_NAME, content, TENSORS_NAME, named)
