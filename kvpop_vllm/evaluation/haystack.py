"""Long text from files: documents one after another for replay, and sentences to hide needles in.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sources import Document, documents_of, find_sources
from kvpop_vllm.distill.splits import in_split, share_of
from kvpop_vllm.distill.tokens import DocumentEncoder

SHARES = 0.05, 0.05
"""Shares of the documents for validation and test, as in training."""
LONGEST_SENTENCE = 300
"""Characters of a sentence. Longer ones, and text without sentences such as code, are split between words."""
ENOUGH = 1 << 20
"""Minimum number of characters that haystacks are made from."""


class Row(NamedTuple):
    """Row of text.

    Attributes:
        tokens: ``[S]`` int64.
        documents: names of its documents, in order.
        keys: a key of each document, equal for documents of one group or with one text.
    """

    tokens: torch.Tensor
    documents: list[str]
    keys: list[float]


def key_of(document: Document) -> float:
    """Return the place of a document between 0 and 1 (:func:`share_of`), by its group or else its text."""
    return share_of(document.group or text_of(document))


def text_of(document: Document) -> str:
    """Return a document's text, or the turns of its conversation with empty lines between them."""
    content = document.content
    return content if isinstance(content, str) else "\n\n".join(m["content"] for m in content)


def documents(paths: list[str], split: str) -> Iterator[Document]:
    """Yield the non-empty documents of a split, in an order that depends on the files alone."""
    for document in documents_of(find_sources(paths)):
        if text_of(document).strip() and in_split(key_of(document), split, *SHARES):
            yield document


def replay_rows(paths: list[str], tokenizer, length: int, *, split: str, seed: int, vocab_size: int) -> Iterator[Row]:
    """Yield rows of ``length`` tokens, each of which begins with a document.

    No document is in two rows. A document that ends within a row is followed by the next one. The part of a document
    that exceeds a row is left out. The seed draws the order of the documents.
    """
    texts = list(documents(paths, split))
    random.Random(seed).shuffle(texts)
    tokens = DocumentEncoder(tokenizer, vocab_size)
    row, names, keys = [], [], []
    for document, ids in tokens.encode(texts):
        # the end-of-text token follows a document that ends within the row
        row += [*ids.tolist(), tokens.eos][: length - len(row)]
        names.append(document.origin)
        keys.append(key_of(document))
        if len(row) == length:
            yield Row(torch.tensor(row), names, keys)
            row, names, keys = [], [], []


def single_documents(
    paths: list[str], tokenizer, length: int, *, split: str, seed: int, vocab_size: int
) -> Iterator[Row]:
    """Yield the first ``length`` tokens of each document that has as many. See :func:`replay_rows`."""
    texts = list(documents(paths, split))
    random.Random(seed).shuffle(texts)
    for document, ids in DocumentEncoder(tokenizer, vocab_size).encode(texts):
        if len(ids) >= length:
            yield Row(ids[:length], [document.origin], [key_of(document)])


def rows_in_turn(rows: Callable[..., Iterator[Row]], paths: list[str], *options, **places) -> Iterator[Row]:
    """Yield a row of each file or folder in turn, as long as it has one.

    Args:
        rows: :func:`replay_rows` or :func:`single_documents`.
        paths: files or folders.
        options: further arguments of ``rows``.
        places: further arguments of ``rows``.
    """
    streams = [rows([path], *options, **places) for path in dict.fromkeys(paths)]
    while streams:
        # each file gives one row before any gives its next
        next_rows = [(stream, next(stream, None)) for stream in streams]
        streams = [stream for stream, row in next_rows if row is not None]
        yield from (row for _, row in next_rows if row is not None)


def units_of(rows: list[Row]) -> list[int]:
    """Return the unit of each row: rows that share a group or a text, also through other rows, are one unit."""
    units, first = list(range(len(rows))), {}
    for number, row in enumerate(rows):
        for key in row.keys:
            # a key that both have makes two units one
            lower, upper = sorted((units[first.setdefault(key, number)], units[number]))
            units = [lower if unit == upper else unit for unit in units]
    return units


def sentences(paths: list[str], split: str, min_characters: int) -> list[str]:
    """Return sentences of the first documents in order, of at least ``min_characters`` characters, or all there are."""
    passages, size = [], 0
    for document in documents(paths, split):
        pieces = [part for sentence in re.split(r"(?<=[.!?])\s+|\n+", text_of(document)) for part in _parted(sentence)]
        passages += pieces
        size += sum(map(len, pieces))
        if size >= max(min_characters, ENOUGH):
            break
    if not passages:
        raise ConfigError(f"the {split} split of {', '.join(islice(map(str, paths), 3))} holds no text: give more text")
    return passages


def _parted(sentence: str) -> Iterator[str]:
    part = ""
    for word in sentence.split():
        if part and len(part) + len(word) >= LONGEST_SENTENCE:
            yield part
            part = ""
        part = f"{part} {word}" if part else word
    if part:
        yield part
