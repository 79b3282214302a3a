"""``kvpop import``: convert gates published by the authors of TRIM-KV, DMS and KVzap to a scorer folder.

TRIM-KV: a folder with ``config.json`` (``retention_gate``: rg, rg2 or rg3; ``memory_size``: M) and the gates
alone, in ``trimkv_weights.safetensors`` or ``trimkv_weights.pth``. It is served with the base model.

DMS: a whole model with ``dms_*`` keys in its ``config.json``. It is served itself, with the scorer folder.
Its separate projections read the residual stream through a norm of their own, which is folded into them: both
norms divide by the same root mean square.

KVzap: a folder of its gates (:mod:`kvpop_vllm.scorers.kvzap_folder`), which policies also read as it is.

KVpop: a full checkpoint (:mod:`kvpop_vllm.scorers.reader`). Only its scorer is taken over, for the same base weights.

A ``.pth`` file is a pickle. It is read with ``weights_only=True``, so that it can hold only tensors and plain
containers, and no code is executed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvpop_vllm.config import MAX_BUDGET, ConfigError
from kvpop_vllm.hub import FILES, PICKLES, local_folder
from kvpop_vllm.model_shape import folder_sizes
from kvpop_vllm.scorers import ScorerConfig, make_config, parse_config
from kvpop_vllm.scorers.checkpoint import (
    CONFIG_NAME,
    check_tensors,
    full_checkpoint_name,
    read_scorer,
    read_tensors,
    split_layers,
    write_scorer,
)
from kvpop_vllm.scorers.kvzap_folder import is_kvzap
from kvpop_vllm.scorers.reader import is_published, load, open_checkpoint, reading_of
from kvpop_vllm.tensor_files import reading, unpickled

TRIMKV_FILES = ("trimkv_weights.safetensors", "trimkv_weights.pth")
"""File names of TRIM-KV's gates, in order of preference."""
RETENTION_GATES = {
    "rg": {"reads": "hidden", "gated": False},
    "rg2": {"reads": "kv", "gated": False},
    "rg3": {"reads": "kv", "gated": True},
}
"""Scorer config values for the authors' names of gates."""


def import_gates(
    source: str | Path, out: str | Path, *, sinks=None, window=None, topk=None, map_file=None
) -> ScorerConfig:
    """Write a scorer folder from a published one, and return its config.

    Args:
        source: published folder, or its name on the hub.
        out: folder to write.
        map_file: how to read the scorer of a full checkpoint of KVpop (``kvpop inspect-checkpoint``).
        sinks: s; default 0 for TRIM-KV, 1 for DMS, 4 for KVzap.
        window: w; default 1 for TRIM-KV, the published window for DMS, 128 for KVzap.
        topk: k; default ``M - 1`` for TRIM-KV, required for DMS, for KVzap that of B = 4,096.

    Raises:
        ConfigError: the format is unknown, something is missing or damaged, or k is missing for DMS.
    """
    source = local_folder(source, files=(*FILES, *PICKLES))
    if (Path(out) / CONFIG_NAME).exists():
        raise ConfigError(f"{out} holds a scorer already: choose another folder")
    if is_published(source):
        return _full(source, out, map_file, sinks, window, topk)
    if map_file is not None:
        raise ConfigError(f"--map is for full checkpoints of KVpop, and {source} is none: leave it out")
    if is_kvzap(source):
        return _kvzap(source, out, sinks, window, topk)
    shape = folder_sizes(source)
    raw = json.loads((source / "config.json").read_text())
    if "retention_gate" in raw:
        config, layers = _trimkv(source, raw, shape, sinks, window, topk)
    elif "dms_alpha_scale" in raw:
        config, layers = _dms(source, raw, shape, sinks, window, topk)
    else:
        raise ConfigError(
            f"{source}: config.json has neither retention_gate (TRIM-KV) nor dms_alpha_scale (DMS), nor is its model_type kvzap: give a folder of one of them"
        )
    check_tensors(config, layers, str(source))
    write_scorer(out, config, layers)
    return config


def _full(source: Path, out, map_file, sinks, window, topk) -> ScorerConfig:
    """Write the scorer of a full checkpoint of KVpop, whose weights may be pickles; return its config."""
    checkpoint = open_checkpoint(source, pickles=True)
    theirs = reading_of(checkpoint, map_file)
    options = {"sinks": sinks, "window": window, "topk": topk}
    budget = theirs.budget | {name: number for name, number in options.items() if number is not None}
    config, layers = load(checkpoint, dataclasses.replace(theirs, budget=budget))
    write_scorer(out, config, layers)
    return config


