"""Layers with sliding windows or chunks under transformers, on which a policy does not act."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpop_vllm.local_attention import Part, attend_parts, parts_of


class LocalPositions:
    """Positions of the latest tokens of R rows, which all layers of a kind hold keys and values of.

    Args:
        kind: kind of the layers, as in transformers' configs.
        size: tokens of a window, the query's own included, or of a chunk.
    """

    def __init__(self, kind: str, size: int):
        self.kind, self.size = kind, size
        self.positions: torch.Tensor | None = None

    def parts(self, positions: torch.Tensor, counts: list[int], device: torch.device) -> list[Part]:
        """Return the parts of the next pass, and take in its positions.

        Args:
            positions: ``[R, L]`` int64, positions of the tokens.
            counts: number of tokens of each row; they are its last columns, the others are pads.
            device: device of the layers.
        """
        length, queries = positions.shape[1], positions.to(device)
        if min(counts) < length:
            pads = torch.arange(length) < length - torch.tensor(counts).unsqueeze(1)
            queries = queries.masked_fill(pads.to(device), -1)
        keys = queries if self.positions is None else torch.cat([self.positions.to(device), queries], 1)
        self.positions = latest(keys, 1, self.size)
        return list(parts_of(self.kind, self.size, queries, keys))


class LocalLayer:
    """Keys and values of the latest tokens of R rows in one layer.

    Args:
        size: see :class:`LocalPositions`.
    """

    def __init__(self, size: int):
        self.size = size
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        parts: Sequence[Part],
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of the next columns, and keep those that later queries may see.

        Args:
            q: ``[R, Hq, L, D]``.
            k: ``[R, H, L, D]``.
            v: ``[R, H, L, D]``.
            scale: factor on q . k.
            parts: parts of the pass, see :meth:`LocalPositions.parts`.
            sink_logits: ``[Hq]``, logits of the model's attention sinks, or None.

        Returns:
            ``[R, Hq, L, D]``, any value for pads.
        """
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v = latest(k, 2, self.size), latest(v, 2, self.size)
        return attend_parts(q, k, v, scale, parts, sink_logits)

    def allocated_bytes(self) -> int:
        """Return the bytes of the keys and values."""
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes


def latest(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return a copy of the last columns that the next query of a window of ``size`` tokens may see."""
    columns = min(x.shape[axis], size - 1)
    return x.narrow(axis, x.shape[axis] - columns, columns).clone()  # a view would hold the whole pass
