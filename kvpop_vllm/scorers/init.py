"""``kvpop init-scorer``: an untrained scorer for a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.scorers import ScorerConfig, build, make_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, write_scorer
from kvpop_vllm.supported import FULL_CHECKPOINT_SUFFIX

BORROWED = "kvpop_borrowed_channel"
"""Key in the ``config.json`` of a model that was trained by this package to give up a query channel."""


def borrows_channel(model: str | Path) -> bool:
    """Return whether a model folder's model gives up a query channel (see :func:`gives_up_channel`)."""
    return gives_up_channel(json.loads((Path(model) / "config.json").read_text()))


def gives_up_channel(config: dict) -> bool:
    """Return whether the model of a ``config.json`` uses a query channel as its eviction logit (DMS).

    The channel is the last one of each KV head's first query head. Models trained by this package and models
    in the layout of the authors of DMS are recognised.
    """
    published = "dms_alpha_scale" in config and not config.get("dms_separate_alpha", False)
    return bool(config.get(BORROWED, False)) or published


def model_shape(model: str | Path) -> dict:
    """Return the sizes in a model folder's ``config.json`` that scorers depend on.

    These are ``model_type``, ``num_layers``, ``num_kv_heads``, ``head_dim`` and, if the file has it,
    ``hidden_size``. The model type of a full checkpoint is that of its base model, because scorers are made
    for the base model.

    Raises:
        ConfigError: the folder does not exist, or its config lacks one of these numbers.
    """
    return {name: number for name, number in full_shape(model).items() if name != "num_heads"}


def full_shape(model: str | Path) -> dict:
    """Return the sizes of :func:`model_shape` and ``num_heads``, the number of query heads.

    Raises:
        ConfigError: as :func:`model_shape`.
    """
    path = Path(model) / "config.json"
    return shape_of(read_json(path, "give the folder of a Hugging Face model"), path)


def shape_of(config: dict, path: str | Path) -> dict:
    """Return the sizes of :func:`full_shape` from a decoded ``config.json``; ``path`` names it in errors.

    Raises:
        ConfigError: a number is missing or not a positive integer.
    """
    try:
        heads = config["num_attention_heads"]
        kind = config["model_type"]
        found = {
            "model_type": kind.removesuffix(FULL_CHECKPOINT_SUFFIX) if isinstance(kind, str) else kind,
            "num_layers": config["num_hidden_layers"],
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "num_heads": heads,
            **({"hidden_size": config["hidden_size"]} if config.get("hidden_size") is not None else {}),
        }
        for name, number in found.items():
            if name != "model_type" and (type(number) is not int or number < 1):
                raise ConfigError(f"{path}: {name} is {number!r}: give the folder of a decoder-only language model")
        return found
    except ConfigError:
        raise
    except (TypeError, AttributeError, ZeroDivisionError):
        raise ConfigError(f"{path} is not a model's config: give the folder of a decoder-only language model") from None
    except KeyError as error:
        raise ConfigError(
            f"{path} has no {error.args[0]!r}: give the folder of a decoder-only language model"
        ) from None


def init_scorer(model: str | Path, out: str | Path, *, seed: int = 0, **options) -> ScorerConfig:
    """Write an adapter folder with freshly initialised scorers, and return its config.

    Before training their policy is the sliding window.

    Args:
        model: Hugging Face folder.
        out: folder to write.
        seed: seed of the initial parameters.
        options: keys of the config; ``scorer`` defaults to mlstm, ``sinks``, ``window``,
            ``topk`` to 4, 256 and 764 (B = 1,024).

    Raises:
        ConfigError: ``out`` holds a scorer already, the model's config cannot be read, or an option is
            invalid.
    """
    if (Path(out) / CONFIG_NAME).exists():
        raise ConfigError(f"{out} holds a scorer already: choose another folder")
    defaults = {"scorer": "mlstm", "sinks": 4, "window": 256, "topk": 764}
    config = make_config(model_shape(model), source="init-scorer options", **(defaults | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [dict(build(config).state_dict()) for _ in range(config.num_layers)]
    write_scorer(out, config, layers)
    return config
