"""Proposer of drafts, a given number of which are right: vLLM's ``custom_class``."""

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

DRAFTS = 4
CONFIG = {"method": "custom_class", "model": "engine.proposer.ForcedDrafts", "num_speculative_tokens": DRAFTS}
"""``speculative_config`` of an engine in this process, with DRAFTS drafts."""


class ForcedDrafts:
    """Proposer that knows how texts go on, and drafts the numbers of right tokens that a test sets.

    Attributes:
        texts: whole texts.
        counts: endless numbers of right tokens, one for each draft; further tokens are wrong.
    """

    texts: Iterable[list[int]] = ()
    counts: Iterator[int] = iter(())

    def __init__(self, vllm_config):
        pass

    def load_model(self, model) -> None:
        """Load nothing; vLLM asks for it on a CPU."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """Return the drafts of each request of the step."""
        return [
            self._draft(token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()) if sampled else []
            for i, sampled in enumerate(sampled_token_ids)
        ]

    def _draft(self, tokens: list[int]) -> list[int]:
        drafts = next((text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens), [])[:DRAFTS]
        right = next(self.counts) if drafts else 0
        return [token if i < right else (token + 1) % 256 for i, token in enumerate(drafts)]


class DrawnDrafts(ForcedDrafts):
    """Proposer that draws any of some tokens, and remembers what it has drafted.

    Attributes:
        tokens: tokens that may be drafted.
        drafted: the drafts after each text.
    """

    tokens: tuple[int, ...] = ()
    drafted: dict[tuple[int, ...], list[int]] = {}
    draw = random.Random(0)

    def _draft(self, tokens: list[int]) -> list[int]:
        return self.drafted.setdefault(tuple(tokens), self.draw.choices(self.tokens, k=DRAFTS))


@contextmanager
def drafting(texts: Iterable[list[int]], counts: Iterator[int]):
    """Have the proposer draft what follows in texts, with these numbers of right tokens."""
    ForcedDrafts.texts, ForcedDrafts.counts = [*texts], counts
    try:
        yield
    finally:
        ForcedDrafts.texts, ForcedDrafts.counts = (), iter(())


def mixed(seed: int = 0) -> Iterator[int]:
    """Return endless numbers of right drafts, from none to all."""
    draw = random.Random(seed)
    return (draw.randint(0, DRAFTS) for _ in itertools.count())
