"""Which slot of a fixed budget a token has, and when it is decided upon (DESIGN "The rule"). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    import torch


class SlotRoles:
    """Sinks ``[0, s)``, a ring ``[s, s + w + e - 1)``, and long-range slots from there to B.

    Tokens that have left the window are decided upon at positions q with ``(q + 1) % e == 0``, before q is written, and
    are seen until then. A ring slot whose token has been decided upon is stale until the next token is written to it; for
    e = 1 none ever is.

    Attributes:
        sinks: s. window: w. decide_every: e. phase: decisions fall where ``(q + 1 + phase) % e == 0`` instead.
    """

    sinks: int
    window: int
    decide_every: int
    phase: int = 0

    @property
    def ring(self) -> int:
        """Slots of the ring, ``w + e - 1``."""
        return self.window + self.decide_every - 1

    @property
    def first_long(self) -> int:
        """The first long-range slot."""
        return self.sinks + self.ring

    def ring_slot(self, t: int) -> int:
        """Where token t is written: its sink slot, or its ring slot."""
        return t if t < self.sinks else self.sinks + (t - self.sinks) % self.ring

    def taken(self, position: int) -> int:
        """Tokens ``[0, taken)`` have been taken into a scorer's state before ``position``."""
        return position - (position + self.phase) % self.decide_every

    def decided(self, position: int) -> int:
        """Tokens ``[s, decided)`` have been decided upon before ``position``."""
        return max(self.sinks, self.taken(position) - self.window)

    @property
    def prompt_grid(self) -> bool:
        """Whether decisions fall on the first generated token, and every e tokens before and after it."""
        return False

    def extent(self, position: int, budget: int) -> int:
        """Slots ``[0, extent)`` are in use before ``position``, stale ones among them; ``min(position, B)`` for e = 1."""
        long_range = self.decided(position) - self.sinks
        return min(self.first_long + long_range, budget) if long_range else position

    def extents(
        self, positions: torch.Tensor, budgets: torch.Tensor, phases: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """:meth:`extent` of many requests, on the tensors' device and without looking at them on the host.

        Args:
            positions: ``[R, 1]`` int64. budgets: ``[H]``. phases: ``[R, 1]`` of each request, where they are not this one's.

        Returns:
            ``[R, H]`` int64.
        """
        taken = positions - (positions + (self.phase if phases is None else phases)) % self.decide_every
        long_range = (taken - self.window).clamp_min(self.sinks) - self.sinks
        return (self.first_long + long_range).minimum(budgets).where(long_range > 0, positions)

    def held(self, position: int, budget: int) -> int:
        """How many tokens are held before ``position``; ``min(position, B)`` for e = 1."""
        decided = self.decided(position)
        kept = min(decided - self.sinks, budget - self.first_long)
        return min(position, self.sinks) + max(0, position - decided) + kept

    def for_prompt(self, prompt: int | None) -> Self:
        """The roles of a request whose prompt has so many tokens: where decisions are to fall on its first generated token,
        with their phase, else themselves."""
        return replace(self, phase=self.prompt_phase(prompt)) if self.prompt_grid else self

    def prompt_phase(self, prompt):
        """The phase that has decisions fall on the first token after so many; of a number or an integer tensor."""
        return -(prompt + 1) % self.decide_every

    def stale(self, slots: torch.Tensor, position: int) -> torch.Tensor:
        """Which of ``slots [n]`` are stale before ``position``."""
        newest = position - 1 - (position - 1 - slots) % self.ring  # of each ring slot
        return (slots >= self.sinks) & (slots < self.first_long) & (newest < self.decided(position))


@dataclass(frozen=True)
class Retention(SlotRoles):
    """Slots per KV head: ``budget = sinks + window + (decide_every - 1) + topk``."""

    budget: int
    sinks: int
    window: int
    decide_every: int = 1
    phase: int = 0
    prompt_grid: bool = False

    @property
    def topk(self) -> int:
        """k: long-range slots."""
        return self.budget - self.first_long
