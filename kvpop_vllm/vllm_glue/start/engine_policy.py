"""Resolution of a VllmConfig into a policy, once per config and process."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary
from vllm.config import get_current_vllm_config_or_none

from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, AUTO, ConfigError
from kvpop_vllm.hub import local_folder
from kvpop_vllm.supported import ARCHITECTURES, EQUAL, HYBRID, RECURRENT, STOCK_ARCHITECTURES, family_of, refused_beside
from kvpop_vllm.vllm_glue.start import published

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from kvpop_vllm.policies import Policy

_policies = WeakIdKeyDictionary()
"""Resolved policy of each config."""


def requested(config: VllmConfig | EngineArgs) -> bool:
    """Return whether a policy was asked for; imports nothing of this package but the settings."""
    additional = config.additional_config
    return isinstance(additional, dict) and additional.get(ADDITIONAL_CONFIG_KEY) is not None


def with_local_scorer(additional_config: dict) -> dict:
    """Return an ``additional_config`` with a policy, in which a scorer that is named as on the hub is its local folder.

    All processes then read the same snapshot.
    """
    from kvpop_vllm import policies

    section = additional_config[ADDITIONAL_CONFIG_KEY]
    settings = policies.parse_settings(section)
    if settings.scorer is None or policies.get(settings.policy).scorer_kind is None:
        return additional_config
    return additional_config | {ADDITIONAL_CONFIG_KEY: section | {"scorer": str(local_folder(settings.scorer))}}


def current_config() -> VllmConfig | None:
    """Return the config that vLLM sets up an engine with now if it asks for a policy, else None."""
    vllm_config = get_current_vllm_config_or_none()
    return vllm_config if vllm_config is not None and requested(vllm_config) else None


def engine_policy(vllm_config: VllmConfig) -> Policy:
    """Return the resolved policy of this engine, which is the same object for every layer.

    Raises:
        ConfigError: the policy cannot work with this model.
    """
    if vllm_config not in _policies:
        _policies[vllm_config] = _resolve(vllm_config)
    return _policies[vllm_config]


def takes_snapshots(policy: Policy) -> bool:
    """Return whether requests can go on from what others held."""
    return _no_snapshots(policy) is None


def describe(vllm_config: VllmConfig) -> list[str]:
    """Return what an engine's policy keeps of each request, in one to eight lines; ``auto`` is named first."""
    policy = engine_policy(vllm_config)
    roles, folder = policy.retention, policy.settings.calibration
    shared = "" if policy.allocator == "uniform" else f" in the mean, shared by {policy.allocator}"
    corrected = ", outputs corrected by the moments of evicted tokens" if policy.uses_moment_correction else ""
    early = "" if policy.threshold is None else f", scores below {policy.threshold:g} evicted with the window"
    lines = [
        f"--kv-policy {policy.name}: {roles.budget} tokens per KV head ({roles.sinks} sinks, window {roles.window},"
        f" {roles.topk} long-range){shared}{early}{corrected}"
    ]
    if vllm_config.additional_config[ADDITIONAL_CONFIG_KEY].get("policy") == AUTO:
        best = "which needs no calibration and prefills in chunks ('kvpop calibrate' may find a better policy)"
        lines.insert(0, f"--kv-policy auto is {policy.name}, {best if folder is None else f'as {folder} recommends'}")
    if policy.uses_calibration and policy.calibration.decided_by not in (None, policy.name):
        equal = "" if policy.calibration.shares else ", and are not for this policy: heads have equal ones"
        lines.append(f"shares of {folder} were measured under {policy.calibration.decided_by}{equal}")
    if speculation := vllm_config.speculative_config:
        drafts = speculation.num_speculative_tokens
        lines.append(
            f"speculative decoding ({speculation.method}): up to {drafts} drafts of a request are staged in its blocks of state,"
            " and evict only when they are accepted"
        )
        if policy.in_rounds and _rounds_leave_no_drafts(policy):
            lines.append("no draft is verified, since rounds come within every two tokens: raise --kv-budget")
    if policy.model.kinds:
        lines.append(_layers_of(policy.model))
        family = family_of(vllm_config.model_config.hf_text_config)
        if family is None or family.state != EQUAL:
            lines.append(
                f"no test serves models of type {policy.model.model_type} (docs/models.md): compare their answers"
            )
    if not policy.compresses and policy.protect is not True:
        if reason := _no_snapshots(policy):
            lines.append(f"a turn of a chat computes all of its tokens that are not protected, since {reason}")
        elif vllm_config.cache_config.enable_prefix_caching:
            lines.append(
                "a prompt that goes on from an earlier request costs its new tokens (--no-enable-prefix-caching turns it off)"
            )
    if policy.compresses:
        lines.append("prompts are held whole until their end, and compressed then; --max-model-len bounds them")
    elif policy.protect:
        part = "each prompt" if policy.protect is True else f"the first {policy.protect} tokens of each conversation"
        lines.append(
            f"protected: {part} (--kv-protect-prompt); --max-model-len bounds it, lower that if the pool is too small"
        )
    return lines


def _no_snapshots(policy: Policy) -> str | None:
    """Return why requests cannot go on from what others held, None if they can."""
    if {RECURRENT, HYBRID} & {*policy.model.kinds}:
        return "snapshots hold no recurrent states"
    if not policy.takes_snapshots:
        return "prompts are compressed at their end" if policy.compresses else "rounding decides between equal tokens"
    return None


