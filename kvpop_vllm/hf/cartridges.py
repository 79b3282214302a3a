"""Cartridges in front of the rows of a KVpopCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import torch

from kvpop_vllm.compaction.cartridge import check_base, read_cartridge, turned
from kvpop_vllm.config import ConfigError
from kvpop_vllm.policies import Policy


@dataclass(frozen=True)
class Made:
    """Slots with which every row begins.

    Attributes:
        slots: P, number of slots.
        layers: keys and values ``[H, P, D]`` and biases ``[H, P]`` of each layer, float32.
    """

    slots: int
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def made_of(folders: str | PathLike | Sequence[str | PathLike], model: torch.nn.Module, policy: Policy) -> Made:
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
        shift = slots + config.slots - config.next_position
        parts.append([_placed(*layer, shift, config.rope) for layer in layers])
        slots += config.slots
    joined = [tuple(torch.cat(same, 1) for same in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
    return Made(slots, joined)


def _placed(k, v, bias, shift: int, rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a layer's keys turned by ``shift`` positions, its values and its biases, float32."""
    bias = torch.zeros(k.shape[:2]) if bias is None else bias
    return turned(k.float(), shift, rope), v.float(), bias
