"""Documents as pieces of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import render
from kvpop_vllm.distill.sources import Document, Source

STRETCH = 1 << 20
"""Characters tokenised as one string; a longer text is parted at white space."""


class Tokens:
    """Turns documents into pieces of tokens.

    A document's tokens are cut into pieces of at most ``longest`` tokens, so that one book does not fill a batch. Each
    piece ends with EOS (counted in ``longest``) and goes its own way from there on.

    Args:
        tokenizer: of the model. longest: see above. vocab_size: ids from here on are unknown to the model.

    Raises:
        ConfigError: the tokenizer has no EOS, or gives ids the model does not know.
    """

    def __init__(self, tokenizer, longest: int, vocab_size: int | None):
        self.tokenizer, self.longest, self.vocab_size = tokenizer, longest, vocab_size
        self.eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        if self.eos is None:
            raise ConfigError("the tokenizer has no end-of-text token (eos_token): set one in tokenizer_config.json")
        self._check(self.eos)
        first = tokenizer("a")["input_ids"][:1]
        self.start = [bos] if bos is not None and first == [bos] else []

    def pieces(self, batch: list[tuple[Source, Document]]) -> list[list[np.ndarray]]:
        """The pieces of each document, int32."""
        starts, stretches, owners = [], [], []
        for i, (source, document) in enumerate(batch):
            chat = isinstance(document.content, list)
            text = render(self.tokenizer, document.content, source.where(document.place)) if chat else document.content
            starts.append([] if chat else self.start)
            for stretch in _stretches(text.encode("utf-8", "replace").decode("utf-8")):
                stretches.append(stretch)
                owners.append(i)
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = [list(start) for start in starts]
        for owner, own in zip(owners, self.tokenizer(stretches, **options)["input_ids"], strict=True):
            ids[owner] += own
        return [self._cut(own) for own in ids]

    def _cut(self, ids: list[int]) -> list[np.ndarray]:
        self._check(max(ids, default=0))
        if ids and ids[-1] == self.eos:
            ids.pop()
        step = self.longest - 1
        return [np.array([*ids[a : a + step], self.eos], dtype=np.int32) for a in range(0, len(ids), step)]

    def _check(self, token: int) -> None:
        if self.vocab_size is not None and token >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer gives token {token}, but the model knows {self.vocab_size}: use the model's own tokenizer"
            )

    def fingerprint(self) -> list:
        """What a change of tokenizer would change."""
        probe = self.tokenizer("A probe: 1,234 things, naïve – <tag>\n\n\tdef f(x):\n", add_special_tokens=False)
        return [len(self.tokenizer), self.eos, self.start, probe["input_ids"], self.longest]


def _stretches(text: str) -> Iterator[str]:
    at = 0
    while len(text) - at > STRETCH:
        cut = max(text.rfind(space, at + 1, at + STRETCH) for space in " \n")
        cut = cut if cut > at else at + STRETCH
        yield text[at:cut]
        at = cut
    yield text[at:]
