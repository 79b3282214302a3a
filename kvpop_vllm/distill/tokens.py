"""Tokenisation of documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import render
from kvpop_vllm.distill.sources import Document

STRETCH = 1 << 18
"""Characters tokenised in one call; a longer text is split before words."""
SEAM = re.compile(r"\s(?=\S)")
"""Pattern of the places where words begin; byte-level tokenizers split a text there themselves."""


class DocumentEncoder:
    """Tokeniser of documents.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: tokens that the model knows; None skips the check.

    Raises:
        ConfigError: the tokenizer has no EOS, or gives ids that the model does not know.
    """

    def __init__(self, tokenizer, vocab_size: int | None):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        if self.eos is None:
            raise ConfigError("the tokenizer has no end-of-text token (eos_token): set one in tokenizer_config.json")
        self._check(self.eos)
        first = tokenizer("a")["input_ids"][:1]
        self.start = [bos] if bos is not None and first == [bos] else []

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        """Yield each document with its ids, int32, without an EOS at the end."""
        for document, stretches in groupby(self._encoded(documents), itemgetter(0)):
            start = self.start if isinstance(document.content, str) else []  # chat templates add their own
            ids = np.concatenate([np.array(part, dtype=np.int32) for part in (start, *map(itemgetter(1), stretches))])
            self._check(ids.max(initial=0))
            yield document, ids[:-1] if len(ids) and ids[-1] == self.eos else ids

    def prompt_length(self, document: Document, ids: np.ndarray) -> int:
        """Return how many of a document's ids are its prompt: all before its last message, if that is an answer.

        Args:
            document: the document.
            ids: its ids (:meth:`encode`).
        """
        content = document.content
        if isinstance(content, str) or len(content) < 2 or content[-1]["role"] != "assistant":
            return 0
        text = render(self.tokenizer, content[:-1], document.origin, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        agrees = ids[: len(prompt)] == np.array(prompt[: len(ids)])
        return len(agrees) if agrees.all() else int(agrees.argmin())

    def _encoded(self, documents: Iterable[Document]) -> Iterator[tuple[Document, list[int]]]:
        """Yield documents with the ids of their stretches.

        At most ``STRETCH`` characters go into one call, because a tokenizer needs some hundred bytes for each
        token.
        """
        batch, size = [], 0
        for document, text in self._stretches(documents):
            if batch and size + len(text) > STRETCH:
                yield from self._call(batch)
                batch, size = [], 0
            batch.append((document, text))
            size += len(text)
        if batch:
            yield from self._call(batch)

    def _call(self, batch: list[tuple[Document, str]]) -> Iterator[tuple[Document, list[int]]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids = self.tokenizer([text for _, text in batch], **options)["input_ids"]
        return zip(map(itemgetter(0), batch), ids, strict=True)

    def _stretches(self, documents: Iterable[Document]) -> Iterator[tuple[Document, str]]:
        for document in documents:
            text = document.content
            if not isinstance(text, str):
                text = render(self.tokenizer, text, document.origin)
            yield from ((document, part) for part in _parts(text.encode("utf-8", "replace").decode("utf-8")))

    def _check(self, token: int) -> None:
        if self.vocab_size is not None and token >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer gives token {token}, but the model knows {self.vocab_size}: use the model's own tokenizer"
            )

    def fingerprint(self) -> list:
        """Return values that change with the tokenizer."""
        probe = self.tokenizer("A probe: 1,234 things, naïve – <tag>\n\n\tdef f(x):\n", add_special_tokens=False)
        template = getattr(self.tokenizer, "chat_template", None)
        return [len(self.tokenizer), self.eos, self.start, probe["input_ids"], template]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > STRETCH:
        *_, cut = start + STRETCH, *(seam.start() for seam in SEAM.finditer(text, start + 1, start + STRETCH))
        yield text[start:cut]
        start = cut
    yield text[start:]
