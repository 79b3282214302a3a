"""Layers with sliding windows or chunks under transformers, on which a policy does not act."""

from collections.abc import Sequence

import torch

from kvpop_vllm.local_attention import Part, attend_parts, parts_of


def parts_of_pass(kind: str, size: int, past: int, length: int, ends: torch.Tensor) -> list[Part]:
    """Return the parts of a pass in the layers of a kind, whose keys are those of :class:`LocalLayer` and of the pass.

    Args:
        kind: kind of the layers, as in transformers' configs.
        size: tokens of a window, the query's own included, or of a chunk.
        past: columns before the pass, pads included.
        length: columns of the pass.
        ends: ``[R]`` int64, tokens of each row after the pass. They are its last columns, the others are pads.
    """
    columns = torch.arange(-min(past, size - 1), length, device=ends.device)
    keys = (columns + (ends.unsqueeze(1) - length)).clamp_min(-1)
    return list(parts_of(kind, size, keys[:, -length:], keys))


class LocalLayer:
    """Keys and values of the latest tokens of R rows in one layer.

    Args:
        size: tokens of a window, the query's own included, or of a chunk.
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
            parts: parts of the pass, see :func:`parts_of_pass`.
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
