"""Long text from files: documents one after another for replay, and sentences to hide needles in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import in_split, share_of
from kvpop_vllm.distill.sources import Document, documents_of, find_sources
from kvpop_vllm.distill.tokens import DocumentEncoder

SHARES = 0.05, 0.05
"""Shares of the documents for validation and test, as in training."""
LONGEST_SENTENCE = 300
"""Characters of a sentence; longer ones, and text without sentences such as code, are split between words."""
ENOUGH = 1 << 20
"""Minimum number of characters that haystacks are made from."""


def documents(paths: list[str], split: str) -> Iterator[Document]:
    """Yield the non-empty documents of a split, in an order that depends on the files alone.

    Raises:
        ConfigError: the files cannot be read.
    """
    for document in documents_of(find_sources(paths)):
        content = document.content
        text = content if isinstance(content, str) else "\n\n".join(m["content"] for m in content)
        if text.strip() and in_split(share_of(document.group or text), split, *SHARES):
            yield document


def replay_rows(
    paths: list[str], tokenizer, length: int, *, split: str, seed: int, vocab_size: int
) -> Iterator[torch.Tensor]:
    """Yield rows ``[length]`` int64, each of which begins with a document.

    A document that ends within a row is followed by the next one. The part of a document that exceeds a row
    is left out. The seed draws the order of the documents.

    Raises:
        ConfigError: the files cannot be read, or the tokenizer is not the model's.
    """
    found = list(documents(paths, split))
    random.Random(seed).shuffle(found)
    tokens = DocumentEncoder(tokenizer, vocab_size)
    row: list[int] = []
    for _, ids in tokens.encode(found):
        row += [*ids.tolist(), tokens.eos][: length - len(row)]
        if len(row) == length:
            yield torch.tensor(row)
            row = []


def sentences(paths: list[str], split: str, least: int) -> list[str]:
    """Return sentences of the first documents in order, of at least ``least`` characters, or all there are.

    Raises:
        ConfigError: the files cannot be read, or there is no text.
    """
    found, size = [], 0
    for document in documents(paths, split):
        content = document.content
        text = content if isinstance(content, str) else "\n".join(m["content"] for m in content)
        own = [part for sentence in re.split(r"(?<=[.!?])\s+|\n+", text) for part in _parted(sentence)]
        found += own
        size += sum(map(len, own))
        if size >= max(least, ENOUGH):
            break
    if not found:
        raise ConfigError(f"the {split} split of {', '.join(islice(map(str, paths), 3))} holds no text: give more text")
    return found


def _parted(sentence: str) -> Iterator[str]:
    part = ""
    for word in sentence.split():
        if part and len(part) + len(word) >= LONGEST_SENTENCE:
            yield part
            part = ""
        part = f"{part} {word}" if part else word
    if part:
        yield part
