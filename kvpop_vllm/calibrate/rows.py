"""Rows of text that a calibration measures on, and as many that it has not seen."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import content_of
from kvpop_vllm.distill.sources import Document, documents_of, find_sources
from kvpop_vllm.distill.tokens import DocumentEncoder
from kvpop_vllm.evaluation.haystack import Row, key_of, units_of
from kvpop_vllm.evaluation.statistics import LEAST

TEXT = Path(__file__).with_name("text.jsonl")
"""Prose, code and chat that are used without ``--data``."""
READ = 50
"""Rows of a text that are read at most, over those of a side."""


class Text(NamedTuple):
    """Rows of a calibration.

    Attributes:
        measured: rows to measure and to search on, each with the length of its prompt.
        held_out: rows of other documents, likewise.
        units: unit of each held-out row, for intervals.
        by_document: True if units are documents, False if they are passages of fewer than 8 documents.
        source: name of the text in the report.
    """

    measured: list[tuple[torch.Tensor, int]]
    held_out: list[tuple[torch.Tensor, int]]
    units: list[int]
    by_document: bool
    source: str


def read_text(paths: list[str], tokenizer, length: int, rows: int, *, vocab_size: int, protect: bool) -> Text:
    """Return rows of ``length`` tokens.

    Rows of one document go to one side where there are enough documents, half of the documents to each, at random. With
    fewer, every second row goes to each side. Of a large text only the beginning is read, in which the first files take turns.

    Args:
        paths: files and folders of text, empty for the text of this package.
        tokenizer: the model's tokenizer.
        length: S.
        rows: most rows of a side.
        vocab_size: tokens of the model.
        protect: True to begin each row with a document, and to note the length of its prompt.
    """
    encoder = DocumentEncoder(tokenizer, vocab_size)
    documents = documents_of(find_sources(paths)) if paths else _own_documents(tokenizer)
    pieces = list(islice((_documents if protect else _passages)(encoder, documents, length), READ * rows))
    pieces = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]  # first those that begin a document
    units = units_of([row for row, _ in pieces])
    numbers = list(dict.fromkeys(units))
    random.Random(0).shuffle(numbers)  # a text may take turns between kinds of documents
    side_of = {unit: place % 2 for place, unit in enumerate(numbers)}
    sides = [[piece for piece, unit in zip(pieces, units, strict=True) if side_of[unit] == i] for i in (0, 1)]
    by_document = len(numbers) >= 2 * LEAST
    if not by_document:
        sides = [pieces[0::2], pieces[1::2]]
    measured, held_out = ([(row.tokens, prompt) for row, prompt in side[:rows]] for side in sides)
    if len(held_out) < LEAST:
        prompts = " whose prompts have at most half of them" if protect else ""
        raise ConfigError(
            f"the text holds {len(pieces)} rows of {length} tokens{prompts} and {2 * LEAST} are needed, half of them to judge by: give"
            " more --data, or lower --length"
        )
    units = units_of([row for row, _ in sides[1][:rows]])
    # one document may have most of the rows
    by_document = by_document and len(set(units)) >= LEAST
    units = units if by_document else list(range(len(held_out)))
    source = ", ".join(paths) or "prose, code and chat of this package (Python's manual and library)"
    return Text(measured, held_out, units, by_document, source)


def _own_documents(tokenizer) -> Iterator[Document]:
    """Yield the documents of this package; chats are plain text where the tokenizer has no chat template."""
    for number, line in enumerate(TEXT.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        content = content_of(record, f"{TEXT.name}, line {number}")
        if not isinstance(content, str) and not getattr(tokenizer, "chat_template", None):
            content = "\n\n".join(f"{message['role']}: {message['content']}" for message in content)
        yield Document(content, record["group"], record["group"], float(number))


Pieces = Iterator[tuple[int, tuple[Row, int]]]
"""Rows with the lengths of their prompts, each after its number within its document."""


def _passages(encoder: DocumentEncoder, documents, length: int) -> Pieces:
    """Yield rows that follow each other in the documents; one that a document does not fill goes on with the next."""
    remaining, names, keys = np.empty(0, np.int32), [], []
    for document, ids in encoder.encode(documents):
        remaining = np.concatenate([remaining, ids, np.array([encoder.eos], np.int32)])
        names, keys = [*names, document.origin], [*keys, key_of(document)]
        for number in range(len(remaining) // length):
            tokens = torch.from_numpy(remaining[number * length : (number + 1) * length].astype(np.int64))
            yield number, (Row(tokens, names, keys), 0)
        if len(remaining) >= length:  # the end of a document does not begin a row
            remaining, names, keys = np.empty(0, np.int32), [], []


def _documents(encoder: DocumentEncoder, documents, length: int) -> Pieces:
    """Yield the first tokens of each document that has as many, and a prompt of at most half of them."""
    for document, ids in encoder.encode(documents):
        if len(ids) >= length and 0 < (prompt := encoder.prompt_length(document, ids)) <= length // 2:
            tokens = torch.from_numpy(ids[:length].astype(np.int64))
            yield 0, (Row(tokens, [document.origin], [key_of(document)]), prompt)
