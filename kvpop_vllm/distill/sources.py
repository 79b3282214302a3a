"""Documents of files and data sets: plain text, JSONL, Parquet, `datasets` folders and names, read in a fixed order.

A document is a text or a conversation, see :func:`kvpop_vllm.distill.chat.content_of`. Its optional ``group``
names documents that belong together.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import FIELDS, content_of
from kvpop_vllm.distill.hub_data import PREFIX, HubData, data_sets, needs
from kvpop_vllm.files import sample_digest

LANES = 8
"""Number of files read in turn."""


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        content: its text, or a list of messages as chat templates take them.
        group: name of its group, or None.
        origin: its name for error messages.
        before: bytes of its source before it.
    """

    content: str | list[dict]
    group: str | None
    origin: str
    before: float


class Selection:
    """Conditions on the fields of records, each ``FIELD=VALUE``; ``a.b`` is field b of field a.

    A record is taken if each named field has one of its values.

    Raises:
        ConfigError: a condition has another form.
    """

    def __init__(self, conditions: Sequence[str] = ()):
        self.conditions = list(conditions)
        self.values: dict[tuple[str, ...], set[str]] = {}
        for condition in conditions:
            field, equal, value = condition.partition("=")
            if not (field and equal):
                raise ConfigError(f"--select {condition} is no condition: give FIELD=VALUE")
            self.values.setdefault(tuple(field.split(".")), set()).add(value)

    def __contains__(self, record: dict) -> bool:
        """Return whether a record is taken."""
        return all(_text(_field(record, path)) in values for path, values in self.values.items())

    @property
    def columns(self) -> list[str]:
        """Fields of a record that it reads."""
        return sorted({path[0] for path in self.values})

    def __str__(self) -> str:
        return " ".join(self.conditions)


def _text(value) -> str | None:
    """Return a field's value as a condition spells it: text as it is, others as JSON; None without a value."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _field(record, path: tuple[str, ...]):
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record


class Source:
    """One file, or one `datasets` folder.

    Args:
        path: its path.
        selection: which records are documents.

    Attributes:
        size: bytes.
    """

    def __init__(self, path: Path, selection: Selection):
        self.path, self.files, self.selection = path, [path], selection
        self.size = path.stat().st_size

    def documents(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            ConfigError: a line or row cannot be read; the message names it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no documents()")

    def fingerprint(self) -> list:
        """Return name, size and a hash of a sample of each file, which reveal a change without reading all."""
        return [self.path.name, self.size, [sample_digest(file) for file in self.files]]


class TextFile(Source):
    """Text file, which is one document."""

    def __init__(self, path: Path, selection: Selection):
        super().__init__(path, selection)
        if selection.conditions:
            raise ConfigError(f"{path} has no fields for --select {selection}: leave the file or --select out")

    def documents(self) -> Iterator[Document]:
        """Yield the file's document."""
        try:
            text = self.path.read_bytes().decode("utf-8-sig")  # line ends are kept
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path} is not UTF-8 (byte {error.start}): convert it or leave it out") from None
        yield Document(text, None, str(self.path), 0)


class Jsonl(Source):
    """JSONL file, a document per line."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents."""
        before = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    name = f"{self.path}:{number}"
                    record = _parsed(line, name)
                    if record in self.selection:
                        yield document_of(record, name, before)
                before += len(line)


def _parsed(line: bytes, origin: str) -> dict:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ConfigError(f"{origin} is not UTF-8: convert the file or leave the line out") from None
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", error)  # without a position, which would count within the line
        raise ConfigError(f"{origin} is not JSON ({problem}): write one object per line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{origin} is not a JSON object: write one per line, with a field `text`")
    return record


class Table(Source):
    """Table with a document per row.

    Attributes:
        rows: number of rows.
    """

    rows: int

    def documents(self) -> Iterator[Document]:
        """Yield the documents."""
        for row, record in enumerate(self.records()):
            if record in self.selection:
                yield document_of(record, f"{self.path}, row {row}", self.size * row / self.rows)

    def records(self) -> Iterator[dict]:
        """Yield the rows."""
        raise NotImplementedError(f"{type(self).__name__} has no records()")


class Parquet(Table):
    """Parquet file, of which a few rows are in memory at a time."""

    def __init__(self, path: Path, selection: Selection):
        super().__init__(path, selection)
        self.open = needs("pyarrow.parquet").ParquetFile
        try:
            with self.open(path) as file:
                names, self.rows = file.schema_arrow.names, file.metadata.num_rows
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise _unreadable(path, "a Parquet file", error) from None
        self.columns = columns_of(names, path, selection)

    def records(self) -> Iterator[dict]:
        """Yield the rows."""
        try:
            with self.open(self.path) as file:
                for batch in file.iter_batches(64, columns=self.columns):
                    yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, "a whole Parquet file", error) from None


class Saved(Table):
    """Folder written by ``Dataset.save_to_disk``."""

    def __init__(self, path: Path, selection: Selection):
        super().__init__(path, selection)
        datasets = needs("datasets")
        try:
            table = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, "a `datasets` folder", error) from None
        self._take(table, sorted(path.glob("*.arrow")))

    def _take(self, table, files: list[Path]) -> None:
        """Take a `Dataset` that lies in some files."""
        columns = columns_of(table.column_names, self.path, self.selection)
        self.table, self.rows, self.files = table.select_columns(columns), len(table), files
        self.size = sum(file.stat().st_size for file in files)

    def records(self) -> Iterator[dict]:
        """Yield the rows."""
        return iter(self.table)


