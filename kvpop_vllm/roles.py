"""Roles of the slots of a fixed budget (DESIGN "The rule"). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


class SlotRoles:
    """Sinks ``[0, s)``, a ring ``[s, s + w)`` of the newest tokens, and long-range slots from there to B.

    Attributes:
        sinks: s. window: w.
    """

    sinks: int
    window: int

    @property
    def first_long(self) -> int:
        """Index of the first long-range slot, ``s + w``."""
        return self.sinks + self.window

    def ring_slot(self, t: int) -> int:
        """Return the slot that token t is written to: its sink slot, or its ring slot."""
        return t if t < self.sinks else self.sinks + (t - self.sinks) % self.window


@dataclass(frozen=True)
class Retention(SlotRoles):
    """Slots per KV head: ``budget = sinks + window + topk``."""

    budget: int
    sinks: int
    window: int

    @property
    def topk(self) -> int:
        """Number of long-range slots, k."""
        return self.budget - self.first_long