def _rounds_leave_no_drafts(policy: Policy) -> bool:
    """Return whether no request with the server's budget has room for a draft; after its first token it has most."""
    from kvpop_vllm.rules.rounds import room_for_drafts

    equal = policy.allocator == "uniform"
    return not room_for_drafts(policy.round_length, policy.retention.topk, equal, position=0)


def _layers_of(shape) -> str:
    """Return the line that names the layers of a model that a policy acts on, and what the others are."""
    counts, layers = Counter(shape.kinds), ", ".join(map(str, shape.layers))
    acted_on = f"those with full attention ({layers})" if layers else "in all their full attention"
    stock = [
        f"the states of {counts[kind]}" if kind == HYBRID else f"{counts[kind]} of {kind}" for kind in shape.stock_kinds
    ]
    return f"it acts on {shape.num_layers} of {shape.model_layers} layers, {acted_on}; {' and '.join(stock)} are as without a policy"


def checkpoint_section(vllm_config: VllmConfig) -> dict | None:
    """Return the ``kvpop`` section of a full checkpoint's ``config.json``, or None."""
    return getattr(vllm_config.model_config.hf_text_config, "kvpop", None)


def policy_from_checkpoint(vllm_config: VllmConfig) -> Policy | None:
    """Return the engine's policy if its scorer is part of the model's own weights, else None."""
    if not requested(vllm_config):
        return None
    policy = engine_policy(vllm_config)
    return policy if policy.scorer_kind is not None and policy.settings.scorer is None else None


def check_checkpoint(vllm_config: VllmConfig) -> None:
    """Check names and shapes of a full checkpoint's scorer tensors before any weight is loaded.

    They are read from the headers of the safetensors files. Weights that are stored elsewhere or in another
    format are checked when they are loaded.

    Raises:
        ConfigError: a tensor is missing or has a wrong name or shape, the architecture does not carry
            scorers, the files cannot be read, or ``--load-format dummy`` skips the weights.
    """
    policy = policy_from_checkpoint(vllm_config)
    if policy is None:
        return
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    from kvpop_vllm.scorers import checkpoint

    model = vllm_config.model_config
    if reason := refused_beside(policy.model.kinds, carried=True):
        raise ConfigError(f"{model.model}: {reason}: give --kv-scorer DIR")
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError(
            f"--load-format dummy brings no scorer for --kv-policy {policy.name}: leave it out, or give --kv-scorer DIR"
        )
    if not set(model.architectures) & set(ARCHITECTURES.values()):
        raise ConfigError(
            f"{model.model}: config.json has a kvpop section, so architectures must be one of {', '.join(ARCHITECTURES.values())}, not {', '.join(model.architectures)}"
        )
    try:
        header = get_safetensors_params_metadata(model.model, revision=model.revision)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"--model {model.model}: its safetensors files cannot be read ({error})") from None
    shapes = {name: tuple(info["shape"]) for name, info in header.items() if name != "__metadata__"}
    if shapes:
        checkpoint.layers_of(policy.config, shapes, model.model, checkpoint.check_shapes)


def register_models() -> None:
    """Register the model types of full checkpoints with transformers, and their classes with vLLM."""
    from vllm import ModelRegistry

    from kvpop_vllm import model_types

    model_types.register()
    for name in set(ARCHITECTURES.values()) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"kvpop_vllm.vllm_glue.run.models:{name}")


def choose_model_class(vllm_config: VllmConfig) -> None:
    """Select the model class of full checkpoints for a model of DMS with eviction projections, which it leaves out.

    They are imported into a scorer folder by ``kvpop import``.
    """
    model = vllm_config.model_config
    if getattr(model.hf_config, "dms_separate_alpha", False):
        model.hf_config.architectures = [STOCK_ARCHITECTURES.get(name, name) for name in model.architectures]


def _resolve(vllm_config: VllmConfig) -> Policy:
    from kvpop_vllm import policies
    from kvpop_vllm.model_shape import ModelShape
    from kvpop_vllm.scorers import parse_config

    settings = policies.parse_settings(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])
    cls = policies.get(settings.policy)
    model = vllm_config.model_config
    if model.original_max_model_len == -1 and settings.compression is not None and not cls.keeps_all:
        raise ConfigError(
            "--kv-compression makes the budget of --max-model-len, which -1 and auto fit to the memory only later: give a "
            "fixed --max-model-len, or --kv-budget"
        )
    shape, on_gpu = ModelShape.of_engine(model), vllm_config.device_config.device_type != "cpu"
    if cls.scorer_kind is None:
        return cls(settings, shape, server_budget_only=on_gpu)
    if settings.scorer is None and published.serves_published(vllm_config):
        of_checkpoint = dataclasses.replace(settings, scorer=published.folder_of(vllm_config))
        return cls(of_checkpoint, shape, server_budget_only=on_gpu)
    section = None if published.serves_published(vllm_config) else checkpoint_section(vllm_config)
    checkpoint = parse_config(section, f"{model.model}: config.json, section kvpop") if section else None
    return cls(settings, shape, checkpoint=checkpoint, server_budget_only=on_gpu)