class Hub(Saved):
    """Data set by its name, downloaded into the cache of `datasets`."""

    def __init__(self, data: HubData, selection: Selection):
        self.data, self.path, self.selection = data, data.text, selection
        table = data.table()
        self._take(table, [Path(file["filename"]) for file in table.cache_files])

    def fingerprint(self) -> list:
        """Return values that change with the data; see :meth:`HubData.fingerprint`."""
        return self.data.fingerprint()


FORMATS = {".txt": TextFile, ".jsonl": Jsonl, ".parquet": Parquet}


def find_sources(paths: Iterable[str | Path] | str | Path, select: Sequence[str] = ()) -> list[Source]:
    """Return the sources in ``paths``, each once: files in the order of their resolved paths, then data sets.

    Folders are searched. Hidden files in them are ignored; files of other kinds are ignored and counted on
    stderr.

    Args:
        paths: files, folders, and names of data sets (:class:`HubData`).
        select: conditions on records, see :class:`Selection`.

    Raises:
        ConfigError: a path does not exist, is of another kind, or is a folder without sources; or a data set cannot be
            read.
    """
    selection = Selection(select)
    sources: dict[Path, tuple[Path, type[Source]]] = {}
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if not paths:
        raise ConfigError("no text is given: name files or folders with --data")
    names = [str(path) for path in paths if str(path).startswith(PREFIX)]
    for path in (Path(path) for path in paths if str(path) not in names):
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}: give --data one that exists")
        if not path.is_dir() and path.suffix.lower() not in FORMATS:
            raise ConfigError(f"{path} is of no kind that can be read: {', '.join(FORMATS)} or a `datasets` folder")
        in_path = dict(_search(path)) if path.is_dir() else {path: FORMATS[path.suffix.lower()]}
        if not in_path:
            raise ConfigError(f"folder {path} holds no {', '.join(FORMATS)} file and no `datasets` folder")
        sources |= {file.resolve(): (file, kind) for file, kind in in_path.items()}
    files = [kind(file, selection) for _, (file, kind) in sorted(sources.items())]
    return files + [Hub(data, selection) for data in data_sets(names)]


def _search(folder: Path) -> Iterator[tuple[Path, type[Source]]]:
    ignored: list[str] = []
    for parent, folders, files in os.walk(folder):
        parent = Path(parent)
        if "dataset_dict.json" in files:
            raise ConfigError(
                f"{parent} holds several datasets: give the folders of those that are meant ({parent}/train)"
            )
        if {"dataset_info.json", "state.json"} <= set(files):
            folders.clear()
            yield parent, Saved
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (parent / name for name in files if not name.startswith(".")):
            if file.suffix.lower() in FORMATS:
                yield file, FORMATS[file.suffix.lower()]
            else:
                ignored.append(file.suffix or file.name)
    if ignored and os.environ.get("RANK", "0") == "0":
        kinds = ", ".join(sorted(set(ignored))[:5])
        print(f"{folder}: {len(ignored)} files of other kinds are passed over ({kinds})", file=sys.stderr)


def columns_of(names: list[str], path: Path | str, selection: Selection) -> list[str]:
    """Return the columns of a table that are read.

    Raises:
        ConfigError: the table has no content, or lacks a field of the selection.
    """
    if missing := [name for name in selection.columns if name not in names]:
        raise ConfigError(f"{path} has no column {missing[0]}, only {', '.join(names)}: change --select {selection}")
    if not ("text" in names or "messages" in names or {"prompt", "response"} <= set(names)):
        raise ConfigError(
            f"{path} has no column `text` or `messages`, nor `prompt` and `response`, only {', '.join(names)}: rename one"
        )
    return [name for name in dict.fromkeys([*FIELDS, "group", *selection.columns]) if name in names]


def document_of(record: dict, origin: str, before: float) -> Document:
    """Return the document of a record; see :func:`content_of` for errors."""
    group = record.get("group")
    return Document(content_of(record, origin), None if group is None else str(group), origin, before)


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is not {kind} ({' '.join(str(error).split())}): leave it out")


def documents_of(sources: list[Source], tick: Callable[[float], object] = lambda share: None) -> Iterator[Document]:
    """Yield all documents of all sources once, in an order that depends on the sources alone.

    Sources are distributed to lanes. The next document comes from the lane of which the smallest part has
    been read. Several files are thus mixed in proportion to their sizes, with few of them open.

    Args:
        sources: what is read.
        tick: called before each document with the share of the sources that was read since.
    """
    lanes, read = [_lane(sources[i::LANES]) for i in range(min(LANES, len(sources)))], 0.0
    for share, document in heapq.merge(*lanes, key=itemgetter(0)):
        tick(share - read)
        read = share
        yield document
    tick(1 - read)


def _lane(sources: list[Source]) -> Iterator[tuple[float, Document]]:
    """Yield the documents of sources one after another, each with the share of the lane before it."""
    before, total = 0, max(1, sum(source.size for source in sources))
    for source in sources:
        yield from (((before + document.before) / total, document) for document in source.documents())
        before += source.size
