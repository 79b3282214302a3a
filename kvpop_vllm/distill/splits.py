"""Splits of documents: which one a document belongs to for good, by the hash of its group or else of its text."""

from __future__ import annotations

import hashlib
import json

from kvpop_vllm.distill.sources import Document

SPLITS = ("train", "validation", "test", "all")


def share_of(key: str) -> float:
    """Return the place of a document between 0 and 1, by the hash of ``key``: its group or else its text."""
    return int.from_bytes(digest(key), "big") / 2**64


def in_split(share, split: str, validation: float, test: float):
    """Return whether documents with this :func:`share_of` (a number or an array) belong to a split."""
    bounds = {"all": (0, 2), "test": (0, test), "validation": (test, test + validation)}
    first, end = bounds.get(split, (test + validation, 2))
    return (first <= share) & (share < end)


def digest(text: str) -> bytes:
    """Return a hash of a text, 8 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def has_content(document: Document) -> bool:
    """Return whether a document is more than white space."""
    return bool(document.content and text_of(document).strip())


def share_of_document(document: Document) -> float:
    """Return :func:`share_of` a document."""
    return share_of(document.group or text_of(document))


def text_of(document: Document) -> str:
    """Return a text that is equal for equal contents."""
    content = document.content
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
