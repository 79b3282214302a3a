"""The base model that a cartridge or a compactor was made for: its properties, its digests, and their comparison.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kvpop_vllm.compaction.cartridge import MODEL_RULES
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import positions_of, read_model_config, shape_of, text_config
from kvpop_vllm.rope import check_rope, rope_of
from kvpop_vllm.schemas import check_same_model
from kvpop_vllm.supported import FULL, has_sinks, layer_kinds, unserved

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Parts of each weight file that its digest covers in addition to its header."""


def base_digests(folder: str | Path) -> dict[str, str | None]:
    """Return ``{"config": .., "weights": ..}``, digests by which base models differ.

    ``config`` is a sha256 of sizes and rope parameters. ``weights`` is a sha256 of the headers of the safetensors
    files and of 64 samples of each, since models of one architecture have equal headers. It is None for a
    folder without such files.
    """
    folder = Path(folder)
    return {"config": _config_digest(_resolved(folder), str(folder)), "weights": _weights_digest(folder)}


def _weights_digest(folder: Path) -> str | None:
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in paths:
        with open(path, "rb") as file:
            # a safetensors file begins with the length of its header
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            # a length beyond the file is what a cut download leaves
            if length > size - 8:
                raise ConfigError(f"{path} is not a complete safetensors file: download the model again")
            digest.update(file.read(length))
            # samples, because hashing all weights takes long
            for place in range(8 + length, size, max(SAMPLE_BYTES, (size - length) // SAMPLES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if paths else None


def _resolved(model: str | Path | Mapping | object) -> dict:
    """Return a model's text config as transformers resolves it, since defaults of its type are not in ``config.json``.

    Args:
        model: the model's folder, its transformers config, or the result.
    """
    if isinstance(model, Mapping):
        return dict(model)
    text = text_config(read_model_config(model) if isinstance(model, str | Path) else model)
    return text.to_dict() if hasattr(text, "to_dict") else dict(vars(text))


def _config_digest(config: Mapping, source: str) -> str:
    sizes = {name: config.get(name) for name in ("vocab_size", "intermediate_size")}
    text = json.dumps(shape_of(config, source) | sizes | {"rope": rope_of(config)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_attention(config) -> None:
    """Check that every layer of a model has full attention, without sinks or caps.

    Args:
        config: the model's resolved config.
    """
    text, positions = text_config(config), positions_of(config)
    features = {"recurrent": {*layer_kinds(text, tokens=positions)} != {FULL}, "attention sinks": has_sinks(text)}
    if reasons := unserved(text, features, positions):
        raise ConfigError(f"a cartridge cannot serve a model with {reasons[0]}: choose another model")


def base_of(folder: str | Path) -> dict:
    """Return the fields of a :class:`CartridgeConfig` that follow from a base model's folder."""
    config = _resolved(folder)
    check_attention(read_model_config(folder))
    shape, rope = shape_of(config, folder), rope_of(config)
    check_rope(rope, str(folder))
    sizes = {name: shape[name] for name in ("model_type", "num_layers", "num_kv_heads", "head_dim")}
    return sizes | {"rope": rope, "base": base_digests(folder)}


def check_base(
    config,
    model: str | Path | Mapping | object,
    source: str = "this cartridge",
    kind: str = "cartridge",
    weights: str | Path | None = None,
) -> None:
    """Check that a cartridge, or a compactor, was made for a model.

    Args:
        config: its config, a :class:`CartridgeConfig` or one with the same fields for the base model.
        model: the model's folder, whose weights are compared too, or its resolved config, of transformers or as a
            dict. An engine's config may differ from that of its model's folder.
        source: its name in errors.
        kind: what it is called in errors.
        weights: folder of the model's weights where ``model`` is a config, None to compare none.
    """
    folder = model if isinstance(model, str | Path) else weights
    resolved, name = _resolved(model), str(folder or "the model")
    properties = shape_of(resolved, name) | {"rope": rope_of(resolved)}
    made_for = {key: getattr(config, key) for key in MODEL_RULES} | {"rope": rope_of({"rope_parameters": config.rope})}
    check_same_model(made_for, properties, source, f"give a {kind} of this model", name)
    digests = {"config": _config_digest(resolved, name), "weights": _weights_digest(Path(folder)) if folder else None}
    for key, value in digests.items():
        # None means that one of both has no weights to compare
        if None not in (value, config.base[key]) and value != config.base[key]:
            difference = "other weights" if key == "weights" else "a model of other sizes"
            raise ConfigError(f"{source} was made for {difference} than those of {name}: give a {kind} of this model")
