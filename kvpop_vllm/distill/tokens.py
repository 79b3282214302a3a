"""Tokenisation of documents into pieces of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import render
from kvpop_vllm.distill.sources import Document, Source

STRETCH = 1 << 18
"""Characters tokenised in one call; a longer text is split before words."""
SEAM = re.compile(r"\s(?=\S)")
"""Pattern of the places where words begin; byte-level tokenizers split a text there themselves."""


class Tokens:
    """Tokeniser of documents into pieces of tokens.

    A document's tokens are cut into pieces of at most ``longest`` tokens, so that one book does not fill a
    batch. Each piece ends with EOS (counted in ``longest``) and is independent of the others from then on.

    Args:
        tokenizer: the model's tokenizer.
        longest: maximum tokens of a piece.
        vocab_size: tokens that the model knows; None skips the check.

    Raises:
        ConfigError: the tokenizer has no EOS, or gives ids that the model does not know.
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
        """Return the pieces of each document, int32."""
        ids: list[list[np.ndarray]] = [[] for _ in batch]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        for stretches in _in_batches(self._stretches(batch)):
            found = self.tokenizer([text for _, text in stretches], **options)["input_ids"]
            for (i, _), own in zip(stretches, found, strict=True):
                ids[i].append(np.array(own, dtype=np.int32))
        return [self._cut(document, own) for (_, document), own in zip(batch, ids, strict=True)]

    def _stretches(self, batch: list[tuple[Source, Document]]) -> Iterator[tuple[int, str]]:
        for i, (source, document) in enumerate(batch):
            text = document.content
            if not isinstance(text, str):
                text = render(self.tokenizer, text, partial(source.where, document.place))
            yield from ((i, stretch) for stretch in _part(text.encode("utf-8", "replace").decode("utf-8")))

    def _cut(self, document: Document, parts: list[np.ndarray]) -> list[np.ndarray]:
        start = self.start if isinstance(document.content, str) else []  # chat templates add their own
        ids = np.concatenate([np.array(start, dtype=np.int32), *parts])
        self._check(ids.max(initial=0))
        if len(ids) and ids[-1] == self.eos:
            ids = ids[:-1]
        step, end = self.longest - 1, np.array([self.eos], dtype=np.int32)
        return [np.concatenate([ids[a : a + step], end]) for a in range(0, len(ids), step)]

    def _check(self, token: int) -> None:
        if self.vocab_size is not None and token >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer gives token {token}, but the model knows {self.vocab_size}: use the model's own tokenizer"
            )

    def fingerprint(self) -> list:
        """Return values that change with the tokenizer."""
        probe = self.tokenizer("A probe: 1,234 things, naïve – <tag>\n\n\tdef f(x):\n", add_special_tokens=False)
        template = getattr(self.tokenizer, "chat_template", None)
        return [len(self.tokenizer), self.eos, self.start, probe["input_ids"], self.longest, template]


def _part(text: str) -> Iterator[str]:
    at = 0
    while len(text) - at > STRETCH:
        *_, cut = at + STRETCH, *(seam.start() for seam in SEAM.finditer(text, at + 1, at + STRETCH))
        yield text[at:cut]
        at = cut
    yield text[at:]


def _in_batches(stretches: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield batches of at most ``STRETCH`` characters, or of one longer text.

    Batches are bounded because a tokenizer needs some hundred bytes for each token.
    """
    batch, size = [], 0
    for i, text in stretches:
        if batch and size + len(text) > STRETCH:
            yield batch
            batch, size = [], 0
        batch.append((i, text))
        size += len(text)
    if batch:
        yield batch
