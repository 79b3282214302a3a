"""Policy resolution for a transformers model.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import re
from dataclasses import replace

import torch

from kvpop_vllm import policies
from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError, PolicySettings
from kvpop_vllm.hf.full_checkpoint import published_scorer, scorer_tensors
from kvpop_vllm.model_shape import ModelShape, positions_of
from kvpop_vllm.policies import Policy
from kvpop_vllm.scorers import parse_config
from kvpop_vllm.supported import refused_beside


def resolve(model: torch.nn.Module, settings: PolicySettings, max_length: int | None) -> Policy:
    """Return the policy for a model, resolved as an engine would resolve it.

    Args:
        model: model of transformers.
        settings: the user's settings.
        max_length: longest sequence in tokens, or None for the model's own.
    """
    cls, config = policies.get(settings.policy), model.config.get_text_config()
    length = positions_of(model.config) if max_length is None else max_length
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ConfigError(f"max_length must be an integer of at least 1, got {max_length!r}")
    if length is None:
        raise ConfigError("the model's config does not say how many positions it has: give max_length")
    shape = ModelShape.of(config, length)
    section = getattr(config, "kvpop", None)
    if cls.scorer_kind is not None and settings.scorer is None and section is None:
        settings = replace(settings, scorer=published_scorer(model))
    if cls.scorer_kind is None or settings.scorer is not None or section is None:
        return cls(settings, shape)
    if reason := refused_beside(shape.kinds, carried=True):
        raise ConfigError(f"{shape.model_type}: {reason}: give a scorer")
    source = "the model's config, section kvpop"
    policy = cls(settings, shape, checkpoint=parse_config(section, source))
    for layer, tensors in enumerate(scorer_tensors(model.name_or_path, policy.config)):
        policy.set_tensors(layer, tensors)
    return policy


def flags_to_arguments(message: str) -> str:
    """Return an error message in which command-line flags are replaced by the matching arguments."""
    message = message.replace(f" in {ADDITIONAL_CONFIG_KEY}", "").replace("--max-model-len", "max_length")
    message = message.replace("give the folder of a decoder-only", "choose a decoder-only")
    return re.sub(r"--kv-([a-z-]+)", lambda match: match[1].replace("-", "_"), message)
