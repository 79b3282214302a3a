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

Scorers, calibrations and cartridges are named in the config, and not copied. Digests tell whether they, the model and
the files are those of then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import check_new, read_json
from kvpop_vllm.hf.checks import check_model
from kvpop_vllm.hf.local_layers import LocalLayer
from kvpop_vllm.model_hook import decoder_of
from kvpop_vllm.model_shape import rope_of, shape_of
from kvpop_vllm.schemas import NAME, Rule, Schema, check_same_model, integer, one_of, optional
from kvpop_vllm.supported import HYBRID, LOCAL_LAYERS, RECURRENT, local_size
from kvpop_vllm.tensor_files import reading, write_folder

SCHEMA = Schema("cache", advice=": save the cache again")
CONFIG_NAME, TENSORS_NAME = "kvpop_cache.json", "kvpop_cache.safetensors"
PATHS = "scorer", "map", "calibration", "cartridge"
"""Settings that name files, which may be elsewhere when a cache is loaded."""
SAMPLES = 64
"""Fewest values of each larger weight that the digest of a model covers."""
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


class SavedCache:
    """Methods of a :class:`kvpop_vllm.hf.KVpopCache` that write and read its files."""

    def save(self, folder: str | PathLike) -> None:
        """Write what the cache holds to a new folder, from which :meth:`load` goes on.

        The folder holds as many bytes as the cache, the ids of its texts among them. It is written whole or not at all.

        Raises:
            ConfigError: the folder holds something already.
            RuntimeError: the cache is empty, in a pass or broken off, its model is gone, or a CUDA graph was replayed
                without :meth:`replayed`.
            OSError: a file cannot be written.
        """
        self._check_at_rest()
        check_new(folder)
        decoder = self._decoder()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors()}
        clock = next(iter(self._lengths_by_device.values()))
        config = {
            "settings": self.settings,
            "model": model_properties(decoder.config),
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "weights": weights_digest(decoder),
            "roles": self._roles(),
            "policy": self._policy_digest(),
            "columns": self._columns,
            "passes": self.passes,
            "lengths": self._lengths,
            "protected": self.protected,
            "prefixes": [record.prefix for record in clock.requests],
            "kv_dtype": str(self._layers[0].pages.layout.dtype).removeprefix("torch."),
            "scales": [float(self._layers[i].attention.scale) for i in range(len(self))],
        }
        config = json.loads(json.dumps(config))
        config["digest"] = digest_of([config, tensors])
        write_folder(Path(folder), CONFIG_NAME, SCHEMA.header | config, TENSORS_NAME, tensors)

    @classmethod
    def load(
        cls,
        folder: str | PathLike,
        model: torch.nn.Module,
        *,
        device: torch.device | str | None = None,
        **settings,
    ) -> Self:
        """Return a new cache that goes on where the saved one was. The folder is left as it is.

        Args:
            folder: folder that :meth:`save` wrote.
            model: the model that the cache was saved with.
            device: as of :class:`kvpop_vllm.hf.KVpopCache`.
            settings: further arguments of :class:`kvpop_vllm.hf.KVpopCache`. Folders of scorers, calibrations and
                cartridges may be elsewhere than when the cache was saved; other arguments must be those of then.

        Raises:
            ConfigError: the folder is none that :meth:`save` wrote, or damaged; or the model, its dtype, the policy or a
                setting is another one.
        """
        saved, tensors = read(folder)
        check_model(model, saved["settings"].get("max_length"))
        _check_saved_with(saved, decoder_of(model), str(folder))
        cache = cls(model, device=device, **_settings(saved["settings"], settings, str(folder)))
        cache._check_saved_policy(saved, str(folder))
        cache._check_sizes(saved, tensors, str(folder))
        with torch.inference_mode(False), torch.no_grad():
            cache._take(saved, SavedTensors(tensors, len(saved["lengths"]), str(folder)))
        return cache

    def _check_at_rest(self) -> None:
        """Check that the cache holds something, and that the host knows what.

        Raises:
            RuntimeError: it does not.
        """
        if not self._lengths or self._broken or self.attended is not None:
            raise RuntimeError(
                "a KVpopCache that is empty, or broken off in a pass, cannot be saved: begin with a prompt"
            )
        if self._decoder() is None:
            raise RuntimeError("the model of this KVpopCache is gone: save() the cache before the model is deleted")
        if any(clock.positions.tolist() != self._lengths for clock in self._lengths_by_device.values()):
            raise RuntimeError("a CUDA graph was replayed with this KVpopCache: call replayed() before save()")

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield what the cache holds, by name."""
        if self.text is not None:
            yield "text", self.text
        for i in range(len(self)):
            layer = self._layers[i]
            for name, table in layer.tables(self._made.count, self._prefix_tokens()).items():
                yield f"layers.{i}.{name}", layer.pages.raw[table]
        for i, layer in self._local.items():
            yield from ((f"local.{i}.k", layer.k), (f"local.{i}.v", layer.v))
        for i, layer in enumerate(self.layers):
            if layer.has_previous_state[0]:
                yield f"recurrent.{i}.convolution", layer.conv_states[0]
                yield f"recurrent.{i}.state", layer.recurrent_states[0]

    def _prefix_tokens(self) -> int:
        """Return the number of protected tokens of the row that holds the most."""
        return max(map(min, self.protected, self._lengths))

    def _roles(self) -> dict[str, int]:
        """Return the roles of the slots of a row with the largest budget."""
        retention = self.policy.retention
        return {name: getattr(retention, name) for name in ("budget", "sinks", "window")}

    def _policy_digest(self) -> str:
        """Return a digest of all that decides which tokens are held: rules, gates, shares, and what cartridges hold."""
        rules = [self.policy.layer_rule(i, self._heads) for i in range(len(self))]
        return digest_of([rules, self.gates, self._budgets, self._made])

    def _check_saved_policy(self, saved: Mapping, source: str) -> None:
        """Check that the policy is the one of a saved cache.

        Raises:
            ConfigError: it is another one.
        """
        for name, value in self._roles().items():
            if saved["roles"].get(name) != value:
                raise ConfigError(
                    f"{source} was saved with {name} {saved['roles'].get(name)}, and its scorer or calibration gives {value} now:"
                    " give the one of then"
                )
        if saved["policy"] != self._policy_digest():
            raise ConfigError(
                f"{source} was saved with another scorer, map, calibration or cartridge than the one that is there now: give the one"
                " of then"
            )

    def _check_sizes(self, saved: Mapping, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Check that a file is as large as the pages that will be allocated.

        Raises:
            ConfigError: it is not.
        """
        shape, rows = self.policy.model, len(saved["lengths"])
        counts = [len(saved[name]) for name in ("protected", "prefixes", "scales")]
        if counts != [rows, rows, len(self)]:
            raise ConfigError(f"{source} has numbers of other rows or layers than the cache: save the cache again")
        prefix = max(map(min, saved["protected"], saved["lengths"])) - self._made.count
        slots = rows * shape.num_layers * shape.num_kv_heads * (self.policy.retention.budget + prefix)
        if slots * 2 * shape.head_dim > sum(tensor.nbytes for tensor in tensors.values()):
            raise ConfigError(f"{source} has fewer slots than the cache: save the cache again")
        self._rows.check_number(rows)

    def _take(self, saved: Mapping, tensors: SavedTensors) -> None:
        """Hold what a saved cache held.

        Raises:
            ConfigError: a tensor is missing, unknown or has another shape.
        """
        self._columns, self.passes = saved["columns"], saved["passes"]
        self._lengths, self.protected = saved["lengths"], saved["protected"]
        self.text = tensors.take("text") if "text" in tensors.remaining else None
        layers, shape = self._decoder().layers, self.policy.model
        for i, index in enumerate(shape.layers or range(len(self))):
            like = torch.empty(
                (len(self._lengths), shape.num_kv_heads, 0, shape.head_dim),
                dtype=DTYPES[saved["kv_dtype"]],
                device=self.device or device_of(layers[index]),
            )
            layer = self._new_layer(i, like, saved["scales"][i])
            layer.protect(self._prefix_tokens())
            for name, table in layer.tables(self._made.count, self._prefix_tokens()).items():
                size = *table.shape, *layer.pages.raw.shape[1:]
                layer.pages.raw[table] = tensors.take(f"layers.{i}.{name}", size, torch.uint8).to(like.device)
            layer.check_filled(tensors.source)
        for clock in self._lengths_by_device.values():
            clock.requests = [
                record._replace(prefix=p) for record, p in zip(clock.requests, saved["prefixes"], strict=True)
            ]
        for index, kind in enumerate(shape.kinds):
            if kind in LOCAL_LAYERS:
                self._local[index] = local = LocalLayer(local_size(self._decoder().config, kind))
                local.k, local.v = (tensors.take(f"local.{index}.{name}").to(device_of(layers[index])) for name in "kv")
            if kind in (RECURRENT, HYBRID):
                states = [tensors.take(f"recurrent.{index}.{name}") for name in ("convolution", "state")]
                convolution, state = (state.to(device_of(layers[index])) for state in states)
                self.layers[index].update_conv_state(convolution)
                self.layers[index].update_recurrent_state(state)
        tensors.check_taken()


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

        Raises:
            ConfigError: it is missing, or another one.
        """
        tensor = self.remaining.pop(name, torch.empty(0))
        expected = (self.rows, *tensor.shape[1:]) if size is None else tuple(size), dtype or tensor.dtype
        if (tuple(tensor.shape), tensor.dtype) != expected:
            raise ConfigError(
                f"{self.source}: tensor {name} is missing or of another shape than {expected[0]}: save the cache again"
            )
        return tensor

    def check_taken(self) -> None:
        """Check that no tensor is left.

        Raises:
            ConfigError: names the first one.
        """
        if self.remaining:
            raise ConfigError(f"{self.source}: unexpected tensor {min(self.remaining)!r}: save the cache again")


def read(folder: str | PathLike) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the config and the tensors of a saved cache, after checks that need no model.

    Raises:
        ConfigError: there is none, or its files are damaged or of another format.
    """
    folder = Path(folder)
    config, path = folder / CONFIG_NAME, folder / TENSORS_NAME
    for file in (config, path):
        if not file.is_file():
            raise ConfigError(
                f"no saved cache at {str(folder)!r}: {file.name} is missing; give a folder that save() wrote"
            )
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
    """Return arguments of a cache as JSON has them; folders that exist get their whole path."""

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, PathLike) or (name in PATHS and isinstance(value, str)):
            path = Path(value)
            return str(path.resolve()) if path.exists() else str(value)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [value_of(name, entry) for entry in value]
        return value

    return {name: value_of(name, value) for name, value in settings.items()}


