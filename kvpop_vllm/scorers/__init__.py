"""Learned scorers and gates: one file per kind with its config, tensors, formula and module.

A new kind is one file and one line in :data:`SCORERS` or :data:`GATES`.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers.base import Gate, LayerModule, Scorer, Signals, log_gamma
from kvpop_vllm.scorers.dms import DMSGate
from kvpop_vllm.scorers.kvzap import KVzapGate
from kvpop_vllm.scorers.linear import LinearScorer
from kvpop_vllm.scorers.mlp import MLPScorer
from kvpop_vllm.scorers.mlstm import MLSTMScorer
from kvpop_vllm.scorers.scorer_config import SCHEMA, Decay, ScorerConfig
from kvpop_vllm.scorers.trimkv import TrimKVGate

SCORERS: dict[str, type[Scorer]] = {cls.config_class.scorer: cls for cls in (MLSTMScorer, MLPScorer, LinearScorer)}
"""Classes of scorers of keys and values by kind, the ``scorer`` key of their config."""
GATES: dict[str, type[Gate]] = {cls.config_class.scorer: cls for cls in (TrimKVGate, DMSGate, KVzapGate)}
"""Classes of gates by kind, the ``scorer`` key of their config."""
KINDS: dict[str, type[LayerModule]] = SCORERS | GATES
"""Classes of all kinds."""


def make_config(shape: Mapping, scorer: str, *, source: str, **values) -> ScorerConfig:
    """Return the checked config of a scorer.

    Args:
        shape: sizes of the model (:func:`kvpop_vllm.model_shape.folder_sizes`). Those that the kind has no key
            for are left out.
        scorer: kind.
        source: names the values in errors.
        values: further keys.
    """
    if scorer not in KINDS:
        raise ConfigError(f"{source}: scorer must be one of {', '.join(KINDS)}, got {scorer!r}")
    config_class = KINDS[scorer].config_class
    keys = {key.name for key in dataclasses.fields(config_class)}
    if unknown := sorted(values.keys() - keys):
        raise ConfigError(f"{source}: a scorer of kind {scorer!r} has no {unknown[0]}: leave it out")
    # a model without a hidden size gives None, which the check of the config names
    sizes = {name: shape.get(name) for name in (*shape, "hidden_size") if name in keys}
    return parse_config(config_class(**sizes, **values).to_json(), source)


def parse_config(raw: object, source: str) -> ScorerConfig:
    """Check a decoded JSON object and return it as a config. ``source`` names it in errors."""
    values = SCHEMA.body(raw, source)
    kind = values.pop("scorer", None)
    # a list, since a kind from JSON may be unhashable
    if kind not in list(KINDS):
        raise ConfigError(f"{source}: scorer must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind].config_class.from_json(values, source)


def build(config: ScorerConfig, **sizes) -> Scorer | Gate:
    """Return a freshly initialised scorer or gate of one layer.

    Args:
        config: config of the scorer or gate.
        sizes: size arguments of its class.
    """
    return KINDS[config.scorer](config, **sizes)


def from_tensors(config: ScorerConfig, tensors: dict[str, torch.Tensor]) -> Scorer | Gate:
    """Return one layer's scorer or gate with the checked tensors of a file, float32, without gradients.

    The tensors are those of all KV heads, or of some of them if the kind scores each head by itself.
    """
    # a rank may have some of the heads only
    heads = next(len(tensors[name]) for name, shape in config.shapes(tensors).items() if not isinstance(shape[0], str))
    if heads != config.num_kv_heads:
        config = dataclasses.replace(config, num_kv_heads=heads)
    module = copy.deepcopy(_empty(config, **KINDS[config.scorer].sizes(tensors)))
    module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    return module.requires_grad_(False)


@functools.lru_cache
def _empty(config: ScorerConfig, **sizes) -> Scorer | Gate:
    """Return a scorer or gate without values. A search resolves policies thousands of times, and copies are cheap."""
    with torch.device("meta"):
        return build(config, **sizes)
