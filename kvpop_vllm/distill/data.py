"""Training rows: documents of one split, tokenised once into a file, shuffled and packed into rows of S tokens."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sources import Document, documents_of, find_sources
from kvpop_vllm.distill.tokens import DocumentEncoder
from kvpop_vllm.files import replacing, write_whole

SPLITS = ("train", "validation", "test", "all")


def share_of(key: str) -> float:
    """Return the place of a document between 0 and 1, by the hash of ``key``: its group or else its text."""
    return int.from_bytes(_digest(key), "big") / 2**64


def in_split(share, split: str, validation: float, test: float):
    """Return whether documents with this :func:`share_of` (a number or an array) belong to a split."""
    bounds = {"all": (0, 2), "test": (0, test), "validation": (test, test + validation)}
    first, end = bounds.get(split, (test + validation, 2))
    return (first <= share) & (share < end)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


class Stored(NamedTuple):
    """Tokens of documents.

    Attributes:
        ids: the ids of all documents one after another, int32.
        lengths: number of ids of each document, int64.
        shares: :func:`share_of` each document.
        read: number of documents that were read, those with the same content as another included.
    """

    ids: np.ndarray
    lengths: np.ndarray
    shares: np.ndarray
    read: int


class TokenFile:
    """Memory-mapped file with the tokens of all documents, written when it is first needed.

    ``tokens.bin`` holds the arrays of :class:`Stored` one after another, ``tokens.json`` what they were made
    from. A file that was made from something else is replaced. Of several processes one writes the file and
    the others wait. Of several documents with the same content only the first is used; if their groups are in
    different splits, the first one's group decides.

    Args:
        sources: files and folders of text.
        tokens: the tokeniser.
        folder: folder of the two files.
    """

    def __init__(self, sources: list, tokens: DocumentEncoder, folder: Path):
        self.sources, self.tokens, self.folder = sources, tokens, folder
        self.path, self.note = folder / "tokens.bin", folder / "tokens.json"
        self.made_from = {
            "version": 1,
            "files": [source.fingerprint() for source in sources],
            "tokenizer": tokens.fingerprint(),
        }
        self.modified = [file.stat().st_mtime_ns for source in sources for file in source.files]

    def load(self) -> Stored:
        """Return the tokens.

        Raises:
            ConfigError: the text cannot be read.
            OSError: the file cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "tokens.lock", "w") as lock:
            with suppress(OSError):  # file systems without locks: every process writes, and the last one's file stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            note = json.loads(self.note.read_text()) if self.note.exists() else {}
            made = note.get("made_from"), note.get("modified")
            if made != (self.made_from, self.modified) or not self._whole(note):
                note = self._write()
            size, documents = note["ids"], note["documents"]
            ids = np.memmap(self.path, np.int32, "r", shape=size) if size else np.empty(0, np.int32)
            lengths = np.fromfile(self.path, np.int64, documents, offset=4 * size)
            shares = np.fromfile(self.path, np.float64, documents, offset=4 * size + 8 * documents)
        return Stored(ids, lengths, shares, note["read"])

    def _whole(self, note: dict) -> bool:
        """Return whether the file holds all arrays."""
        size = 4 * note["ids"] + 16 * note["documents"]
        return self.path.exists() and self.path.stat().st_size == size

    def _write(self) -> dict:
        self.note.unlink(missing_ok=True)  # it is about the file of before
        self.read, lengths, shares = 0, array("q"), array("d")
        with replacing(self.path) as draft, open(draft, "wb") as file:
            for document, ids in self.tokens.encode(self._distinct()):
                file.write(ids.tobytes())
                lengths.append(len(ids))
                shares.append(share_of(document.group or _text_of(document)))
            lengths.tofile(file)
            shares.tofile(file)
        note = {
            "made_from": self.made_from,
            "modified": self.modified,
            "ids": sum(lengths),
            "documents": len(lengths),
            "read": self.read,
        }
        write_whole(self.note, json.dumps(note) + "\n")
        return note

    def _distinct(self) -> Iterator[Document]:
        """Yield the documents that are not empty, each content once."""
        seen = set()
        for document in documents_of(self.sources):
            text = _text_of(document)
            if document.content and text.strip():
                self.read += 1
                if (digest := _digest(text)) not in seen:
                    seen.add(digest)
                    yield document


def _text_of(document: Document) -> str:
    """Return a text that is equal for equal contents."""
    content = document.content
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


