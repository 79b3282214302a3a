"""A model's config as transformers resolves it, and the shape that vLLM reads from it.

Config files spell sizes in different ways, nest them, and leave out what equals a default.
``tests/engine/test_shapes.py`` holds :func:`shape_of` equal to the engine's shape.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.supported import FULL_CHECKPOINT_SUFFIX

ADVICE = "give the folder of a decoder-only language model"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys under which configs that transformers does not know nest that of the language model."""
FALCONS = ("falcon", "RefinedWeb", "RefinedWebModel")
"""Model types of which ``multi_query`` overrides the number of KV heads, unless ``new_decoder_architecture`` is set."""
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""Names of the number of KV heads, in vLLM's order."""
NAMES = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "hidden_size": ("hidden_size", "n_embed", "n_embd", "d_model"),
    "head_dim": ("head_dim", "hidden_size_per_head"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
}
"""Names of the other sizes. Only configs that transformers does not know use more than the first of most."""

ROTATION = "rope_parameters", "rope_theta", "partial_rotary_factor", "no_rope_layers"
"""Keys of a config that describe rotary embeddings."""


def resolve(config: Mapping | Any, source: str | Path) -> Any:
    """Return a model's config with its keys as attributes, resolved by transformers if it knows the model type.

    Args:
        config: contents of a ``config.json``, or a resolved config, which is returned as it is.
        source: its name in errors.

    Raises:
        ConfigError: there is no model type, or transformers refuses the config.
    """
    if hasattr(config, "model_type"):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} is not a model's config: {ADVICE}")
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{source} has no 'model_type': {ADVICE}")
    base = kind.removesuffix(FULL_CHECKPOINT_SUFFIX)
    if base not in CONFIG_MAPPING:
        nested = {name: resolve(config[name], source) for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping)}
        return SimpleNamespace(**{**config, **nested})
    try:
        return CONFIG_MAPPING[base].from_dict(copy.deepcopy({**config, "model_type": base}))
    except Exception as error:  # each model type has checks of its own
        raise ConfigError(f"{source}: transformers refuses it ({' '.join(str(error).split())}): {ADVICE}") from None


def read_config(folder: str | Path) -> Any:
    """Return the resolved config of a model folder (:func:`resolve`).

    Raises:
        ConfigError: ``config.json`` cannot be read, or as :func:`resolve`.
    """
    path = Path(folder) / "config.json"
    return resolve(read_json(path, "give the folder of a Hugging Face model"), path)


def text_config(config: Any) -> Any:
    """Return the language model's part of a resolved config, which may be the config itself.

    Raises:
        ConfigError: the config has several.
    """
    if not hasattr(config, "get_text_config"):
        return next((text_config(vars(config)[name]) for name in TEXT_CONFIGS if name in vars(config)), config)
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{config.model_type} has several text configs ({error}): {ADVICE}") from None


def size(text: Any, name: str) -> Any:
    """Return the size of a text config that has the given key in :data:`NAMES`, or None."""
    values = (getattr(text, spelling, None) for spelling in NAMES[name])
    return next((value for value in values if value is not None), None)


def shape_of(config: Mapping | Any, source: str | Path) -> dict:
    """Return the sizes of a model that policies and scorers depend on, as an engine counts them.

    Args:
        config: contents of a ``config.json``, or a config of transformers.
        source: its name in errors.

    Returns:
        ``model_type``, ``num_layers``, ``num_kv_heads``, ``head_dim``, ``num_heads`` and, if the config has it,
        ``hidden_size``. The model type of a full checkpoint is that of its base model.

    Raises:
        ConfigError: transformers refuses the config, a number is missing or not a positive integer, or layers
            differ in one.
    """
    text = text_config(resolve(config, source))
    try:
        heads, hidden = size(text, "num_heads"), size(text, "hidden_size")
        sizes = {
            "num_layers": size(text, "num_layers"),
            "num_heads": heads,
            "head_dim": size(text, "head_dim") or (hidden and heads and hidden // heads),
            "num_kv_heads": _kv_heads(text, heads),
            **({} if hidden is None else {"hidden_size": hidden}),
        }
    except TypeError:
        raise ConfigError(f"{source} is not a model's config: {ADVICE}") from None
    except RuntimeError as error:  # transformers' refusal to return a size that layers differ in
        raise ConfigError(f"{source}: layers of different shapes ({str(error).split('.')[0]}): {ADVICE}") from None
    for name, number in sizes.items():
        if number is None:
            raise ConfigError(f"{source} has no {NAMES[name][0]!r}: {ADVICE}")
        if type(number) is not int or number < 1:
            raise ConfigError(f"{source}: {name} is {number!r}: {ADVICE}")
    return {"model_type": text.model_type.removesuffix(FULL_CHECKPOINT_SUFFIX)} | sizes


def _kv_heads(text: Any, heads: int) -> Any:
    """Return the number of KV heads; ``heads`` is that of query heads, which it defaults to."""
    if text.model_type in FALCONS and not getattr(text, "new_decoder_architecture", False):
        if getattr(text, "multi_query", False):
            return 1
    return next((value for name in KV_HEADS if (value := getattr(text, name, None))), heads)


def rotation_of(config: Mapping | Any) -> str:
    """Return a text that is equal for configs with the same rotary embeddings.

    Args:
        config: a resolved config.
    """
    text = text_config(config)
    rotation = {name: getattr(text, name, None) for name in ROTATION}
    return json.dumps(_spelled_out(rotation), sort_keys=True)


def _spelled_out(value: Any) -> Any:
    """Return a value of a config with mappings as dicts without None, and numbers as floats."""
    if isinstance(value, Mapping):
        return {str(key): _spelled_out(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_spelled_out(part) for part in value]
    return float(value) if type(value) is int else value
