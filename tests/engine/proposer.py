"""Proposer of drafts, a given number of which are right: vLLM's ``custom_class``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

DRAFTS = 4
CONFIG = {"method": "custom_class", "model": "engine.proposer.ForcedDrafts", "num_speculative_tokens": DRAFTS}
"""``speculative_config`` of an engine in this process, with DRAFTS drafts."""


class ForcedDrafts:
    """Proposer that knows how texts go on, and drafts the numbers of right tokens that a test sets.

    Attributes:
        texts: whole texts. Nothing is drafted after others.
        counts: endless numbers of right tokens, one for each draft; further tokens are wrong.
        proposed: number of drafted tokens of each step and request.
    """

    texts: Iterable[list[int]] = ()
    counts: Iterator[int] = iter(())
    proposed: list[int] = []  # noqa: RUF012 - shared with the tests

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
        rest = next((text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens), [])[:DRAFTS]
        if not rest:
            return []
        right = next(self.counts)
        self.proposed.append(len(rest))
        return [token if i < right else (token + 1) % 256 for i, token in enumerate(rest)]
