"""``kvpop init-scorer``: an untrained scorer for a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import ScorerConfig, build, make_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, write_scorer
from kvpop_vllm.scorers.model_config import read_config, shape_of

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
    """Return the sizes of a model folder that scorers depend on: those of :func:`full_shape` without ``num_heads``.

    Raises:
        ConfigError: as :func:`full_shape`.
    """
    return {name: number for name, number in full_shape(model).items() if name != "num_heads"}


def full_shape(model: str | Path) -> dict:
    """Return the sizes of a model folder (:func:`kvpop_vllm.scorers.model_config.shape_of`).

    Raises:
        ConfigError: ``config.json`` cannot be read, or as :func:`shape_of`.
    """
    return shape_of(read_config(model), Path(model) / "config.json")


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