def _settings(saved: Mapping, arguments: Mapping, source: str) -> dict[str, Any]:
    """Return the arguments of a cache to load.

    Args:
        saved: arguments of the saved cache.
        arguments: arguments of the caller.
        source: name of the folder in errors.

    Raises:
        ConfigError: they differ.
    """
    for name, value in plain(arguments).items():
        if name in saved and name not in PATHS and value != saved[name]:
            raise ConfigError(f"{source} was saved with {name} = {saved[name]!r}, not {value!r}: leave {name} out")
    return {**saved, **arguments}


def model_properties(config: Any) -> dict[str, Any]:
    """Return what a model's config says of its keys and values, as JSON has it."""
    text = config.get_text_config()
    names = "vocab_size", "intermediate_size", "sliding_window", "attention_chunk_size"
    sizes = {name: getattr(text, name, None) for name in names}
    return json.loads(json.dumps(shape_of(text, "the model's config") | sizes | {"rope": rope_of(text) or {}}))


def weights_digest(decoder: torch.nn.Module) -> str | None:
    """Return a sha256 of samples of each weight of a decoder in memory, or None if some are not there.

    A model in memory may have no folder, and adapters that its folder has not.
    """
    weights = dict(decoder.named_parameters())
    if any(weight.is_meta for weight in weights.values()):
        return None
    samples = {name: _samples(weight) for name, weight in weights.items()}
    return digest_of(samples)