def _kvzap(source: Path, out, sinks, window, topk) -> ScorerConfig:
    """Write gates of KVzap as a scorer folder, and return its config."""
    config, layers = read_scorer(source)
    options = {"sinks": sinks, "window": window, "topk": topk}
    content = config.to_json() | {name: number for name, number in options.items() if number is not None}
    config = parse_config(content, str(source))
    write_scorer(out, config, layers)
    return config


def _trimkv(source, raw, shape, sinks, window, topk):
    kind = raw["retention_gate"]
    if kind not in list(RETENTION_GATES):
        raise ConfigError(
            f"{source}: retention_gate is {kind!r}, and only {', '.join(RETENTION_GATES)} are TRIM-KV's: give another checkpoint"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{source}: hidden_act is {activation!r}, and gates here know silu alone")
    sinks, window, size = sinks or 0, window or 1, raw.get("memory_size")
    if topk is None:
        if isinstance(size, bool) or not isinstance(size, int | float) or not 2 <= size < MAX_BUDGET:
            raise ConfigError(f"{source}: memory_size is {size!r}, which is no number of tokens: give --topk")
        topk = int(size) - sinks - window
        if topk < 1:
            raise ConfigError(
                f"{source}: memory_size {size} leaves nothing beside {sinks} sinks and window {window}: lower --window"
            )
    config = make_config(
        shape, "trimkv", source=f"{source}: config.json", sinks=sinks, window=window, topk=topk, **RETENTION_GATES[kind]
    )
    weights = {name: (full_checkpoint_name(name), tensor) for name, tensor in _weights(source).items()}
    if foreign := [name for name, (own, _) in weights.items() if own is None]:
        raise ConfigError(
            f"{source} holds {foreign[0]}, which is no retention gate's: what changes the model itself cannot be imported"
        )
    return config, split_layers(config, weights.values(), str(source))


def _weights(source: Path) -> dict[str, torch.Tensor]:
    found = [source / name for name in TRIMKV_FILES if (source / name).is_file()]
    if not found:
        raise ConfigError(f"{source} has neither {' nor '.join(TRIMKV_FILES)}: give a published TRIM-KV folder")
    path = found[0]
    if path.suffix != ".safetensors":
        return unpickled(path, "give a published TRIM-KV folder")
    with reading(path):
        return load_file(path)


def _dms(source, raw, shape, sinks, window, topk):
    if topk is None:
        raise ConfigError("DMS bounds no cache, so its checkpoint says no number of tokens: give --topk")
    if raw.get("dms_alpha_per", "head") != "head":
        raise ConfigError(f"{source}: dms_alpha_per is {raw['dms_alpha_per']!r}, and heads decide for themselves here")
    if type(raw.get("dms_window_size")) is not int:
        raise ConfigError(f"{source}: config.json has no dms_window_size: give a folder of a DMS model")
    for name in ("dms_initial_alpha_offset", "dms_alpha_scale"):
        value = raw.get(name, 5.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{source}: {name} is {value!r}, which is no number: give a folder of a DMS model")
    offset = float(raw.get("dms_initial_alpha_offset", 5.0))
    separate = bool(raw.get("dms_separate_alpha", False))
    config = make_config(
        shape,
        "dms",
        source=f"{source}: config.json",
        sinks=1 if sinks is None else sinks,
        window=window or raw["dms_window_size"] + 1,  # the published window excludes the newest token
        topk=topk,
        reads="hidden" if separate else "query",
        scale=float(raw["dms_alpha_scale"]),
        shifted=True,
    )
    bias = torch.full((config.num_kv_heads,), -offset)
    if not separate:
        return config, [{"bias": bias.clone()} for _ in range(config.num_layers)]
    tensors = read_tensors(source, lambda name: ".dms_proj_alpha" in name or ".input_layernorm." in name)

    def find(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ConfigError(f"{source} has no {name} in its safetensors files: give a folder of a DMS model")
        return tensors[name].float()

    return config, [_projection(find, tensors, i, config.scale, bias) for i in range(config.num_layers)]


def _projection(find, tensors: dict, layer: int, scale: float, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a projection on the attention block's input that equals the published one.

    ``W (n_a * x / rms)`` is ``(W n_a / n_in) (n_in * x / rms)``.
    """
    prefix = f"model.layers.{layer}"
    norm = find(f"{prefix}.input_layernorm.weight")
    if not bool(norm.all()):
        raise ConfigError(f"{prefix}.input_layernorm.weight has zeros: its projection cannot be taken over")
    weight = find(f"{prefix}.self_attn.dms_proj_alpha.weight") * find(f"{prefix}.self_attn.dms_proj_alpha_norm.weight")
    more = tensors.get(f"{prefix}.self_attn.dms_proj_alpha.bias", torch.zeros(()))
    return {"weight": weight / norm, "bias": bias + scale * more.float()}
