"""``kvpop init-scorer``: an untrained scorer for a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvpop_vllm.config import FULL_CHECKPOINT_SUFFIX, ConfigError
from kvpop_vllm.scorers import build
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, ScorerConfig, write_scorer

BORROWED = "kvpop_borrowed_channel"
"""Key in the ``config.json`` of a model that was trained here to give a channel up."""


def borrows_channel(model: str | Path) -> bool:
    """Whether the last channel of each KV head's first query is a model's eviction logit (DMS), trained here or in its authors' layout."""
    return gives_up_channel(json.loads((Path(model) / "config.json").read_text()))


def gives_up_channel(config: dict) -> bool:
    """The same of the contents of a ``config.json``."""
    published = "dms_alpha_scale" in config and not config.get("dms_separate_alpha", False)
    return bool(config.get(BORROWED, False)) or published


def model_shape(model: str | Path) -> dict:
    """``model_type, num_layers, num_kv_heads, head_dim`` from a model folder's ``config.json``, and ``hidden_size`` if it is there: what
    scorers are made for.

    The model type of a full checkpoint is that of its base model, which is what its scorers are made for.

    Raises:
        ConfigError: no such folder, or a config without these numbers.
    """
    return {name: number for name, number in full_shape(model).items() if name != "num_heads"}


def full_shape(model: str | Path) -> dict:
    """The same with ``num_heads``, query heads."""
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of a Hugging Face model") from None
    return shape_of(config, path)


def shape_of(config: dict, path: str | Path) -> dict:
    """What :func:`model_shape` returns, and ``num_heads``, from what a ``config.json`` says; ``path`` names it in errors."""
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
    """Writes an adapter folder with freshly initialised scorers, whose policy is the sliding window until trained.

    Args:
        model: Hugging Face folder. out: folder to write. options: fields of :class:`ScorerConfig`; ``scorer`` defaults
            to mlstm, ``sinks``, ``window``, ``topk`` to 4, 256 and 764 (B = 1,024).
    """
    if (Path(out) / CONFIG_NAME).exists():
        raise ConfigError(f"{out} holds a scorer already: choose another folder")
    defaults = {"scorer": "mlstm", "sinks": 4, "window": 256, "topk": 764}
    config = ScorerConfig(**model_shape(model), **(defaults | options))
    config = ScorerConfig.parse(config.to_json(), "init-scorer options")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [dict(build(config).state_dict()) for _ in range(config.num_layers)]
    write_scorer(out, config, layers)
    return config
