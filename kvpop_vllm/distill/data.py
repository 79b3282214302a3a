"""Training rows: documents of one split, tokenised once into a file and shuffled; packed, or one to a row."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hub_data import needs
from kvpop_vllm.distill.sources import Document, Source, documents_of, find_sources
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
        prompts: number of ids of each document's prompt, int64, or None if they were not asked for.
    """

    ids: np.ndarray
    lengths: np.ndarray
    shares: np.ndarray
    read: int
    prompts: np.ndarray | None


TOKENS = "tokens.bin"
"""Name of the file of tokens."""


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
        prompts: True to store the lengths of prompts too.
        processes: processes that tokenise. The file does not depend on it.
    """

    def __init__(
        self, sources: list[Source], tokens: DocumentEncoder, folder: Path, prompts: bool = False, processes: int = 1
    ):
        self.sources, self.tokens, self.folder, self.prompts = sources, tokens, folder, prompts
        self.processes = processes
        self.path, self.note = folder / TOKENS, folder / "tokens.json"
        self.made_from = {
            "version": 1,
            "files": [source.fingerprint() for source in sources],
            "tokenizer": tokens.fingerprint(),
        } | ({"prompts": True} if prompts else {})
        if conditions := sources[0].selection.conditions:
            self.made_from["select"] = conditions
        # fingerprints are of samples: a change between them shows in the time alone
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
            origin = note.get("made_from"), note.get("modified")
            if origin != (self.made_from, self.modified) or not self._is_complete(note):
                note = self._write()
            size, documents = note["ids"], note["documents"]
            ids = np.memmap(self.path, np.int32, "r", shape=size) if size else np.empty(0, np.int32)
            lengths = np.fromfile(self.path, np.int64, documents, offset=4 * size)
            shares = np.fromfile(self.path, np.float64, documents, offset=4 * size + 8 * documents)
            prompts_offset = 4 * size + 16 * documents
            prompts = np.fromfile(self.path, np.int64, documents, offset=prompts_offset) if self.prompts else None
        return Stored(ids, lengths, shares, note["read"], prompts)

    def _is_complete(self, note: dict) -> bool:
        """Return whether the file holds all arrays."""
        # int32 ids; lengths, shares and prompts have 8 bytes each
        size = 4 * note["ids"] + (24 if self.prompts else 16) * note["documents"]
        return self.path.exists() and self.path.stat().st_size == size

    def _write(self) -> dict:
        self.note.unlink(missing_ok=True)  # it is about the file of before
        self.read, lengths, shares, prompts = 0, array("q"), array("d"), array("q")
        with replacing(self.path) as draft, open(draft, "wb") as file:
            for share, ids, prompt in self._tokenised():
                file.write(ids.tobytes())
                lengths.append(len(ids))
                shares.append(share)
                if self.prompts:
                    prompts.append(prompt)
            lengths.tofile(file)
            shares.tofile(file)
            prompts.tofile(file)
        # the note comes last: a process that is stopped before leaves a file that is written again
        note = {
            "made_from": self.made_from,
            "modified": self.modified,
            "ids": sum(lengths),
            "documents": len(lengths),
            "read": self.read,
        }
        write_whole(self.note, json.dumps(note) + "\n")
        return note

    def _tokenised(self) -> Iterator[tuple[float, np.ndarray, int]]:
        """Yield :func:`share_of` each document, its ids, and their number in its prompt (0 if that was not asked for)."""
        if self.processes == 1:
            for document, ids in self.tokens.encode(self._distinct()):
                yield share_of_document(document), ids, self._prompt(document, ids)
            return
        datasets = needs("datasets")
        content = datasets.Features({"document": datasets.Value("large_string")})
        columns = {"share": datasets.Value("float64"), "ids": datasets.List(datasets.Value("int32"))}
        columns |= {"prompt": datasets.Value("int64")}
        with TemporaryDirectory(prefix="documents-", dir=self.folder) as scratch:
            documents = datasets.Dataset.from_generator(
                lambda: ({"document": json.dumps(vars(document))} for document in self._distinct()),
                features=content,
                cache_dir=scratch,
                fingerprint="documents",
            )
            options = {"features": datasets.Features(columns), "remove_columns": ["document"]}
            tokens = documents.map(
                self._tokenise, batched=True, batch_size=64, num_proc=self.processes, new_fingerprint="ids", **options
            )
            for row in tokens.with_format("numpy"):
                yield float(row["share"]), row["ids"].astype(np.int32), int(row["prompt"])

    def _tokenise(self, batch: dict[str, list[str]]) -> dict[str, list]:
        """Return the columns of :meth:`_tokenised` for documents of a table."""
        documents = [Document(**json.loads(text)) for text in batch["document"]]
        encoded = list(self.tokens.encode(documents))
        return {
            "share": [share_of_document(document) for document in documents],
            "ids": [ids for _, ids in encoded],
            "prompt": [self._prompt(document, ids) for document, ids in encoded],
        }

    def _prompt(self, document: Document, ids: np.ndarray) -> int:
        return self.tokens.prompt_length(document, ids) if self.prompts else 0

    def _distinct(self) -> Iterator[Document]:
        """Yield the documents that are not empty, each content once."""
        digests = set()
        for document in documents_of(self.sources):
            text = _text_of(document)
            if has_content(document):
                self.read += 1
                if (digest := _digest(text)) not in digests:
                    digests.add(digest)
                    yield document


def has_content(document: Document) -> bool:
    """Return whether a document is more than white space."""
    return bool(document.content and _text_of(document).strip())


def share_of_document(document: Document) -> float:
    """Return :func:`share_of` a document."""
    return share_of(document.group or _text_of(document))


def _text_of(document: Document) -> str:
    """Return a text that is equal for equal contents."""
    content = document.content
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


class Rows(ABC):
    """Rows of tokens of one split; ``rows[j]`` is row j, ``[S]`` int64, for any j from 0 on.

    A document belongs to a split for good, by the hash of its group or else its text.

    Args:
        tokenizer: the model's tokenizer.
        length: maximum S.
        split: ``train``, ``validation``, ``test`` or ``all``.
        seed: seed of the order.
        vocab_size: vocabulary of the model, to detect a tokenizer of another model.
        validation: validation share of the documents.
        test: test share of the documents.
        longest: most tokens of a document; longer ones are left out. None for any number.

    Raises:
        ConfigError: the data cannot be used. An empty or too small split is found only when it has been read.
    """

    def __init__(
        self,
        tokenizer,
        length: int,
        *,
        split: str = "train",
        seed: int = 0,
        vocab_size: int | None = None,
        validation: float = 0.05,
        test: float = 0.05,
        longest: int | None = None,
    ):
        if length < 2:
            raise ConfigError(f"a row needs at least 2 tokens, got length {length}: raise --length")
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if not (validation >= 0 and test >= 0 and validation + test < 1):
            raise ConfigError(
                f"shares of validation {validation} and test {test} leave nothing to train on: lower them"
            )
        self.length, self.split, self.seed, self.shares = length, split, seed, (validation, test)
        self.longest, self.tokens = longest, DocumentEncoder(tokenizer, vocab_size)

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal rows: sources, tokenizer, S, split, seed and order."""
        settings = [self.length, self.split, self.seed, self.shares, *self.made_from()]
        settings += [self.longest] if self.longest else []
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]

    @abstractmethod
    def made_from(self) -> list:
        """Return what the rows are made from besides the arguments of this class, for the fingerprint."""

    @abstractmethod
    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row, ``[S]`` int64."""

    @abstractmethod
    def prompt_length(self, row: int) -> int:
        """Return the number of tokens of a row's prompt, at its start."""

    def in_other_order(self) -> Rows:
        """Return rows of the same text in another order."""
        other = self._fresh()
        other.seed = (self.seed + 1) % 2**31
        return other

    def of_split(self, split: str) -> Rows:
        """Return rows of another split of the same text."""
        other = self._fresh()
        other.split = split
        return other

    @abstractmethod
    def _fresh(self) -> Rows:
        """Return a copy that has read nothing yet."""

    def _permutation(self, number: int, count: int) -> np.ndarray:
        """Return the order of ``count`` pieces in a pass or block."""
        return np.random.RandomState([self.seed % 2**32, number]).permutation(count)  # NumPy keeps its numbers


