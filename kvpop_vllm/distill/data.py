"""Training rows: documents of one split, tokenised, shuffled and packed into rows of S tokens."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sources import Document, ReadingOrder, Source, find_sources
from kvpop_vllm.distill.tokens import Tokens

SPLITS = ("train", "validation", "test", "all")
BATCH = 32
"""Documents tokenised in one call."""


def split_of(key: str, validation: float, test: float) -> str:
    """Return the split of a document by the hash of ``key``, which is its group or else its text."""
    share = int.from_bytes(_digest(key), "big") / 2**64
    return "test" if share < test else "validation" if share < test + validation else "train"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


class Pass:
    """One pass over a split: its pieces, each once, shuffled through a buffer.

    The buffer is filled up to ``buffer`` tokens. A piece drawn at random leaves it, and others take its
    place. If the buffer holds the whole split, the shuffle is perfect. Of several documents with the same
    content only the first is used; if their groups are in different splits, the first one's group decides.
    """

    def __init__(
        self, sources: list[Source], tokens: Tokens, ours: Callable[[str], bool], *, seed: int, epoch: int, buffer: int
    ):
        self.sources, self.tokens, self.ours = sources, tokens, ours
        self.seed, self.epoch, self.capacity = seed, epoch, buffer
        self.order = ReadingOrder(sources)
        self.seen: set[int] = set()
        self.held: list[tuple[tuple[int, int, int], np.ndarray]] = []
        self.size = self.drawn = self.given = 0
        self.documents = self.kept = 0

    def next(self) -> np.ndarray | None:
        """Return the next piece, or None at the end."""
        while self.size < self.capacity and (batch := list(islice(self._kept(), BATCH))):
            for place, piece in self._pieces(batch):
                self.held.append((place, piece))
                self.size += len(piece)
        if not self.held:
            return None
        i = random.Random(f"{self.seed}/{self.epoch}/{self.drawn}").randrange(len(self.held))
        self.held[i], self.held[-1] = self.held[-1], self.held[i]
        piece = self.held.pop()[1]
        self.drawn, self.size, self.given = self.drawn + 1, self.size - len(piece), self.given + len(piece)
        return piece

    def _pieces(self, batch: list[tuple[int, Document]]) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
        """Yield the pieces of documents with their places: source, place, number."""
        found = self.tokens.pieces([(self.sources[i], document) for i, document in batch])
        for (source, document), pieces in zip(batch, found, strict=True):
            yield from (((source, document.place, number), piece) for number, piece in enumerate(pieces))

    def _kept(self) -> Iterator[tuple[int, Document]]:
        """Yield documents of this split, each content once."""
        for source, document in self.order:
            content = document.content
            text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
            if not content or not text.strip():
                continue
            self.documents += 1
            if (digest := int.from_bytes(_digest(text), "big", signed=True)) in self.seen:
                continue
            self.seen.add(digest)
            if self.ours(document.group or text):
                self.kept += 1
                yield source, document

    def state(self) -> dict:
        """Return the state of the pass.

        The buffer is given by the places of its pieces, which :meth:`load` reads again.
        """
        return {
            "epoch": self.epoch,
            "order": self.order.state(),
            "seen": torch.tensor(sorted(self.seen), dtype=torch.int64),
            "held": torch.tensor([place for place, _ in self.held], dtype=torch.int64).reshape(-1, 3),
            "counts": [self.drawn, self.given, self.documents, self.kept],
        }

    def load(self, state: dict) -> None:
        """Go to a state and read the pieces of its buffer again."""
        self.order.seek(state["order"])
        self.seen = set(state["seen"].tolist())
        self.drawn, self.given, self.documents, self.kept = state["counts"]
        places = [tuple(place) for place in state["held"].tolist()]
        wanted, again = set(places), {}
        documents = sorted({(source, place) for source, place, _ in places})
        for a in range(0, len(documents), BATCH):
            batch = [(i, next(self.sources[i].read(place))) for i, place in documents[a : a + BATCH]]
            for place, piece in self._pieces(batch):
                if place in wanted:
                    again[place] = piece
        self.held = [(place, again[place]) for place in places]
        self.size = sum(len(piece) for _, piece in self.held)


class PackedTokens:
    """Rows of S tokens of one split, in an order that depends on the sources and the seed alone.

    A document belongs to a split for good, by the hash of its group or else its text. Documents end with EOS
    and follow each other without a gap; a row may begin and end anywhere in a document. Borders are not
    marked, and attention runs across them. Of the rows of all processes, row ``j`` goes to rank ``j %
    world_size``; each process reads and tokenises all of the text. Tokens that do not fill a row at the end
    of a pass open the next pass, or are left out if there is none.

    Iteration yields ``[S]`` int64 tensors. Once exhausted (``repeat=False``), ``iter()`` starts over.

    Args:
        sources: files and folders, see :func:`kvpop_vllm.distill.sources.find_sources`.
        tokenizer: the model's tokenizer.
        length: S.
        split: ``train``, ``validation``, ``test`` or ``all``.
        seed: seed of the shuffle, which differs from pass to pass.
        rank: rank of this process.
        world_size: number of processes.
        repeat: True to continue with further passes without end.
        vocab_size: vocabulary of the model, to detect a tokenizer of another model.
        validation: validation share of the documents.
        test: test share of the documents.
        buffer: tokens that the shuffle chooses from (4 bytes each).
        piece_rows: rows that one document may fill in succession; the rest is treated as a document of its
            own.

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
        rank: int = 0,
        world_size: int = 1,
        repeat: bool = True,
        vocab_size: int | None = None,
        validation: float = 0.05,
        test: float = 0.05,
        buffer: int = 1 << 22,
        piece_rows: int = 4,
    ):
        if length < 2:
            raise ConfigError(f"a row needs at least 2 tokens, got length {length}: raise --length")
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if not (validation >= 0 and test >= 0 and validation + test < 1):
            raise ConfigError(
                f"shares of validation {validation} and test {test} leave nothing to train on: lower them"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} processes")
        if buffer < 1 or piece_rows < 1:
            raise ConfigError(f"buffer and piece_rows must be at least 1, got {buffer} and {piece_rows}")
        self.length, self.split, self.seed, self.repeat = length, split, seed, repeat
        self.rank, self.world_size, self.shares, self.buffer = rank, world_size, (validation, test), buffer
        self.sources = find_sources(sources)
        self.tokens = Tokens(tokenizer, piece_rows * length, vocab_size)
        self._start()

    def _start(self) -> None:
        self.pass_, self.rest, self.rows, self.exhausted = self._pass(0), np.empty(0, np.int32), 0, False

    def _pass(self, epoch: int) -> Pass:
        def ours(key: str) -> bool:
            return self.split == "all" or split_of(key, *self.shares) == self.split

        return Pass(self.sources, self.tokens, ours, seed=self.seed, epoch=epoch, buffer=self.buffer)

    def __iter__(self) -> PackedTokens:
        if self.exhausted:
            self._start()
        return self

    def __next__(self) -> torch.Tensor:
        """Return the next row of this rank, ``[S]`` int64."""
        while not self.exhausted:
            row = self._row()
            if row is None:
                self.exhausted = True
            else:
                self.rows += 1
                if (self.rows - 1) % self.world_size == self.rank:
                    return torch.from_numpy(row.astype(np.int64))
        raise StopIteration

    def _row(self) -> np.ndarray | None:
        parts, count = [self.rest], len(self.rest)
        while count < self.length:
            piece = self.pass_.next()
            if piece is not None:
                parts.append(piece)
                count += len(piece)
                continue
            self._check_pass()
            if not self.repeat:
                return None
            self.pass_ = self._pass(self.pass_.epoch + 1)
        tokens = np.concatenate(parts)
        self.rest = tokens[self.length :].copy()
        return tokens[: self.length]

    def _check_pass(self) -> None:
        done, names = self.pass_, ", ".join(str(source.path) for source in self.sources[:3])
        names += f" and {len(self.sources) - 3} more" if len(self.sources) > 3 else ""
        if not done.documents:
            raise ConfigError(f"there are no documents in {names}: all are empty")
        if not done.kept:
            raise ConfigError(
                f"the {self.split} split of {names} is empty: it got none of {done.documents} documents; give more text"
            )
        if done.given < self.length:
            raise ConfigError(
                f"the {self.split} split of {names} holds {done.given} tokens, too few for one row of {self.length}: give more"
                " text or lower --length"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash that is equal for equal rows: sources, tokenizer, S, split, seed and order, but not ranks."""
        settings = [self.length, self.split, self.seed, self.shares, self.buffer]
        all_of_it = [settings, self.tokens.fingerprint(), [source.fingerprint() for source in self.sources]]
        return hashlib.sha256(json.dumps(all_of_it).encode()).hexdigest()[:16]

    def state_dict(self) -> dict:
        """Return the position; after :meth:`load_state_dict` the rows continue from there.

        It holds numbers and int64 tensors: 8 bytes for every document read in this pass, 24 for every piece
        in the buffer.
        """
        return {
            "fingerprint": self.fingerprint,
            "share": [self.rank, self.world_size],
            "rows": self.rows,
            "rest": torch.from_numpy(self.rest.astype(np.int64)),
            "pass": self.pass_.state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go to a position.

        Pieces of the buffer are read and tokenised again, which takes as long as filling it.

        Raises:
            ConfigError: the position is one in other data, or of another rank.
        """
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                "the data is not what the checkpoint was made with (files, tokenizer, length, split or seed have changed):"
                " restore it or start another run"
            )
        if state["share"] != [self.rank, self.world_size]:
            raise ConfigError(f"this is the data position of rank {state['share'][0]} of {state['share'][1]}, not of"
                              f" {self.rank} of {self.world_size}: use as many processes again")  # fmt: skip
        self.rows, self.exhausted = state["rows"], False
        self.rest = state["rest"].numpy().astype(np.int32)
        self.pass_ = self._pass(state["pass"]["epoch"])
        self.pass_.load(state["pass"])
