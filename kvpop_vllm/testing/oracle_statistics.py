"""Expected logits of future queries (TriAttention, arXiv 2604.04921), part of the naive oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

DISTANCES = torch.tensor([2**i for i in range(17)])
"""Distances of future queries in tokens."""


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of the queries of one layer.

    Attributes:
        mean: ``[Hq, D]`` float64, mean query at position 0.
        norm: ``[Hq, F]`` float64, mean norms of the pairs of channels that rotate, then of each other channel.
        angles: angle per position of each pair of channels that rotates.
    """

    mean: torch.Tensor
    norm: torch.Tensor
    angles: list[float]

    def of_head(self, head: int, group: int) -> LayerStatistics:
        """Return the statistics of the ``group`` query heads of a KV head."""
        heads = slice(head * group, (head + 1) * group)
        return LayerStatistics(self.mean[heads], self.norm[heads], self.angles)

    def values(self, key: torch.Tensor, tokens: list[int], last: int) -> list[float]:
        """Return the value of each token among ``tokens`` after token ``last``.

        Args:
            key: ``[S, D]``, rotated keys of the KV head.
            tokens: the tokens that are ranked.
            last: newest token.
        """
        half, dtype = len(self.angles), key.dtype
        turns = torch.tensor(self.angles, dtype=torch.float64)
        scores = torch.zeros(len(self.mean), len(tokens), dtype=dtype)
        mean, norm = self.mean.to(dtype), self.norm.to(dtype)
        query = torch.complex(mean[:, :half], mean[:, half : 2 * half])
        excess, plain = norm[:, :half] - query.abs(), mean[:, 2 * half :]
        plain_excess = norm[:, half:] - plain.abs()
        for i, t in enumerate(tokens):
            rotated, unrotated = torch.complex(key[t, :half], key[t, half : 2 * half]), key[t, 2 * half :]
            # turned back to position 0
            base = rotated * _unit(-t * turns, dtype)
            # distances are counted from the last token + 1
            turned = _unit((last + 1 - t + DISTANCES).unsqueeze(1) * turns, dtype)  # [distances, pairs]
            later = query.unsqueeze(1) * turned
            scores[:, i] += (later * base.conj()).real.sum(2).mean(1)
            scores[:, i] += (excess * base.abs()).sum(1) + plain @ unrotated + plain_excess @ unrotated.abs()
        spread = (scores - scores.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()
        return ((scores - scores.mean(1, keepdim=True)) / spread.clamp_min(1e-6)).amax(0).tolist()


def _unit(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return complex numbers of norm 1, whose parts have ``dtype``, with these angles in radians."""
    return torch.complex(angles.cos().to(dtype), angles.sin().to(dtype))


def read_query_statistics(folder: str | Path) -> list[LayerStatistics]:
    """Return the statistics of every layer in a folder.

    Raises:
        ValueError: the rotation is another than the default one, or that of Gemma 4.
    """
    folder = Path(folder)
    config = json.loads((folder / "queries.json").read_text())
    tensors = load_file(folder / "queries.safetensors")
    rope, size = config["rope"], config["head_dim"]
    if rope["rope_type"] not in ("default", "proportional"):
        raise ValueError(f"the oracle knows no rotation of type {rope['rope_type']}")
    width = int(size * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "proportional":  # all channels are pairs; those beyond the part turn by nothing
        angles = [rope["rope_theta"] ** (-2 * i / size) if 2 * i < width else 0.0 for i in range(size // 2)]
    else:
        angles = [rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
    layers = []
    for i in range(config["num_layers"]):
        mean, norm = (tensors[f"layers.{i}.{name}"].double() for name in ("mean", "norm"))
        layers.append(LayerStatistics(mean, norm, [] if i in rope.get("unrotated_layers", ()) else angles))
    return layers
