"""Gates of TRIM-KV and DBTrimKV as their authors publish them.

A folder has ``config.json`` (``retention_gate``: rg, rg2, rg3, or rg10 of DBTrimKV; ``memory_size``: M) and the gates
alone, in ``trimkv_weights.safetensors`` or ``trimkv_weights.pth``. It is served with the base model. Errors are
ConfigErrors.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvpop_vllm.config import MAX_BUDGET, ConfigError
from kvpop_vllm.scorers import ScorerConfig, make_config
from kvpop_vllm.scorers.checkpoint import full_checkpoint_name, split_layers
from kvpop_vllm.scorers.published_checkpoint import model_keys, unread_lines
from kvpop_vllm.tensor_files import reading, unpickled

TRIMKV_FILES = ("trimkv_weights.safetensors", "trimkv_weights.pth")
"""File names of TRIM-KV's gates, in order of preference."""
RETENTION_GATES = {
    "rg": {"reads": "hidden", "gated": False},
    "rg2": {"reads": "kv", "gated": False},
    "rg3": {"reads": "kv", "gated": True},
    "rg10": {"reads": "hidden", "gated": False},
}
"""Scorer config values for the authors' names of gates. The tensors of rg10 have a second hidden layer."""


def read_trimkv(
    source: Path, raw: Mapping, shape: Mapping, sinks: int | None, window: int | None, topk: int | None
) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]], list[str]]:
    """Return the config and the tensors of published gates, and lines about what was not taken over.

    Args:
        source: published folder.
        raw: contents of its ``config.json``.
        shape: sizes of its model (:func:`kvpop_vllm.model_shape.folder_sizes`).
        sinks: s, default 0.
        window: w, default 1.
        topk: k, default ``M - s - w``.
    """
    kind = raw["retention_gate"]
    if kind not in list(RETENTION_GATES):
        raise ConfigError(
            f"{source}: retention_gate is {kind!r}, and only {', '.join(RETENTION_GATES)} are TRIM-KV's: give another checkpoint"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{source}: hidden_act is {activation!r}, and gates here know silu alone")
    sinks, window, size = sinks or 0, window or 1, raw.get("memory_size")
    if topk is None:
        # bool is an int to isinstance()
        if isinstance(size, bool) or not isinstance(size, int | float) or not 2 <= size < MAX_BUDGET:
            raise ConfigError(f"{source}: memory_size is {size!r}, which is no number of tokens: give --topk")
        topk = int(size) - sinks - window
        if topk < 1:
            raise ConfigError(
                f"{source}: memory_size {size} leaves nothing after {sinks} sinks and window {window}: lower --window"
            )
    config = make_config(
        shape, "trimkv", source=f"{source}: config.json", sinks=sinks, window=window, topk=topk, **RETENTION_GATES[kind]
    )
    weights = {name: (full_checkpoint_name(name), tensor) for name, tensor in _weights(source).items()}
    if foreign := [name for name, (target, _) in weights.items() if target is None]:
        raise ConfigError(
            f"{source} holds {foreign[0]}, which is no retention gate's: what changes the model itself cannot be imported"
        )
    layers = split_layers(config, weights.values(), str(source))
    if odd := [i for i, tensors in enumerate(layers) if ("linear3.weight" in tensors) != (kind == "rg10")]:
        verb = "lacks" if kind == "rg10" else "has"
        raise ConfigError(
            f"{source}: retention_gate is {kind!r}, and layer {odd[0]} {verb} linear3: one of the two is wrong"
        )
    base = str(raw.get("base_model", "their base model"))
    notes = [f"the folder has gates alone: serve them with the weights of {base if base.isprintable() else repr(base)}"]
    if raw.get("global_capacity", kind == "rg10"):
        notes.append(
            f"not taken over: one budget for all heads of all layers, memory_size {size} in the mean; here each KV head has"
            f" {sinks + window + topk} tokens"
        )
    keys = {"retention_gate", "memory_size", "base_model", "global_capacity"}
    return config, layers, notes + unread_lines("config.json", raw.keys() - model_keys(raw, shape["model_type"]) - keys)


def _weights(source: Path) -> dict[str, torch.Tensor]:
    paths = [source / name for name in TRIMKV_FILES if (source / name).is_file()]
    if not paths:
        raise ConfigError(f"{source} has neither {' nor '.join(TRIMKV_FILES)}: give a published TRIM-KV folder")
    path = paths[0]
    if path.suffix != ".safetensors":
        return unpickled(path, "give a published TRIM-KV folder")
    with reading(path):
        return load_file(path)
