"""Saving a KVpopCache and loading it again.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Self

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import check_new
from kvpop_vllm.hf.cache_files import CONFIG_NAME, DTYPES, SCHEMA, TENSORS_NAME, SavedTensors, read, settings_to_load
from kvpop_vllm.hf.checks import check_model
from kvpop_vllm.hf.digests import digest_of, model_properties, weights_digest
from kvpop_vllm.hf.local_layers import LocalLayer
from kvpop_vllm.model_hook import decoder_of
from kvpop_vllm.schemas import check_same_model
from kvpop_vllm.supported import HYBRID, LOCAL_LAYERS, RECURRENT, local_size
from kvpop_vllm.tensor_files import write_folder


class SavedCache:
    """Methods of a :class:`kvpop_vllm.hf.KVpopCache` that write and read its files."""

    def save(self, folder: str | PathLike) -> None:
        """Write what the cache holds to a new folder, from which :meth:`load` goes on.

        The folder holds as many bytes as the cache, the ids of its texts among them. It is written whole or not at all.

        Raises:
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
        # as it will be read, because the digest covers it
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
                cartridges may be elsewhere than when the cache was saved. Other arguments must stay as they were.
        """
        saved, tensors = read(folder)
        # cheap checks first, so that no pages are allocated for a wrong model
        if unknown := {*saved["settings"]} - {*inspect.signature(cls).parameters}:
            raise ConfigError(f"{folder}: unknown setting {min(unknown)!r}: save the cache again")
        check_model(model, saved["settings"].get("max_length"))
        _check_saved_with(saved, decoder_of(model), str(folder))
        cache = cls(model, device=device, **settings_to_load(saved["settings"], settings, str(folder)))
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
        self._check_begun("cannot be saved")
        # the digest of the weights needs the model
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
            for name, table in layer.tables(self._cartridges.count, self._prefix_tokens()).items():
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
        return digest_of([rules, self.gates, self._budgets, self._cartridges])

    def _check_saved_policy(self, saved: Mapping, source: str) -> None:
        """Check that the policy is the one of a saved cache."""
        for name, value in self._roles().items():
            if saved["roles"].get(name) != value:
                raise ConfigError(
                    f"{source} was saved with {name} {saved['roles'].get(name)}, and its scorer or calibration gives {value} now:"
                    " give that one"
                )
        if saved["policy"] != self._policy_digest():
            raise ConfigError(
                f"{source} was saved with another scorer, map, calibration or cartridge than the one that is there now: give"
                " that one"
            )

    def _check_sizes(self, saved: Mapping, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        """Check that a file is as large as the pages that will be allocated."""
        shape, rows = self.policy.model, len(saved["lengths"])
        counts = [len(saved[name]) for name in ("protected", "prefixes", "scales")]
        if counts != [rows, rows, len(self)]:
            raise ConfigError(f"{source} has numbers of other rows or layers than the cache: save the cache again")
        prefix = max(map(min, saved["protected"], saved["lengths"])) - self._cartridges.count
        slots = rows * shape.num_layers * shape.num_kv_heads * (self.policy.retention.budget + prefix)
        # a small file must not make us allocate many pages
        if slots * 2 * shape.head_dim > sum(tensor.nbytes for tensor in tensors.values()):
            raise ConfigError(f"{source} has fewer slots than the cache: save the cache again")
        self._rows.check_number(rows)

    def _take(self, saved: Mapping, tensors: SavedTensors) -> None:
        """Hold what a saved cache held."""
        self._columns, self.passes = saved["columns"], saved["passes"]
        self._lengths, self.protected = saved["lengths"], saved["protected"]
        self.text = tensors.take("text") if "text" in tensors.remaining else None
        layers, shape = self._decoder().layers, self.policy.model
        # the policy counts its own layers, and the model all
        for i, index in enumerate(shape.layers or range(len(self))):
            like = torch.empty(
                (len(self._lengths), shape.num_kv_heads, 0, shape.head_dim),
                dtype=DTYPES[saved["kv_dtype"]],
                device=self.device or device_of(layers[index]),
            )
            layer = self._new_layer(i, like, saved["scales"][i])
            layer.protect(self._prefix_tokens())
            for name, table in layer.tables(self._cartridges.count, self._prefix_tokens()).items():
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


def _check_saved_with(saved: Mapping, decoder: torch.nn.Module, source: str) -> None:
    """Check that a cache was saved with a model."""
    remedy, properties = "load it with the model that it was saved with", model_properties(decoder.config)
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
