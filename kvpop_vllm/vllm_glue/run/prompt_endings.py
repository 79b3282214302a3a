"""Endings of prompts that later turns of a chat leave out, such as ``<think>``.

A chat template may end a prompt with tokens that it leaves out once the answer is there. What was held at such a
prompt's end fits no later turn. What was held before the ending does. An engine does not see templates: it learns an
ending from a turn that leaves an earlier prompt shortly before its end and has the end of that prompt's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

LONGEST, ANSWER = 16, 4
"""Most tokens of an ending, and last tokens of an answer by which the turn after it is known."""


class _Turn(NamedTuple):
    """Last tokens of an earlier prompt, after a hash, and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class PromptEndings:
    """Endings that an engine has learned, apart for each salt of the prefix cache.

    The first turn that leaves out an ending teaches it, and one that keeps it takes it back. A prompt that has no hash
    before its last :data:`LONGEST` tokens teaches nothing.

    Args:
        unit: tokens of a hash.
    """

    def __init__(self, unit: int):
        self.unit = unit
        self._turns: dict[bytes, _Turn] = {}  # by the hash before the last tokens of a prompt
        self._endings: dict[str | None, dict[tuple[int, ...], None]] = {}

    def remember(self, request: Request) -> None:
        """Remember a request that ends with an answer."""
        end, hashes = request.num_prompt_tokens, (request.num_prompt_tokens - LONGEST) // self.unit
        if hashes > 0 and request.num_tokens > end:
            prompt = tuple(request.all_token_ids[hashes * self.unit : end])
            answer = tuple(request.all_token_ids[max(end, request.num_tokens - ANSWER) :])
            _put(self._turns, bytes(request.block_hashes[hashes - 1]), _Turn(prompt, answer), limit=1024)

    def learn(self, request: Request) -> None:
        """Learn from a request whether it leaves out an ending of the turn before, if it is a later turn."""
        for hashes in range(len(request.block_hashes), 0, -1):
            turn = self._turns.get(bytes(request.block_hashes[hashes - 1]))
            if turn is None:
                continue
            tokens = tuple(request.all_token_ids[hashes * self.unit :])
            pairs = enumerate(zip(turn.prompt, tokens, strict=False))
            common = next((i for i, (before, now) in pairs if before != now), min(len(turn.prompt), len(tokens)))
            if len(turn.prompt) - common <= LONGEST and _contains(tokens[common:], turn.answer):
                endings = self._endings.get(request.cache_salt, {})
                if common < len(turn.prompt):
                    _put(endings, turn.prompt[common:], None, limit=4)
                else:
                    endings = {ending: None for ending in endings if turn.prompt[-len(ending) :] != ending}
                _put(self._endings, request.cache_salt, endings, limit=1024)
            return

    def length(self, request: Request) -> int:
        """Return the number of tokens of the longest learned ending that a request's prompt has, 0 for none."""
        end = request.num_prompt_tokens
        prompt = tuple(request.all_token_ids[max(0, end - LONGEST) : end])
        endings = self._endings.get(request.cache_salt, ())
        return max((len(ending) for ending in endings if prompt[-len(ending) :] == ending), default=0)


def _contains(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return whether tokens hold a part, all of it in a row."""
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))


def _put(cache: dict, key, value, limit: int) -> None:
    """Put an entry last in a cache, and take the first out where there are more than ``limit``."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > limit:
        del cache[next(iter(cache))]
