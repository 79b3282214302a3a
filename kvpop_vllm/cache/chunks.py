"""Chunks of several requests that are prefilled in one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.requests import RequestSlots


def send(values: Sequence | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of the host on a device, which the host does not wait for."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        # from pageable memory a copy would wait
        tensor = tensor.pin_memory()
    return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor, non_blocking=True)


def once(self, key: Hashable, make: Callable[[], Any]):
    """Return ``make()``, which is called once for each key: what all layers of a step have in common."""
    if key not in self._memo:
        self._memo[key] = make()
    return self._memo[key]


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
        prefix: prefixes of the requests, with their numbers on the CPU, None if no request has one.
        seeds: ``[R]`` int64, seeds of the draws, None if nothing is drawn.
        after: what each request is after the end of its prompt, if the chunk is part of a prompt that is compressed
            there, else None.
        closes: True if the chunk ends with the request's prompt, which is compressed right after it.
        made_table: ``[R, F]`` int32, blocks of the slots that are made of prompts, None if none is compressed.
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
    prefix: Prefix | None = None
    seeds: torch.Tensor | None = None
    after: Sequence[RequestSlots | None] = ()
    closes: Sequence[bool] = ()
    made_table: torch.Tensor | None = None
    _memo: dict = field(default_factory=dict, init=False, repr=False)

    once = once

    @classmethod
    def of_request(cls, start: int, length: int, budgets: torch.Tensor, window: int) -> Chunks:
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
        first, row = self.firsts[r] + start - self.starts[r], slice(r, r + 1)
        names = ("budgets", "table", "seeds", "made_table", "windows", "slots", "follows", "after", "closes")
        columns = {name: None if (x := getattr(self, name)) is None else x[row] for name in names}
        columns["prefix"] = None if self.prefix is None else self.prefix.of(row)
        place = {"firsts": [first], "tokens": slice(first, first + end - start)}
        return replace(self, starts=[start], lengths=[end - start], **columns, **place)
