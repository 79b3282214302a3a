"""Chunks of several requests that are prefilled in one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch


def send(values: list, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of the host on a device, which the host does not wait for."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device.type == "cpu" else tensor.to(device)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of R requests, one after another in a flat batch of tokens. All numbers are on the host.

    Attributes:
        starts: position of each chunk's first token.
        lengths: number of tokens of each chunk.
        budgets: ``[R, H]`` int32 on the CPU, B of each head.
        windows: w of each request.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    budgets: torch.Tensor
    windows: Sequence[int]
    _known: dict = field(default_factory=dict, repr=False)

    @classmethod
    def one(cls, start: int, length: int, budgets: torch.Tensor, window: int) -> Chunks:
        """Return a chunk of one request, with ``budgets [H]``."""
        return cls([start], [length], budgets.unsqueeze(0), [window])

    def __len__(self) -> int:
        return len(self.starts)

    def once(self, key: Hashable, make: Callable[[], Any]):
        """Return ``make()``, which is called once for each key: what all layers of a step have in common."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def one_by_one(run: Callable) -> Callable:
    """Return an implementation of ``prefill_chunk`` that runs the chunks one after another.

    Args:
        run: function ``(q, k, v, pages, row, start, budgets, *, rule, scale, gate_scores, prefix, keys)`` that runs the
            chunk of one request, whose pages are ``row [H, P]`` and budgets ``[H]``.
    """

    def run_all(q, k, v, pages, page_table, chunks, *, rule, scale, gate_scores=None, prefix=None, keys=None):
        parts, first = [], 0
        for r, (start, count, window) in enumerate(zip(chunks.starts, chunks.lengths, chunks.windows, strict=True)):
            cut, own = slice(first, first + count), slice(r, r + 1)
            ahead = None
            if prefix is not None and prefix.tokens[r]:
                ahead = prefix.of(own)
            part = run(
                q[cut],
                k[cut],
                v[cut],
                pages,
                page_table[r],
                start,
                chunks.budgets[r],
                rule=rule if window == rule.window else replace(rule, window=window),
                scale=scale,
                gate_scores=None if gate_scores is None else gate_scores[cut],
                prefix=ahead,
                keys=None if keys is None else keys[own],
            )
            parts.append(part)
            first += count
        return parts[0] if len(parts) == 1 else tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    run_all.__doc__ = run.__doc__
    return run_all
