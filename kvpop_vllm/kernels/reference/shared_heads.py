"""Heads of a layer that divide its budget among them by their scores (Ada-KV; DESIGN "Shares by the data"), plain torch.

A head's share lies in its state, behind the scorer's and the moments: how many long-range slots it may fill, how many it has
filled, and which of the request's regions its slot pages are.
"""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import Pages, cdiv
from kvpop_vllm.kernels.reference.paging import HeadSlots

FREE = -1.0
"""In a table of regions: none."""


class SharedHeads:
    """The heads of one request during a step.

    Args:
        regions: ``[H, P]`` region numbers of the request, its state pages first; slot page p of head h as it would be with
            equal shares is number ``p H + h``. budget: B, the same for all before anything is divided.
    """

    def __init__(self, pages: Pages, regions: torch.Tensor, rule: RetentionRule, budget: int):
        self.pages, self.regions, self.rule, self.budget = pages, regions, rule, budget
        self.heads, self.slots = regions.shape[0], pages.layout.block_slots
        self.states = [HeadSlots(pages, regions[h], h, budget) for h in range(self.heads)]
        self.first = rule.state_floats(pages.layout.head_size) - rule.share_floats
        self.topk = budget - rule.first_long

    def start(self) -> None:
        """Equal shares."""
        own = cdiv(self.budget, self.slots)
        for h in range(self.heads):
            table = torch.full((self.rule.share_pages,), FREE)
            table[:own] = torch.arange(own) * self.heads + h
            self._store(h, torch.cat([torch.tensor([self.topk, 0.0]), table]))

    def capacity(self, h: int) -> int:
        return int(self._load(h)[0])

    def filled(self, h: int) -> int:
        return int(self._load(h)[1])

    def head(self, h: int) -> HeadSlots:
        """The slots that a head has now."""
        layout, (capacity, _, *table) = self.pages.layout, self._load(h).tolist()
        numbers = [int(n) for n in table[: self._pages(int(capacity))]]
        own = [int(self.regions[n % self.heads, layout.state_blocks + n // self.heads]) for n in numbers]
        row = torch.cat([self.regions[h, : layout.state_blocks], torch.tensor(own, dtype=torch.int32)])
        return HeadSlots(self.pages, row, h, self.rule.first_long + int(capacity))

    def set_filled(self, h: int, count: int) -> None:
        self._store(h, torch.tensor([float(count)]), 1)

    def set_capacities(self, capacities: list[int]) -> None:
        """New shares; pages that a head needs no more go to those that need more. No head may hold more than it may fill."""
        words = [self._load(h) for h in range(self.heads)]
        kept = [min(self._pages(int(w[0])), self._pages(new)) for w, new in zip(words, capacities, strict=True)]
        taken = {int(n) for w, pages in zip(words, kept, strict=True) for n in w[2 : 2 + pages]}
        total = (cdiv(self.budget, self.slots) + 1) * self.heads
        free = iter([n for n in range(total) if n not in taken])
        for h, (w, pages, new) in enumerate(zip(words, kept, capacities, strict=True)):
            w[0] = new
            w[2 + pages :] = FREE
            for page in range(pages, self._pages(new)):
                w[2 + page] = next(free)
            self._store(h, w)

    def _pages(self, capacity: int) -> int:
        return cdiv(self.rule.first_long + capacity, self.slots)

    def _load(self, h: int) -> torch.Tensor:
        return self.states[h].load_state(self.rule.share_floats, self.first)

    def _store(self, h: int, words: torch.Tensor, at: int = 0) -> None:
        self.states[h].store_state(words, self.first + at)


def divide(effective: list[list[tuple[float, int]]], topk: int, floor: tuple[int, int]) -> list[int] | None:
    """How many long-range slots each head may fill, or None where all that is ranked fits.

    The ``H k`` best of all heads are counted; a head gets its count, less the share ``floor`` of it, and that share of k.
    Of equal effective scores the newer token is better, and of one token that of the later head.

    Args:
        effective: per head the effective scores and positions of what a decision ranks. floor: alpha of Ada-KV as a fraction.
    """
    ranked = sorted(((*one, h) for h, own in enumerate(effective) for one in own), reverse=True)
    heads, (part, whole) = len(effective), floor
    if len(ranked) <= heads * topk:
        return None
    counts = [0] * heads
    for *_, h in ranked[: heads * topk]:
        counts[h] += 1
    shares, before, total = [], 0, 0
    for count in counts:
        total += (whole - part) * count + part * topk
        end = (2 * total + whole) // (2 * whole)  # rounded, so that all together are H k
        shares.append(end - before)
        before = end
    return shares
