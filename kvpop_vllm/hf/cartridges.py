"""Cartridges in front of the rows of a KVpopCache.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import torch

from kvpop_vllm.compaction.base_model import check_base
from kvpop_vllm.compaction.cartridge import layer_at, read_cartridge
from kvpop_vllm.config import ConfigError
from kvpop_vllm.policies import Policy
from kvpop_vllm.supported import refused_beside


@dataclass(frozen=True)
class Slots:
    """Slots with which every row begins.

    Attributes:
        count: P, number of slots.
        layers: keys and values ``[H, P, D]`` and biases ``[H, P]`` of each layer, float32.
        head: ids of the prompt's beginning that the slots hold.
    """

    count: int
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    head: list[int]

    def check_inputs(self, inputs: torch.Tensor, counts: Sequence[int]) -> None:
        """Check that no row repeats what the slots hold.

        Args:
            inputs: ids ``[R, L]``, or embeddings, of which nothing is known.
            counts: tokens of each row, its last ones.

        Raises:
            ValueError: a row begins with the head.
        """
        if self.head and inputs.dim() == 2:
            for row, count in zip(inputs.tolist(), counts, strict=True):
                if row[len(row) - count :][: len(self.head)] == self.head:
                    raise ValueError(
                        f"the cartridge holds the first {len(self.head)} tokens of the chat: give the others, ids[:, {len(self.head)}:]"
                    )


def slots_of(folders: str | PathLike | Sequence[str | PathLike], model: torch.nn.Module, policy: Policy) -> Slots:
    """Return the slots of cartridges in a row.

    Args:
        folders: a cartridge's folder, or several in order.
        model: model of transformers.
        policy: policy of the cache.
    """
    folders = [folders] if isinstance(folders, str | PathLike) else list(folders)
    if folders and policy.compresses:
        raise ConfigError(
            f"{policy.name} gives up what stands before a prompt's end: leave cartridge out, or choose another policy"
        )
    if reason := refused_beside(policy.model.kinds, cartridge=folders):
        raise ConfigError(f"{policy.model.model_type}: {reason}: leave it out")
    slots, tensors, heads = 0, [], []
    for folder in folders:
        config, layers, _ = read_cartridge(folder)
        check_base(config, model.config.get_text_config(), str(folder))
        # each cartridge is turned to the position after those in front of it
        tensors.append([layer_at(config, i, layer, slots) for i, layer in enumerate(layers)])
        slots += config.slots
        heads.append(config.head)
        if heads[0] != config.head:
            raise ConfigError(
                f"{folder} and {folders[0]} were made with different system messages or places: leave one out"
            )
    joined = [tuple(torch.cat(pair, 1) for pair in zip(*layer, strict=True)) for layer in zip(*tensors, strict=True)]
    return Slots(slots, joined, heads[0] if heads else [])
