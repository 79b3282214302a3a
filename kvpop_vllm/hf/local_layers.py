"""Layers with sliding windows or chunks under transformers, on which a policy does not act."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpop_vllm.kernels.reference.masked_attention import masked_attention
from kvpop_vllm.supported import SLIDING

QUERIES = 512
"""Queries that attend together, which bounds the memory of masks."""


class LocalLayer:
    """Latest tokens of R rows in one layer whose queries see a sliding window, or their chunk.

    Args:
        kind: kind of the layer, as in transformers' configs.
        size: tokens of a window, the query's own included, or of a chunk.
    """

    def __init__(self, kind: str, size: int):
        self.kind, self.size = kind, size
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        positions: torch.Tensor,
        counts: list[int],
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of the next columns, and keep those that later queries may see.

        Args:
            q: ``[R, Hq, L, D]``.
            k: ``[R, H, L, D]``.
            v: ``[R, H, L, D]``.
            scale: factor on q . k.
            positions: ``[R, L]`` int64, positions of the tokens.
            counts: number of tokens of each row; they are its last columns, the others are pads.
            sink_logits: ``[Hq]`` logits of attention sinks, or None.

        Returns:
            ``[R, Hq, L, D]``, any value for pads.
        """
        pads = torch.arange(q.shape[2]) < q.shape[2] - torch.tensor(counts).unsqueeze(1)
        queries = positions.to(q.device).masked_fill(pads.to(q.device), -1)
        keys = queries
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
            keys = torch.cat([self.positions, keys], 1)
        before, columns, outputs = keys.shape[1] - q.shape[2], torch.arange(keys.shape[1], device=q.device), []
        for begin in range(0, q.shape[2], QUERIES):
            chunk = slice(begin, begin + QUERIES)
            near = slice(max(0, before + begin - self.size + 1), before + begin + QUERIES)
            mask = self._sees(queries[:, chunk].unsqueeze(2), keys[:, near].unsqueeze(1))
            mask |= columns[near] == columns[before:][chunk].unsqueeze(1)  # a pad sees itself
            parts = q[:, :, chunk], k[:, :, near], v[:, :, near]
            if sink_logits is None:
                outputs.append(scaled_dot_product_attention(*parts, mask.unsqueeze(1), scale=scale, enable_gqa=True))
            else:
                outputs.append(_attend_with_sinks(*parts, mask, scale, sink_logits))
        first = max(0, keys.shape[1] - self.size + 1)  # copies, since views would hold the whole pass
        self.k, self.v, self.positions = k[:, :, first:].clone(), v[:, :, first:].clone(), keys[:, first:].clone()
        return torch.cat(outputs, 2)

    def _sees(self, q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return whether queries at positions q see tokens at positions t; pads are at -1."""
        near = q - t < self.size if self.kind == SLIDING else q // self.size == t // self.size
        return near & (t <= q) & (t >= 0)

    def allocated_bytes(self) -> int:
        """Return the bytes of the keys and values."""
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes


def _attend_with_sinks(q, k, v, mask: torch.Tensor, scale: float, sink_logits: torch.Tensor) -> torch.Tensor:
    """Return attention ``[R, Hq, l, D]`` of ``q [R, Hq, l, D]`` over ``k, v [R, H, T, D]`` and the attention sinks.

    Args:
        mask: ``[R, l, T]``, True for tokens that a query sees.
        scale: factor on q . k.
        sink_logits: ``[Hq]``.
    """
    rows, heads = k.shape[:2]
    by_head = q.unflatten(1, (heads, -1)).flatten(0, 1)
    visible, sinks = mask.repeat_interleave(heads, 0), sink_logits.detach().view(heads, -1).repeat(rows, 1)
    out, _ = masked_attention(by_head, k.flatten(0, 1), v.flatten(0, 1), visible, scale, sink_logits=sinks)
    return out.to(q.dtype).view_as(q)