def _samples(weight: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return a weight's shape, and at least 64 of its values, of all columns, if it has as many."""
    step = max(1, weight.numel() // SAMPLES)
    return list(weight.shape), weight.detach().reshape(-1)[:: step - 1 + step % 2]  # odd


def _check_saved_with(saved: Mapping, decoder: torch.nn.Module, source: str) -> None:
    """Check that a cache was saved with a model.

    Raises:
        ConfigError: it was another one.
    """
    remedy, properties = "load it with the model of then", model_properties(decoder.config)
    made_for = saved["model"] | {"rope": saved["model"].get("rope") or {}}
    check_same_model(made_for, properties, source, remedy, "the model")
    dtype = str(decoder.dtype).removeprefix("torch.")
    if dtype != saved["dtype"]:
        raise ConfigError(f"{source} was saved with a model in {saved['dtype']}, the model is in {dtype}: {remedy}")
    weights = weights_digest(decoder)
    if None not in (weights, saved["weights"]) and weights != saved["weights"]:
        raise ConfigError(f"{source} was saved with a model of other weights: {remedy}")


def device_of(layer: torch.nn.Module) -> torch.device:
    """Return the device on which a layer computes, which need not be where its weights are if they are offloaded."""
    hook = getattr(layer, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return next(layer.parameters()).device if device is None else torch.empty(0, device=device).device


def digest_of(value: Any) -> str:
    """Return a sha256 of tensors, modules, dataclasses and plain values, in any nesting."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, torch.nn.Module):
        settings = {
            name: x for name, x in vars(value).items() if isinstance(x, bool | int | float | str) or is_dataclass(x)
        }
        settings.pop("training")
        _add(digest, {"type": type(value).__name__, "settings": settings, "tensors": dict(value.state_dict())})
    elif is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        _add(digest, {"type": type(value).__name__, "fields": named})
    elif isinstance(value, Mapping):
        _add(digest, [part for item in sorted(value.items(), key=lambda item: str(item[0])) for part in item])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(f"{value!r};".encode())