class PackedTokens:
    """Rows of S tokens of one split; ``rows[j]`` is row j, ``[S]`` int64, for any j from 0 on.

    A document belongs to a split for good, by the hash of its group or else its text. It ends with EOS; if it
    is long, it is cut into pieces that end with EOS and are independent of each other from then on. A pass
    holds every piece once, in an order that depends on the sources, the seed and the pass alone. Pieces
    follow each other without a gap; a row may begin and end anywhere in a document. Borders are not marked,
    and attention runs across them. Tokens that do not fill a row at the end of a pass open the next pass.

    The text is read when the first row is asked for.

    Args:
        sources: files and folders, see :func:`kvpop_vllm.distill.sources.find_sources`.
        tokenizer: the model's tokenizer.
        length: S.
        split: ``train``, ``validation``, ``test`` or ``all``.
        seed: seed of the shuffle, which differs from pass to pass.
        vocab_size: vocabulary of the model, to detect a tokenizer of another model.
        validation: validation share of the documents.
        test: test share of the documents.
        piece_rows: rows that one document may fill in succession.
        folder: folder of the tokens, see :class:`TokenFile`; default: one that is removed at the end.

    Raises:
        ConfigError: the data cannot be used. An empty or too small split is found only when it has been read.
    """

    def __init__(
        self,
        sources: Iterable[str | Path] | str | Path,
        tokenizer,
        length: int,
        *,
        split: str = "train",
        seed: int = 0,
        vocab_size: int | None = None,
        validation: float = 0.05,
        test: float = 0.05,
        piece_rows: int = 4,
        folder: Path | None = None,
    ):
        if length < 2:
            raise ConfigError(f"a row needs at least 2 tokens, got length {length}: raise --length")
        if piece_rows < 1:
            raise ConfigError(f"a document fills at least 1 row in succession, got piece_rows {piece_rows}")
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if not (validation >= 0 and test >= 0 and validation + test < 1):
            raise ConfigError(
                f"shares of validation {validation} and test {test} leave nothing to train on: lower them"
            )
        self.length, self.split, self.seed, self.shares = length, split, seed, (validation, test)
        self.longest = piece_rows * length
        self.tokens = DocumentEncoder(tokenizer, vocab_size)
        if folder is None:
            self._own_folder = TemporaryDirectory(prefix="kvpop-tokens-")
            folder = Path(self._own_folder.name)
        self.file = TokenFile(find_sources(sources), self.tokens, folder)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal rows: sources, tokenizer, S, split, seed and order."""
        settings = [self.length, self.split, self.seed, self.shares, self.longest, self.file.made_from]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of all documents, and where the pieces of this split begin and end in them."""
        stored = self.file.load()
        ours = in_split(stored.shares, self.split, *self.shares)
        ends = stored.lengths.cumsum()[ours]
        lengths = stored.lengths[ours]
        step = self.longest - 1
        counts = -(-lengths // step)
        numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        first = np.repeat(ends - lengths, counts) + numbers * step
        end = np.minimum(first + step, np.repeat(ends, counts))
        self._check(stored, len(lengths), int((end - first + 1).sum()))
        return stored.ids, first, end

    def _check(self, stored: Stored, documents: int, tokens: int) -> None:
        sources = self.file.sources
        names = ", ".join(str(source.path) for source in sources[:3])
        names += f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        if not stored.read:
            raise ConfigError(f"there are no documents in {names}: all are empty")
        if not documents:
            raise ConfigError(
                f"the {self.split} split of {names} is empty: it got none of {stored.read} documents; give more text"
            )
        if tokens < self.length:
            raise ConfigError(
                f"the {self.split} split of {names} holds {tokens} tokens, too few for one row of {self.length}: give more"
                " text or lower --length"
            )

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of a pass in order, and the tokens up to the end of each, EOS included."""
        if epoch not in self._orders:
            _, first, end = self._pieces
            order = np.random.RandomState([self.seed % 2**32, epoch]).permutation(len(first))  # NumPy keeps its numbers
            self._orders = {epoch: (order, (end - first + 1)[order].cumsum())}
        return self._orders[epoch]

    @cached_property
    def pass_tokens(self) -> int:
        """Tokens of a pass."""
        _, first, end = self._pieces
        return int((end - first + 1).sum())

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row, ``[S]`` int64."""
        ids, first, end = self._pieces
        parts, at, stop = [], row * self.length, (row + 1) * self.length
        while at < stop:
            epoch, place = divmod(at, self.pass_tokens)
            order, ends = self._order(epoch)
            number = np.searchsorted(ends, place, side="right")
            piece = order[number]
            tokens = np.append(ids[first[piece] : end[piece]], self.tokens.eos)
            parts.append(tokens[place - ends[number] :][: stop - at])
            at += len(parts[-1])
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def in_other_order(self) -> PackedTokens:
        """Return rows of the same text in another order."""
        other = copy.copy(self)
        other.seed, other._orders = (self.seed + 1) % 2**31, {}
        return other

    def one_pass(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the first pass."""
        return map(self.__getitem__, range(self.pass_tokens // self.length))
