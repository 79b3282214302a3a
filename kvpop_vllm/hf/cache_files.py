"""Files of a KVpopCache, format version 1: what it holds of its texts, to go on from later.

A folder holds ``kvpop_cache.json`` and ``kvpop_cache.safetensors``. The latter has

==============================  ======================  ==========================================================
tensor                          shape                   content
==============================  ======================  ==========================================================
``text``                        ``[R, L]`` int64        ids of :attr:`KVpopCache.text`, if there are any
``layers.{i}.tail``             ``[R, P, H, N * C]``    blocks of each row's tail, state included, in layer i of
                                uint8                   those that the policy acts on
``layers.{i}.prefix``           ``[R, Q, H, N * C]``    blocks of each row's protected tokens, without cartridges
                                uint8
``local.{i}.k``                 ``[R, H, W, D]``        keys of layer i of the model, which has windows or chunks
``local.{i}.v``                 ``[R, H, W, D]``        its values
``recurrent.{i}.convolution``   as in transformers      state of the convolution of layer i of the model
``recurrent.{i}.state``         as in transformers      recurrent state
==============================  ======================  ==========================================================

Scorers, calibrations and cartridges are named in the config, and not copied. Digests show whether they, the model
and the files are the same as when the cache was saved.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.hf.digests import digest_of
from kvpop_vllm.schemas import NAME, Rule, Schema, integer, one_of, optional
from kvpop_vllm.tensor_files import reading, require_files

SCHEMA = Schema("cache", advice=": save the cache again")
CONFIG_NAME, TENSORS_NAME = "kvpop_cache.json", "kvpop_cache.safetensors"
PATHS = "scorer", "map", "calibration", "cartridge"
"""Settings that name files, which may be elsewhere when a cache is loaded."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
COUNTS: Rule = (
    lambda value: isinstance(value, list) and len(value) > 0 and all(type(x) is int and 0 <= x < 2**31 for x in value),
    "a list of numbers of tokens",
)
SCALES: Rule = (lambda value: isinstance(value, list) and all(type(x) is float for x in value), "a list of numbers")
RULES = {
    "settings": OBJECT,
    "model": OBJECT,
    "dtype": NAME,
    "weights": optional(NAME),
    "roles": OBJECT,
    "policy": NAME,
    "columns": integer(1, 2**31 - 1),
    "passes": integer(1, 2**62),
    "lengths": COUNTS,
    "protected": COUNTS,
    "prefixes": COUNTS,
    "kv_dtype": one_of(DTYPES),
    "scales": SCALES,
    "digest": NAME,
}
"""Rules of the keys of a config."""


class SavedTensors:
    """Tensors of a saved cache that are taken one by one.

    Args:
        tensors: the tensors by name.
        rows: R.
        source: name of the folder in errors.

    Attributes:
        remaining: those that were not taken yet.
        source: as above.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], rows: int, source: str):
        self.remaining, self.rows, self.source = dict(tensors), rows, source

    def take(self, name: str, size: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of R rows.

        Args:
            name: its name.
            size: its shape, or None for any.
            dtype: its dtype, or None for any.
        """
        tensor = self.remaining.pop(name, torch.empty(0))
        expected = (self.rows, *tensor.shape[1:]) if size is None else tuple(size), dtype or tensor.dtype
        if (tuple(tensor.shape), tensor.dtype) != expected:
            raise ConfigError(
                f"{self.source}: tensor {name} is missing or of another shape than {expected[0]}: save the cache again"
            )
        return tensor

    def check_taken(self) -> None:
        """Check that no tensor is left."""
        if self.remaining:
            raise ConfigError(f"{self.source}: unexpected tensor {min(self.remaining)!r}: save the cache again")


def read(folder: str | PathLike) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the config and the tensors of a saved cache, after checks that need no model."""
    folder = Path(folder)
    config, path = folder / CONFIG_NAME, folder / TENSORS_NAME
    require_files(folder, CONFIG_NAME, TENSORS_NAME, kind="saved cache", advice="give a folder that save() wrote")
    saved = SCHEMA.body(read_json(config, "save the cache again"), str(config))
    SCHEMA.check_keys(saved, RULES, (), str(config))
    SCHEMA.check(saved, RULES, str(config))
    with reading(path), safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    digest = saved.pop("digest")
    if digest_of([saved, tensors]) != digest:
        raise ConfigError(f"{folder} is damaged, or its files are not of one cache: copy or save it again")
    return saved, tensors


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a cache as JSON has them. Folders that exist get their whole path."""

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, PathLike) or (name in PATHS and isinstance(value, str)):
            path = Path(value)
            return str(path.resolve()) if path.exists() else str(value)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [value_of(name, entry) for entry in value]
        return value

    return {name: value_of(name, value) for name, value in settings.items()}


def settings_to_load(saved: Mapping, arguments: Mapping, source: str) -> dict[str, Any]:
    """Return the arguments of a cache to load.

    Args:
        saved: arguments of the saved cache.
        arguments: arguments of the caller.
        source: name of the folder in errors.
    """
    for name, value in plain(arguments).items():
        if name in saved and name not in PATHS and value != saved[name]:
            raise ConfigError(f"{source} was saved with {name} = {saved[name]!r}, not {value!r}: leave {name} out")
    return {**saved, **arguments}
