"""Digests by which a saved cache knows its model, its policy and its files again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kvpop_vllm.model_shape import rope_of, shape_of

SAMPLES = 64
"""Fewest values of each larger weight that the digest of a model covers."""


def model_properties(config: Any) -> dict[str, Any]:
    """Return what a model's config says of its keys and values, as JSON has it."""
    text = config.get_text_config()
    names = "vocab_size", "intermediate_size", "sliding_window", "attention_chunk_size"
    sizes = {name: getattr(text, name, None) for name in names}
    return json.loads(json.dumps(shape_of(text, "the model's config") | sizes | {"rope": rope_of(text) or {}}))


def weights_digest(decoder: torch.nn.Module) -> str | None:
    """Return a sha256 of samples of each weight of a decoder in memory, or None if some are not there.

    The weights in memory count, because they may have adapters, or no folder.
    """
    weights = dict(decoder.named_parameters())
    if any(weight.is_meta for weight in weights.values()):
        return None
    samples = {name: _samples(weight) for name, weight in weights.items()}
    return digest_of(samples)


def _samples(weight: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Return a weight's shape, and at least 64 of its values, of all columns, if it has as many."""
    step = max(1, weight.numel() // SAMPLES)
    return list(weight.shape), weight.detach().reshape(-1)[:: step - 1 + step % 2]  # odd


def digest_of(value: Any) -> str:
    """Return a sha256 of tensors, modules, dataclasses and plain values, in any nesting."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, torch.nn.Module):
        settings = {
            name: x for name, x in vars(value).items() if isinstance(x, bool | int | float | str) or is_dataclass(x)
        }
        settings.pop("training")
        _add(digest, {"type": type(value).__name__, "settings": settings, "tensors": dict(value.state_dict())})
    elif is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        _add(digest, {"type": type(value).__name__, "fields": named})
    elif isinstance(value, Mapping):
        _add(digest, [part for item in sorted(value.items(), key=lambda item: str(item[0])) for part in item])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for part in value:
            _add(digest, part)
    else:
        digest.update(f"{value!r};".encode())
