"""Compactor files, format version 1: a trained compactor of one base model (:mod:`kvpop_vllm.compaction.still`).

A folder holds ``kvpop_compactor.json`` and ``kvpop_compactor.safetensors``, with the module's tensors in float16.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.compaction.base_model import check_base
from kvpop_vllm.compaction.cartridge import DTYPES, MODEL_RULES, MadeFor, digest_of
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.schemas import Schema, integer
from kvpop_vllm.tensor_files import reading, require_files, write_folder

SCHEMA = Schema(
    "compactor",
    "{name} has an impossible value {value!r}",
    "it misses key {name!r}",
    advice=": copy the compactor again",
)
CONFIG_NAME = "kvpop_compactor.json"
TENSORS_NAME = "kvpop_compactor.safetensors"
RULES = MODEL_RULES | {"slots": integer(1), "width": integer(1)}
"""Rules of single fields of a compactor's config."""


@dataclass(frozen=True, kw_only=True)
class CompactorConfig(MadeFor):
    """Contents of ``kvpop_compactor.json``.

    Attributes:
        slots: P, a multiple of 64.
        width: channels of the compactor's queries and keys, an even number.
    """

    schema = SCHEMA
    rules = RULES

    slots: int
    width: int

    def check(self, source: str) -> None:
        """Check all values. See :meth:`MadeFor.check`."""
        super().check(source)
        if self.slots % BLOCK_SLOTS or self.width % 2 or self.width > 2 * self.head_dim:
            raise ConfigError(
                f"{source}: slots {self.slots} or width {self.width} is impossible: copy the compactor again"
            )

    def build(self) -> Compactor:
        """Return an untrained compactor of these sizes."""
        return Compactor(self.num_layers, self.head_dim, self.slots, self.rope, self.width)


class StoredCompactor(NamedTuple):
    """A compactor in memory.

    Attributes:
        config: its config.
        module: the compactor, in float32.
        digest: sha256 of its two files.
    """

    config: CompactorConfig
    module: Compactor
    digest: str


def read_compactor(folder: str | Path, model: str | Path, slots: int | None = None) -> StoredCompactor:
    """Read and check a compactor. Nothing is loaded before names, shapes and dtypes are right.

    Args:
        folder: its folder.
        model: folder of the base model that it should be for.
        slots: P that it should have, None for any.
    """
    folder = Path(folder)
    path, tensors = folder / CONFIG_NAME, folder / TENSORS_NAME
    require_files(folder, CONFIG_NAME, TENSORS_NAME, kind="compactor", advice="train one: kvpop train-compactor")
    config = CompactorConfig.from_dict(read_json(path, "copy the compactor again"), str(path))
    check_base(config, model, f"the compactor {folder}", "compactor")
    if slots not in (None, config.slots):
        raise ConfigError(
            f"the compactor {folder} has {config.slots} slots, not {slots}: leave --slots out, or give another compactor"
        )
    # nothing is drawn, since all tensors are assigned below
    with torch.device("meta"):
        module = config.build()
    module.load_state_dict(_tensors(tensors, module.state_dict()), assign=True)
    return StoredCompactor(config, module.requires_grad_(False), digest_of(folder, CONFIG_NAME, TENSORS_NAME))


def _tensors(path: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in float32, checked against the names and shapes of ``expected``."""
    with reading(path), safe_open(path, "pt") as file:
        if wrong := sorted(set(file.keys()) ^ set(expected)):
            problem = "misses" if wrong[0] in expected else "has an unknown"
            raise ConfigError(f"{path} {problem} tensor {wrong[0]!r}: copy the compactor again")
        for name in file.keys():
            stored = file.get_slice(name)
            shape, expected_shape = tuple(stored.get_shape()), tuple(expected[name].shape)
            if shape != expected_shape or stored.get_dtype() not in DTYPES:
                raise ConfigError(
                    f"{path}: tensor {name} is {stored.get_dtype()} {shape}, expected F16 {expected_shape}: copy the compactor again"
                )
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}
    if bad := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
        raise ConfigError(f"{path}: tensor {bad} holds NaN or infinity: train the compactor again")
    return tensors


def write_compactor(folder: str | Path, config: CompactorConfig, module: Compactor) -> None:
    """Write a compactor's folder, whole or not at all."""
    folder = Path(folder)
    named = {name: tensor.detach().cpu().half().contiguous() for name, tensor in module.state_dict().items()}
    if bad := next((name for name, tensor in named.items() if not bool(tensor.isfinite().all())), None):
        raise ConfigError(f"tensor {bad} of the compactor is not finite in float16: train with a lower --lr")
    write_folder(folder, CONFIG_NAME, config.to_dict(), TENSORS_NAME, named)
