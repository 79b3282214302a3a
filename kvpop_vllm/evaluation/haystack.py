"""Long text from files: whole documents one after another for replay, and sentences to hide needles in."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import split_of
from kvpop_vllm.distill.sources import Document, ReadingOrder, Source, find_sources
from kvpop_vllm.distill.tokens import Tokens

SHARES = 0.05, 0.05
"""Of the documents for validation and test, as training splits them."""
MOST_TOKENS = 1 << 40
"""A document is one piece, however long."""
LONGEST_SENTENCE = 300
"""Characters; longer ones, and text without sentences such as code, are parted between words."""
ENOUGH = 1 << 20
"""Characters of text from which haystacks are made, at least."""


def documents(paths: list[str], split: str) -> Iterator[tuple[Source, Document]]:
    """Documents of a split that say something, in an order that depends on the files alone.

    Raises:
        ConfigError: the files cannot be read.
    """
    sources = find_sources(paths)
    for number, document in ReadingOrder(sources):
        content = document.content
        text = content if isinstance(content, str) else "\n\n".join(m["content"] for m in content)
        own = split == "all" or split_of(document.group or text, *SHARES) == split
        if text.strip() and own:
            yield sources[number], document


def replay_rows(
    paths: list[str], tokenizer, length: int, *, split: str, seed: int, vocab_size: int
) -> Iterator[torch.Tensor]:
    """Rows ``[length]`` int64, each from the beginning of a document on; where it ends the next one follows, and what is left of
    the last one is left out. The documents come in an order drawn by the seed.

    Raises:
        ConfigError: the files cannot be read, or the tokenizer is not the model's.
    """
    found = list(documents(paths, split))
    random.Random(seed).shuffle(found)
    tokens = Tokens(tokenizer, MOST_TOKENS, vocab_size)
    row: list[int] = []
    for source_and_document in found:
        ((piece,),) = tokens.pieces([source_and_document])
        row += piece[: length - len(row)].tolist()
        if len(row) == length:
            yield torch.tensor(row)
            row = []


def sentences(paths: list[str], split: str, least: int) -> list[str]:
    """Sentences of the first documents, in their order, at least ``least`` characters of them, or all there are.

    Raises:
        ConfigError: the files cannot be read, or there is no text.
    """
    found, size = [], 0
    for _, document in documents(paths, split):
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
