"""Training rows of a stream of documents, which is read as far as rows are asked for and goes on where it was left."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import Rows
from kvpop_vllm.distill.hub_data import PREFIX, data_sets, needs
from kvpop_vllm.distill.sources import Document, Selection, columns_of, document_of
from kvpop_vllm.distill.splits import has_content, in_split, share_of_document

BLOCK = {"train": 1024}
"""Documents that are shuffled together, by split."""
OTHER_BLOCK = 64
"""Documents that are shuffled together in other splits, of which few rows are needed."""


@dataclass(frozen=True)
class Place:
    """Place between two blocks of a stream.

    Attributes:
        row: number of the first row after it.
        block: number of the block after it.
        record: number of the record after it, in its pass.
        state: state of the `IterableDataset`; None at the start of a pass.
        before: tokens of earlier blocks that open the row.
        useful: True if this pass has given tokens or rows.
    """

    row: int = 0
    block: int = 0
    record: int = 0
    state: dict | None = None
    before: tuple[int, ...] = ()
    useful: bool = False


class StreamedRows(Rows):
    """Rows of data sets that are streamed; see :class:`Rows`.

    The stream is that of the data sets, which take turns document by document. It is cut into blocks of as many
    documents as :data:`BLOCK` says, and a block is shuffled by its number and the seed. So row j follows from data
    sets, seed and j, in each process. Reading on is cheap; a row of an earlier block than the last one begins at the
    start again. Documents with equal contents are all used.

    Args:
        names: names of data sets (:class:`HubData`).
        tokenizer: see :class:`Rows`.
        length: see :class:`Rows`.
        pack: True to fill rows with documents as :class:`kvpop_vllm.distill.data.PackedTokens`; otherwise a row is one
            document of at most S tokens, as in :class:`kvpop_vllm.distill.data.DocumentRows`.
        piece_rows: rows that one document may fill in succession.
        shortest: minimum number of tokens of a row that is a document.
        after_prompt: True if a prompt does not count towards ``shortest``.
        select: conditions on records, see :class:`kvpop_vllm.distill.sources.Selection`.
        options: see :class:`Rows`.

    Raises:
        ConfigError: a name is not that of a data set, or it cannot be read.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer,
        length: int,
        *,
        pack: bool = True,
        piece_rows: int = 4,
        shortest: int = 2,
        after_prompt: bool = False,
        select: Sequence[str] = (),
        **options,
    ):
        super().__init__(tokenizer, length, **options)
        if files := [name for name in names if not str(name).startswith(PREFIX)]:
            raise ConfigError(
                f"--stream reads data sets, and {files[0]} is none: give {PREFIX}NAME, or {PREFIX}./FOLDER"
            )
        self.pack, self.piece = pack, piece_rows * length
        self.shortest, self.after_prompt, self.selection = shortest, after_prompt, Selection(select)
        self.data = data_sets(names)
        self.stream = self._interleaved()
        self.go_to(Place())

    def _interleaved(self):
        """Return the `IterableDataset` of all data sets."""
        streams = []
        for data in self.data:
            stream = data.stream()
            columns = stream.column_names or list(next(iter(stream), {}))
            streams.append(stream.select_columns(columns_of(columns, data.text, self.selection)))
        if len(streams) == 1:
            return streams[0]
        options = {"stopping_strategy": "all_exhausted_without_replacement"}
        return needs("datasets").interleave_datasets(streams, **options)

    def made_from(self) -> list:
        """Return the data sets with their revisions, the tokenizer, and how documents become rows."""
        cut = [self.piece] if self.pack else [self.shortest, self.after_prompt]
        files = [data.fingerprint() for data in self.data]
        return ["stream", cut, self._block_size, self.selection.conditions, files, self.tokens.fingerprint()]

    def _fresh(self) -> StreamedRows:
        other = copy.copy(self)
        other.go_to(Place())
        return other

    @property
    def _block_size(self) -> int:
        return BLOCK.get(self.split, OTHER_BLOCK)

    def go_to(self, place: Place) -> None:
        """Go to a place between two blocks; the next row that is asked for may not be before it."""
        self.place, self.after, self.rows, self.prompts = place, place, [], []
        self._reading = None

    def state(self) -> dict:
        """Return what :meth:`restore` needs to go on with the rows from the last one that was asked for."""
        return asdict(self.place)

    def restore(self, state: dict) -> None:
        """Go on as :meth:`state` says, without reading what was before."""
        self.go_to(Place(**state | {"before": tuple(state["before"])}))

    def __getitem__(self, row: int) -> torch.Tensor:
        """Return a row, ``[S]`` int64."""
        number = self._find(row)
        return torch.from_numpy(self.rows[number].astype(np.int64))

    def prompt_length(self, row: int) -> int:
        """Return the number of tokens of a row's prompt, 0 for packed rows."""
        number = self._find(row)
        return self.prompts[number]

    def _find(self, row: int) -> int:
        """Read on until a row is there, and return its number in the block."""
        # a stream goes forward only
        if row < self.place.row:
            self.go_to(Place())
        while row >= self.place.row + len(self.rows):
            self._read()
        return row - self.place.row

    def _read(self) -> None:
        """Read the next block."""
        place, documents, ends = self.after, [], False
        stream, records = self._reading or self._begin(place.state)
        number = place.record
        while len(documents) < self._block_size and not ends:
            record = self._next(records, number)
            ends = record is None
            if not ends and record in self.selection:
                document = document_of(record, self._record_name(number), 0)
                if has_content(document) and in_split(share_of_document(document), self.split, *self.shares):
                    documents.append(document)
            number += 1
        tokens = [(document, ids) for document, ids in self.tokens.encode(documents) if self._fits(ids)]
        rows, prompts, rest = (self._packed if self.pack else self._documents)(place, tokens)
        # a pass that gave nothing would be repeated for ever
        useful = place.useful or len(rows) > 0 or len(rest) > len(place.before)
        if ends and not useful:
            raise ConfigError(self._nothing())
        self._reading, state = (None, None) if ends else ((stream, records), stream.state_dict())
        self.place, self.rows, self.prompts = place, rows, prompts
        number = 0 if ends else number
        self.after = Place(place.row + len(rows), place.block + 1, number, state, tuple(rest), useful and not ends)

    def _record_name(self, record: int) -> str:
        """Return the name of a record, by its number in a pass, as rows of tables are named."""
        return f"{self._names}, row {record}" + (" of all in turn" if len(self.data) > 1 else "")

    @property
    def _names(self) -> str:
        return " ".join(data.text for data in self.data)

    def _next(self, records, number: int) -> dict | None:
        """Return the next record of a stream, None at its end; ``number`` is its number in the pass.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return next(records, None)
        except (OSError, ValueError, needs("datasets").exceptions.DatasetsError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise ConfigError(
                f"{self._names} cannot be read from row {number} on ({reason}): mend the data or the connection"
            ) from None

    def _begin(self, state: dict | None):
        """Return the stream in a state, and an iterator of its records; to end one may take `datasets` seconds."""
        stream = copy.deepcopy(self.stream)
        if state is not None:
            stream.load_state_dict(state)
        return stream, iter(stream)

    def _fits(self, ids: np.ndarray) -> bool:
        return self.longest is None or len(ids) <= self.longest

    def _packed(self, place: Place, tokens) -> tuple[np.ndarray, list[int], list[int]]:
        """Return the rows that a block fills, their prompts, and the tokens after them."""
        step, eos = self.piece - 1, self.tokens.eos
        # a document longer than a piece would fill many neighbouring rows
        pieces = [ids[first : first + step] for _, ids in tokens for first in range(0, len(ids), step)]
        parts = [np.array(place.before, np.int32)]
        for number in self._permutation(place.block, len(pieces)):
            parts += [pieces[number], np.array([eos], np.int32)]
        line = np.concatenate(parts)
        count = len(line) // self.length
        rows = line[: count * self.length].reshape(count, self.length)
        return rows, [0] * count, line[count * self.length :].tolist()

    def _documents(self, place: Place, tokens: list[tuple[Document, np.ndarray]]) -> tuple[list, list[int], list[int]]:
        """Return the rows of a block's documents, their prompts, and no tokens."""
        rows, prompts = [], []
        for number in self._permutation(place.block, len(tokens)):
            document, ids = tokens[number]
            row, prompt = np.append(ids, self.tokens.eos)[: self.length], self.tokens.prompt_length(document, ids)
            if len(row) - (prompt if self.after_prompt else 0) >= self.shortest:
                rows.append(row)
                prompts.append(min(prompt, len(row) - 1))
        return rows, prompts, []

    def _nothing(self) -> str:
        reasons = [f"--select {self.selection}"] if self.selection.conditions else []
        reasons += [f"--longest {self.longest}"] if self.longest else []
        reasons += [] if self.pack else [f"{self.shortest} tokens of a row"]
        rest = f" that fits {', '.join(reasons)}" if reasons else ""
        return f"the {self.split} split of {self._names} has no document{rest}: give more text"
