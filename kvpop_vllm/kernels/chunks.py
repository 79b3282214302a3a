"""Chunks of several requests that are prefilled in one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvpop_vllm.kernels.pages import Pages, Prefix
from kvpop_vllm.requests import RequestSlots


def send(values: Sequence | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of the host on a device, which the host does not wait for."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of R requests, in the order of their tokens. Numbers are on the host.

    Kernels read the first four. The others say where tokens and pages lie in a step, see :mod:`kvpop_vllm.cache.step`.

    Attributes:
        starts: position of each chunk's first token.
        lengths: number of tokens of each chunk.
        budgets: ``[R, H]`` int32 on the CPU, B of each head.
        windows: w of each request.
        firsts: index of each chunk's first token in the flat batch of the step.
        tokens: indices of all tokens in the flat batch; a slice if they lie one after another.
        slots: slots of each chunk's request, as the kernels take them.
        follows: True if the previous chunk of the step ends with the request's prompt, which is compressed there. Heads
            that divide their slots have pages of their own only after that.
        table: ``[R, H, P]`` int32, pages of the tails.
        prefixes: ``[R]`` int64 on the CPU, p of each request.
        prefix_table: ``[R, F]`` int32, blocks of the prefixes; None if no request has one.
        made: ``[R]`` int64 on the CPU, made slots of each prefix; None if there are none.
        seeds: ``[R]`` int64, seeds of the draws; None if nothing is drawn.
        after: what each request is after the end of its prompt, if the chunk is part of a prompt that is compressed
            there, else None.
        made_table: ``[R, F]`` int32, blocks of the slots that are made of prompts; None if none is compressed.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    budgets: torch.Tensor
    windows: Sequence[int]
    firsts: Sequence[int] = ()
    tokens: slice | torch.Tensor | None = None
    slots: Sequence[RequestSlots] = ()
    follows: Sequence[bool] = ()
    table: torch.Tensor | None = None
    prefixes: torch.Tensor | None = None
    prefix_table: torch.Tensor | None = None
    made: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    after: Sequence[RequestSlots | None] = ()
    made_table: torch.Tensor | None = None
    _known: dict = field(default_factory=dict, repr=False)

    @classmethod
    def one(cls, start: int, length: int, budgets: torch.Tensor, window: int) -> Chunks:
        """Return a chunk of one request, with ``budgets [H]``."""
        return cls([start], [length], budgets.unsqueeze(0), [window])

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ends(self) -> list[int]:
        """Position after the last token of each chunk."""
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @property
    def compresses(self) -> bool:
        """True if a chunk is part of a prompt that is compressed at its end."""
        return any(slots is not None for slots in self.after)

    def part(self, r: int, start: int | None = None, end: int | None = None) -> Chunks:
        """Return the tokens at positions ``[start, end)`` of chunk r, by default all, as chunks of one request."""
        start, end = self.starts[r] if start is None else start, self.ends[r] if end is None else end
        first, one = self.firsts[r] + start - self.starts[r], slice(r, r + 1)
        tables = ("budgets", "table", "prefixes", "prefix_table", "made", "seeds", "made_table")
        own = {name: None if (x := getattr(self, name)) is None else x[one] for name in tables}
        own |= {name: getattr(self, name)[one] for name in ("windows", "slots", "follows", "after")}
        place = {"firsts": [first], "tokens": slice(first, first + end - start)}
        return replace(self, starts=[start], lengths=[end - start], **own, **place, _known={})

    def prefix(self, blocks: Pages) -> Prefix | None:
        """Return the prefixes as the kernels take them, or None; ``blocks`` are the layer's pages by block."""
        return None if self.prefix_table is None else Prefix(blocks, self.prefix_table, self.prefixes, self.made)

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
