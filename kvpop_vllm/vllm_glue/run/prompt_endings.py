"""Endings of prompts that later turns of a chat leave out, such as ``<think>``.

A chat template may end a prompt with tokens that it leaves out once the answer is there. What was held at such a
prompt's end fits no later turn. What was held before the ending does. An engine does not see templates: it learns
endings from turns that leave the prompt of an earlier one shortly before its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

LONGEST = 16
"""Most tokens of an ending."""


class PromptEndings:
    """Endings that an engine has learned, each for one salt of the prefix cache.

    The first turn that leaves out an ending teaches it. A prompt that has no hash before its last :data:`LONGEST`
    tokens teaches nothing.

    Args:
        unit: tokens of a hash.
    """

    def __init__(self, unit: int):
        self.unit = unit
        self._tails: dict[bytes, tuple[int, ...]] = {}  # last tokens of prompts, by the hash before them
        self._endings: dict[tuple[str | None, tuple[int, ...]], None] = {}

    def remember(self, request: Request) -> None:
        """Remember the last tokens of a request's prompt."""
        hashes = (request.num_prompt_tokens - LONGEST) // self.unit
        if hashes > 0:
            tail = tuple(request.all_token_ids[hashes * self.unit : request.num_prompt_tokens])
            _put(self._tails, bytes(request.block_hashes[hashes - 1]), tail, most=1024)

    def learn(self, request: Request) -> None:
        """Learn the ending of the earlier prompt that a new request leaves last, if it leaves one shortly before its end."""
        for hashes in range(len(request.block_hashes), 0, -1):
            tail = self._tails.get(bytes(request.block_hashes[hashes - 1]))
            if tail is None:
                continue
            tokens = request.all_token_ids[hashes * self.unit : hashes * self.unit + len(tail)]
            common = next(
                (i for i, pair in enumerate(zip(tail, tokens, strict=False)) if pair[0] != pair[1]), len(tail)
            )
            if 0 < len(tail) - common <= LONGEST and common < len(tokens):
                _put(self._endings, (request.cache_salt, tail[common:]), None, most=64)
            return

    def length(self, request: Request) -> int:
        """Return the number of tokens of the longest learned ending that a request's prompt has, 0 for none."""
        end = request.num_prompt_tokens
        prompt = tuple(request.all_token_ids[max(0, end - LONGEST) : end])
        endings = (ending for salt, ending in self._endings if salt == request.cache_salt)
        return max((len(ending) for ending in endings if prompt[-len(ending) :] == ending), default=0)


def _put(cache: dict, key, value, most: int) -> None:
    """Put an entry last in a cache, and take the first out where there are more than ``most``."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > most:
        del cache[next(iter(cache))]