class StoredRows(Rows):
    """Rows of text that is tokenised once into a file; see :class:`Rows`.

    A pass holds every piece of a document once, in an order that depends on the sources, the seed and the pass alone.
    The text is read when the first row is asked for.

    Args:
        sources: files and folders, see :func:`kvpop_vllm.distill.sources.find_sources`.
        tokenizer: see :class:`Rows`.
        length: see :class:`Rows`.
        folder: folder of the tokens, see :class:`TokenFile`; default: one that is removed at the end.
        select: conditions on records, see :class:`kvpop_vllm.distill.sources.Selection`.
        processes: processes that tokenise.
        options: see :class:`Rows`.
    """

    prompts = False
    """True if the rows know the lengths of prompts."""

    def __init__(
        self,
        sources: Iterable[str | Path] | str | Path,
        tokenizer,
        length: int,
        *,
        folder: Path | None = None,
        select: Sequence[str] = (),
        processes: int = 1,
        **options,
    ):
        super().__init__(tokenizer, length, **options)
        if folder is None:
            self._own_folder = TemporaryDirectory(prefix="kvpop-tokens-")
            folder = Path(self._own_folder.name)
        self.file = TokenFile(find_sources(sources, select), self.tokens, folder, self.prompts, processes)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def made_from(self) -> list:
        """Return how documents are cut, and what the file of tokens is made from."""
        return [self.cut, self.file.made_from]

    @property
    @abstractmethod
    def cut(self) -> int:
        """Number that says how documents are cut, for the fingerprint."""

    def _fresh(self) -> Rows:
        other = copy.copy(self)
        other._orders = {}
        for name in ("_pieces", "_documents", "pass_tokens"):  # which depend on the split
            other.__dict__.pop(name, None)
        return other

    def _in_split(self, stored: Stored) -> np.ndarray:
        """Return which documents are this split's and not too long, ``[documents]`` booleans."""
        ours = in_split(stored.shares, self.split, *self.shares)
        return ours if self.longest is None else ours & (stored.lengths <= self.longest)

    def _check(self, stored: Stored, documents: int, needed: str, short: str = "") -> None:
        """Check that the split holds documents and that nothing is too short.

        Args:
            stored: the tokens of all splits.
            documents: documents of this split.
            needed: what to change if the split is too short.
            short: why it is, empty if it is not.
        """
        sources, selection = self.file.sources, self.file.sources[0].selection
        names = ", ".join(str(source.path) for source in sources[:3])
        names += f" and {len(sources) - 3} more" if len(sources) > 3 else ""
        if not stored.read:
            reason = f"none fits --select {selection}" if selection.conditions else "all are empty"
            raise ConfigError(f"there are no documents in {names}: {reason}")
        if not documents:
            limit = f" of at most {self.longest} tokens" if self.longest else ""
            raise ConfigError(
                f"the {self.split} split of {names} is empty: it got none of {stored.read} documents{limit}; give more text"
            )
        if short:
            raise ConfigError(f"the {self.split} split of {names} holds {short}: {needed}")


