"""Access to the slots of one request and head through a page-table row, for the reference kernels."""

import torch

from kvpop_vllm.cache.pages import Pages, Prefix
from kvpop_vllm.kernels.ops import RetentionRule, StepOrderError


def protected(prefix: Prefix | None, r: int) -> int:
    """Return the number of protected tokens of request r."""
    return 0 if prefix is None else int(prefix.tokens[r])


def check_tokens_seen(pages: Pages, page_table: torch.Tensor, starts: list[int], prefix: Prefix | None) -> None:
    """Check that each request's first position equals the ``tokens_seen`` of its pages.

    A step at or below the end of the prefix (position 0 without one) may start on pages with any content.

    Raises:
        StepOrderError: they differ; nothing has been written.
    """
    first = pages.layout.state_blocks
    for r, start in enumerate(starts):
        if start <= protected(prefix, r):
            continue
        for h in range(pages.layout.num_kv_heads):
            tokens_seen = int(pages.position[page_table[r, h, first], h, 0])
            if tokens_seen != start:
                raise StepOrderError(
                    f"request {r}: step starts at position {start}, but its cache has seen {tokens_seen} tokens"
                )


def check_staged(pages: Pages, page_table: torch.Tensor, starts: list[int], prefix: Prefix | None) -> list[int]:
    """Check that the drafts before each request's first position are staged, and return each ``tokens_seen``.

    A step at or below the end of the prefix (position 0 without one) may start on pages with any content. It counts as
    one whose cache has seen all tokens before it.

    Raises:
        StepOrderError: a start is not in ``[tokens_seen, tokens_seen + staged]`` of a head; nothing has been written.
    """
    first, drafts, counts = pages.layout.state_blocks, pages.layout.drafts, list(starts)
    for r, start in enumerate(starts):
        for h in range(pages.layout.num_kv_heads if start > protected(prefix, r) else 0):
            counts[r] = count = int(pages.position[page_table[r, h, first], h, 0])
            places = (int(pages.draft(page_table[r, h], h, i).position) for i in range(drafts))
            staged = next((i for i, position in enumerate(places) if position != count + i), drafts)
            if not count <= start <= count + staged:
                raise StepOrderError(
                    f"request {r}: step starts at position {start}, but its cache has seen {count} tokens and holds"
                    f" {staged} staged drafts"
                )
    return counts


class HeadSlots:
    """Slots and state of one KV head of one request.

    Args:
        pages: the layer's cache.
        row: ``[P]`` int32 block numbers, state blocks first.
        head: index of the KV head.
        budget: B.
    """

    def __init__(self, pages: Pages, row: torch.Tensor, head: int, budget: int):
        layout = pages.layout
        self.pages, self.head, self.budget, self.n = pages, head, budget, layout.block_slots
        self.state_row, self.slot_row = row[: layout.state_blocks].tolist(), row[layout.state_blocks :].tolist()

    def _at(self, slot: int) -> tuple[int, int, int]:
        return self.slot_row[slot // self.n], self.head, slot % self.n

    def k(self, slot: int) -> torch.Tensor:
        """Return the key ``[D]`` in a slot."""
        return self.pages.k[self._at(slot)]

    def v(self, slot: int) -> torch.Tensor:
        """Return the value ``[D]`` in a slot."""
        return self.pages.v[self._at(slot)]

    def score(self, slot: int) -> float:
        """Return the score field of a slot."""
        return float(self.pages.score[self._at(slot)])

    def move(self, source: int, target: int, score: float, position: int) -> None:
        """Copy key and value of slot ``source`` to slot ``target``, with this score and position."""
        self.write(target, self.k(source), self.v(source), score, position)

    def write(self, slot: int, k, v, score: float, position: int) -> None:
        """Write key, value, score and position of a slot."""
        index = self._at(slot)
        self.pages.k[index], self.pages.v[index], self.pages.score[index] = k, v, score
        self.pages.position[index] = position

    def in_use(self, rule: RetentionRule, q: int) -> int:
        """Return the number of slots in use before the step at ``q``.

        With a threshold, the position field of slot 1 holds the number of filled long-range slots.
        """
        if rule.threshold is None or q - rule.first <= rule.first_long:
            return min(q - rule.first, self.budget)
        return rule.first_long + int(self.pages.position[self._at(1)])

    def set_counts(self, rule: RetentionRule, tokens_seen: int, in_use: int) -> None:
        """Write the counts in the position fields of slots 0 and 1.

        Call this after all positions have been written.
        """
        self.pages.position[self._at(0)] = tokens_seen
        if rule.threshold is not None:
            self.pages.position[self._at(1)] = max(0, in_use - rule.first_long)

    def put_mass(self, slots: torch.Tensor, mass: torch.Tensor, add: bool) -> None:
        """Write ``mass [n]`` to the score fields of ``slots [n]``, or add it to them."""
        indices = self._all_at(slots)
        self.pages.put(self.pages.score, indices, self.pages.score[indices] + mass if add else mass)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[n, D]`` of ``slots [n]``."""
        indices = self._all_at(slots)
        return self.pages.k[indices], self.pages.v[indices]

    def long_range(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores ``[B - first]`` float32 and positions int64 of the slots from ``first`` on."""
        indices = self._all_at(torch.arange(first, self.budget))
        return self.pages.score[indices], self.pages.position[indices].long()

    def _all_at(self, slots: torch.Tensor):
        return torch.tensor(self.slot_row)[slots // self.n], self.head, slots % self.n

    def load_state(self, floats: int, first: int = 0) -> torch.Tensor:
        """Return a copy ``[floats]`` of the head's state from offset ``first`` on."""
        return self.pages.state[self.state_row, self.head].flatten()[first : first + floats].clone()

    def store_state(self, state: torch.Tensor, first: int = 0) -> None:
        """Write ``state`` to the head's state from offset ``first`` on."""
        region = self.pages.state.shape[-1]
        words = self.pages.state[self.state_row, self.head].flatten()
        words[first : first + len(state)] = state
        for i, block in enumerate(self.state_row):
            self.pages.state[block, self.head] = words[i * region : (i + 1) * region]
