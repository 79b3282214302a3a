"""Roles of the slots of a fixed budget (DESIGN "The rule"). This module needs no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class Retention:
    """Roles of the slots of a KV head, ``budget = sinks + window + topk`` in number.

    Slots ``[0, s)`` are sinks, ``[s, s + w)`` a ring of the newest tokens, ``[s + w, B)`` long-range slots.
    After a protected prefix of p tokens these are the slots of the tail, which begins with token p and has
    no sinks.

    Attributes:
        budget: B.
        sinks: s.
        window: w.
        first: p, the first token that has a slot here.
        step: n, the age in tokens at which a score decays once more (only used where whole sequences are scored).
    """

    budget: int
    sinks: int
    window: int
    first: int = 0
    step: int = 1

    @property
    def topk(self) -> int:
        """Number of long-range slots, k."""
        return self.budget - self.first_long

    @property
    def first_long(self) -> int:
        """Index of the first long-range slot, ``s + w``."""
        return self.sinks + self.window

    @property
    def first_evictable(self) -> int:
        """First token that may ever be evicted, ``p + s``."""
        return self.first + self.sinks

    def ring_slot(self, t: int) -> int:
        """Return the slot that token t is written to: its sink slot or its ring slot."""
        offset = t - self.first_evictable
        return self.sinks + offset % self.window if offset >= 0 else t - self.first

    def after_prefix(self, prefix: int) -> Self:
        """Return the roles of the tail after ``prefix`` protected tokens: same w and k, no sinks."""
        return replace(self, sinks=0, first=prefix, budget=self.budget - self.sinks) if prefix else self
