"""Pauses of drafts that are refused, on a CPU.

A CPU verifies drafts more slowly than it makes one token, and with a cache of fixed size the rest of a step is short. In
text that no draft foresees, drafts would be lost time. A GPU reads its weights once for all drafts and has graphs for
them, so it verifies all.
"""

LONGEST = 32
"""Most steps of a pause."""


class DraftPauses:
    """Steps of a request in which its drafts are left out.

    After two steps with drafts, all of which were refused, they are left out of the next 2 steps. While they go on to be
    refused, the pauses are twice as long each time, up to :data:`LONGEST` steps. An accepted draft ends this.
    """

    def __init__(self):
        self.refused, self.left = 0, 0  # steps refused in a row, steps that are left of the pause
        self.drafted_at: int | None = None  # position of the last step, if it had drafts

    def leaves_out(self, position: int, drafts: int) -> bool:
        """Return whether the drafts of a step are left out. Call it for each step.

        Args:
            position: position of the step's first token.
            drafts: number of drafts that are there.
        """
        if self.drafted_at is not None:
            self.refused = self.refused + 1 if position == self.drafted_at + 1 else 0
            self.left = min(2 ** (self.refused - 1), LONGEST) if self.refused > 1 else 0
        pauses = self.left > 0
        self.left -= pauses
        self.drafted_at = position if drafts and not pauses else None
        return pauses
