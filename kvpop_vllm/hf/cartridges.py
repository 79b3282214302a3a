"""Cartridges in front of the rows of a KVpopCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import torch

from kvpop_vllm.compaction.cartridge import check_base, layer_at, read_cartridge
from kvpop_vllm.config import ConfigError
from kvpop_vllm.policies import Policy


@dataclass(frozen=True)
class Slots:
    """Slots with which every row begins.

    Attributes:
        count: P, number of slots.
        layers: keys and values ``[H, P, D]`` and biases ``[H, P]`` of each layer, float32.
    """

    count: int
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def slots_of(folders: str | PathLike | Sequence[str | PathLike], model: torch.nn.Module, policy: Policy) -> Slots:
    """Return the slots of cartridges that stand one behind another.

    Args:
        folders: a cartridge's folder, or several in order.
        model: model of transformers.
        policy: policy of the cache.

    Raises:
        ConfigError: a cartridge cannot be read, was made for another model, or the policy compresses prompts.
    """
    folders = [folders] if isinstance(folders, str | PathLike) else list(folders)
    if folders and policy.compresses:
        raise ConfigError(
            f"{policy.name} gives up what stands before a prompt's end: leave cartridge out, or choose another policy"
        )
    slots, parts = 0, []
    for folder in folders:
        config, layers, _ = read_cartridge(folder)
        check_base(config, model.config.get_text_config(), str(folder))
        parts.append([layer_at(config, layer, slots) for layer in layers])
        slots += config.slots
    joined = [tuple(torch.cat(same, 1) for same in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
    return Slots(slots, joined)
