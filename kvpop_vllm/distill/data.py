"""Training rows: documents of one split, tokenised once into a file and shuffled; packed, or one to a row."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sources import find_sources
from kvpop_vllm.distill.splits import SPLITS, in_split
from kvpop_vllm.distill.token_file import Stored, TokenFile
from kvpop_vllm.distill.tokens import DocumentEncoder


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
        after_prompt: True if a prompt does not count towards ``shortest``.
        options: see :class:`StoredRows`.
    """

    prompts = True

    def __init__(self, sources, tokenizer, length: int, *, shortest: int, after_prompt: bool, **options):
        super().__init__(sources, tokenizer, length, **options)
        self.shortest, self.after_prompt = shortest, after_prompt

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
        enough = rows - (prompts if self.after_prompt else 0) >= self.shortest
        place = " after its prompt" if self.after_prompt else ""
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