class PackedTokens(StoredRows):
    """Rows of exactly S tokens, filled with documents one after another; see :class:`StoredRows`.

    A document ends with EOS; if it is long, it is cut into pieces that end with EOS and are independent of each
    other from then on. Pieces follow each other without a gap; a row may begin and end anywhere in a document.
    Borders are not marked, and attention runs across them. Tokens that do not fill a row at the end of a pass
    open the next pass.

    Args:
        sources: see :class:`StoredRows`.
        tokenizer: see :class:`Rows`.
        length: S.
        piece_rows: rows that one document may fill in succession.
        options: see :class:`StoredRows`.
    """

    def __init__(self, sources, tokenizer, length: int, *, piece_rows: int = 4, **options):
        if piece_rows < 1:
            raise ConfigError(f"a document fills at least 1 row in succession, got piece_rows {piece_rows}")
        super().__init__(sources, tokenizer, length, **options)
        self.piece = piece_rows * length

    @property
    def cut(self) -> int:
        """Maximum tokens of a piece; see :class:`Rows`."""
        return self.piece

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids of all documents, and where the pieces of this split begin and end in them."""
        stored = self.file.load()
        ours = self._in_split(stored)
        ends = stored.lengths.cumsum()[ours]
        lengths = stored.lengths[ours]
        step = self.piece - 1
        counts = -(-lengths // step)
        numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        first = np.repeat(ends - lengths, counts) + numbers * step
        end = np.minimum(first + step, np.repeat(ends, counts))
        tokens = int((end - first + 1).sum())
        short = f"{tokens} tokens, too few for one row of {self.length}" if tokens < self.length else ""
        self._check(stored, len(lengths), "give more text or lower --length", short)
        return stored.ids, first, end

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of a pass in order, and the tokens up to the end of each, EOS included."""
        if epoch not in self._orders:
            _, first, end = self._pieces
            order = self._permutation(epoch, len(first))
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
        parts, token, stop = [], row * self.length, (row + 1) * self.length
        while token < stop:
            epoch, place = divmod(token, self.pass_tokens)
            order, ends = self._order(epoch)
            number = np.searchsorted(ends, place, side="right")
            piece = order[number]
            tokens = np.append(ids[first[piece] : end[piece]], self.tokens.eos)
            parts.append(tokens[place - ends[number] :][: stop - token])
            token += len(parts[-1])
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def prompt_length(self, row: int) -> int:
        """Return 0, because a row may begin anywhere in a document."""
        return 0

    def one_pass(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the first pass."""
        return map(self.__getitem__, range(self.pass_tokens // self.length))


class DocumentRows(StoredRows):
    """Rows of one document each, with EOS at its end, of at most S tokens; see :class:`StoredRows`.

    What a document has beyond S tokens is left out. So are documents from which nothing would be evicted.

    Args:
        sources: see :class:`StoredRows`.
        tokenizer: see :class:`Rows`.
        length: S.
        shortest: minimum number of tokens of a row.
        behind_prompt: True if a prompt does not count towards ``shortest``.
        options: see :class:`StoredRows`.
    """

    prompts = True

    def __init__(self, sources, tokenizer, length: int, *, shortest: int, behind_prompt: bool, **options):
        super().__init__(sources, tokenizer, length, **options)
        self.shortest, self.behind_prompt = shortest, behind_prompt

    @property
    def cut(self) -> int:
        """0, because documents are cut at S; see :class:`Rows`."""
        return 0

    @cached_property
    def _documents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids of all documents, and where the rows' documents begin and end in them, and their prompts' lengths."""
        stored = self.file.load()
        ours = self._in_split(stored)
        ends, lengths, prompts = stored.lengths.cumsum()[ours], stored.lengths[ours], stored.prompts[ours]
        rows = np.minimum(lengths + 1, self.length)
        enough = rows - (prompts if self.behind_prompt else 0) >= self.shortest
        place = " behind its prompt" if self.behind_prompt else ""
        short = "" if enough.any() else f"no document of {self.shortest} tokens{place}"
        self._check(stored, len(lengths), "give longer documents, raise --length, or lower --topk or --window", short)
        return stored.ids, (ends - lengths)[enough], ends[enough], np.minimum(prompts, rows - 1)[enough]

    def _document(self, row: int) -> int:
        """Return the number of a row's document."""
        count = len(self._documents[1])
        epoch, place = divmod(row, count)
        if epoch not in self._orders:
            self._orders = {epoch: self._permutation(epoch, count)}
        return self._orders[epoch][place]

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row, ``[S]`` int64."""
        ids, first, end, _ = self._documents
        number = self._document(row)
        tokens = np.append(ids[first[number] : end[number]], self.tokens.eos)[: self.length]
        return torch.from_numpy(tokens.astype(np.int64))

    def prompt_length(self, row: int) -> int:
        """Return the number of tokens of a row's prompt: a conversation without its last answer, 0 for plain text."""
        return int(self._documents[3][self._document(row)])
