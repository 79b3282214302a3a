"""Gates of DMS and FastDMS as their authors publish them.

DMS (NVIDIA): a whole model with ``dms_*`` keys in its ``config.json``. It is served itself, with the scorer folder.
Its separate projections read the residual stream through a norm of their own, which is folded into them: both
norms divide by the same root mean square.

FastDMS (shisa-ai): a whole model with ``dms_metadata.json``, which reads the same query channel as DMS. The logit of a
token decides about this token, where that of DMS decides about the token before it. Errors are ConfigErrors.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.scorers import ScorerConfig, make_config
from kvpop_vllm.scorers.checkpoint import read_tensors
from kvpop_vllm.scorers.published_checkpoint import model_keys, unread_lines
from kvpop_vllm.supported import ARCHITECTURES

DMS_METADATA = "dms_metadata.json"
"""File of FastDMS's settings."""
OFFSET = 5.0
"""DMS's offset where no file says it."""
DMS_KEYS = {
    "window": ("dms_window_size", "window_size"),
    "scale": ("dms_alpha_scale", "alpha_scale"),
    "offset": ("dms_initial_alpha_offset", "dms_alpha_offset", "alpha_offset"),
}
"""Names of DMS's settings: in ``config.json`` those with ``dms_``, in FastDMS's file any."""


def is_dms(source: Path, raw: Mapping) -> bool:
    """Return whether a folder is a model of DMS or FastDMS. ``raw`` are the contents of its ``config.json``."""
    return "dms_alpha_scale" in raw or (source / DMS_METADATA).is_file()


def _dms_settings(source: Path, raw: Mapping) -> tuple[dict, list[str]]:
    """Return DMS's window, scale and offset as the config and FastDMS's file say them, and what was not read in the file."""
    says = {name: (f"{name} in config.json", value) for name, value in raw.items() if name.startswith("dms_")}
    unread = set()
    if (path := source / DMS_METADATA).is_file():
        metadata = read_json(path, "copy the folder again")
        # the settings may lie in an object config
        metadata = metadata.get("config", metadata) if isinstance(metadata, Mapping) else None
        if not isinstance(metadata, Mapping):
            raise ConfigError(f"{path} is no JSON object: copy the folder again")
        if "sidecar" in metadata or metadata.get("borrowed_query_channel", -1) != -1:
            raise ConfigError(f"{path}: its gate is not the last channel of the queries, which alone is read")
        says |= {(DMS_METADATA, name): (f"{name} in {DMS_METADATA}", value) for name, value in metadata.items()}
        unread = metadata.keys() - {name for names in DMS_KEYS.values() for name in names}
    settings = {}
    for key, names in DMS_KEYS.items():
        values = [says[place] for name in names for place in (name, (DMS_METADATA, name)) if place in says]
        for label, value in values:
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            if not number or (key == "window" and type(value) is not int):
                raise ConfigError(
                    f"{source}: {label} is {value!r}, which is not a number: give a folder of a DMS model"
                )
            if value != values[0][1]:
                raise ConfigError(
                    f"{source}: {values[0][0]} is {values[0][1]!r}, and {label} is {value!r}: one of the two is wrong"
                )
        settings[key] = values[0][1] if values else None
    for key in ("window", "scale"):
        if settings[key] is None:
            raise ConfigError(f"{source}: config.json has no {DMS_KEYS[key][0]}: give a folder of a DMS model")
    return settings, unread_lines(DMS_METADATA, unread)


def read_dms(
    source: Path, raw: Mapping, shape: Mapping, sinks: int | None, window: int | None, topk: int | None
) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]], list[str]]:
    """Return the config and the tensors of a published model's gates, and lines about what was not taken over.

    Args:
        source: published folder.
        raw: contents of its ``config.json``.
        shape: sizes of its model (:func:`kvpop_vllm.model_shape.folder_sizes`).
        sinks: s, default 1 for DMS, 0 for FastDMS.
        window: w, default the published window, which excludes the newest token, plus 1.
        topk: k, required.
    """
    if topk is None:
        raise ConfigError("DMS bounds no cache, so its checkpoint says no number of tokens: give --topk")
    if raw.get("dms_alpha_per", "head") != "head":
        raise ConfigError(f"{source}: dms_alpha_per is {raw['dms_alpha_per']!r}, and heads decide for themselves here")
    settings, unread = _dms_settings(source, raw)
    fast = (source / DMS_METADATA).is_file() or "dms_alpha_offset" in raw
    separate = bool(raw.get("dms_separate_alpha", False))
    if fast and separate:
        raise ConfigError(
            f"{source}: dms_separate_alpha is true, and FastDMS has no projections: one of the two is wrong"
        )
    offset = OFFSET if settings["offset"] is None else float(settings["offset"])
    config = make_config(
        shape,
        "dms",
        source=f"{source}: config.json",
        sinks=(0 if fast else 1) if sinks is None else sinks,
        window=window or settings["window"] + 1,  # the published window excludes the newest token
        topk=topk,
        reads="hidden" if separate else "query",
        scale=float(settings["scale"]),
        shifted=not fast,
    )
    notes = [
        f"the eviction logit of a token decides about the token {'itself (FastDMS)' if fast else 'before it (NVIDIA)'}",
        "not taken over: a cache that grows with what gates keep; here each KV head has at most"
        f" {config.sinks + config.window + config.topk} tokens",
    ]
    if fast:
        notes.append("not taken over: what RoPE turns into the channel of the logits, which is 0 here")
    if settings["offset"] is None:
        notes.append(f"assumed, because config.json does not say it: dms_initial_alpha_offset {OFFSET}")
    stock = ARCHITECTURES.get(shape["model_type"], "").replace("KVpop", "")
    if stock and raw.get("architectures") != [stock]:
        overrides = json.dumps({"architectures": [stock]})
        notes.append(f"serve it as its base, without its code: --hf-overrides '{overrides}'")
    keys = {name for names in DMS_KEYS.values() for name in names} | {"dms_alpha_per", "dms_separate_alpha"}
    notes += unread_lines("config.json", raw.keys() - model_keys(raw, shape["model_type"]) - keys) + unread
    # the published logit subtracts the offset, and ours adds a bias
    bias = torch.full((config.num_kv_heads,), -offset)
    if not separate:
        return config, [{"bias": bias.clone()} for _ in range(config.num_layers)], notes
    tensors = read_tensors(source, lambda name: ".dms_proj_alpha" in name or ".input_layernorm." in name)

    def find(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ConfigError(f"{source} has no {name} in its safetensors files: give a folder of a DMS model")
        return tensors[name].float()

    layers = [_projection(find, tensors, i, config.scale, bias) for i in range(config.num_layers)]
    return config, layers, notes


def _projection(find, tensors: dict, layer: int, scale: float, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a projection on the attention block's input that equals the published one.

    ``W (n_a * x / rms)`` is ``(W n_a / n_in) (n_in * x / rms)``.
    """
    prefix = f"model.layers.{layer}"
    norm = find(f"{prefix}.input_layernorm.weight")
    if not bool(norm.all()):
        raise ConfigError(f"{prefix}.input_layernorm.weight has zeros: its projection cannot be taken over")
    weight = find(f"{prefix}.self_attn.dms_proj_alpha.weight") * find(f"{prefix}.self_attn.dms_proj_alpha_norm.weight")
    alpha_bias = tensors.get(f"{prefix}.self_attn.dms_proj_alpha.bias", torch.zeros(()))
    # a bias of the projection is scaled with it
    return {"weight": weight / norm, "bias": bias + scale * alpha_bias.float()}
