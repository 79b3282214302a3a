"""Documents on disk: plain text, JSONL, Parquet and `datasets` folders, read in a fixed order from any place.

A document is a text or a conversation, see :func:`kvpop_vllm.distill.chat.content_of`. Its optional ``group``
names documents that belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import FIELDS, content_of


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        content: its text, or a list of messages as chat templates take them.
        group: name of its group, or None.
        place: ``source.read(place)`` starts with this document.
        following: ``source.read(following)`` starts with the next document.
    """

    content: str | list[dict]
    group: str | None
    place: int
    following: int


class Source:
    """One file, or one `datasets` folder.

    Attributes:
        size: bytes.
        extent: the place after its last document.
    """

    extent = 1

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size

    def read(self, place: int) -> Iterator[Document]:
        """Yield documents from ``place`` on.

        Raises:
            ConfigError: a line or row cannot be read; the message names it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read()")

    def where(self, place: int) -> str:
        """Return the name of the document at ``place`` for error messages."""
        return str(self.path)

    def fingerprint(self) -> list:
        """Return name, size and a hash of a sample, which reveal a changed file without reading all of it."""
        return [self.path.name, self.size, _sample(self.path)]


def _sample(path: Path) -> str:
    with open(path, "rb") as file:
        sample = file.read(4096)
        file.seek(max(0, path.stat().st_size - 4096))
        return hashlib.sha256(sample + file.read(4096)).hexdigest()


class TextFile(Source):
    """Text file, which is one document at place 0."""

    def read(self, place: int) -> Iterator[Document]:
        """Yield the file's document."""
        if place == 0:
            try:
                text = self.path.read_bytes().decode("utf-8-sig")  # line ends are kept
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self.path} is not UTF-8 (byte {error.start}): convert it or leave it out"
                ) from None
            yield Document(text, None, 0, 1)


class Jsonl(Source):
    """JSONL file, a document per line; a place is an offset in bytes."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.extent = self.size

    def read(self, place: int) -> Iterator[Document]:
        """Yield documents from ``place`` on."""
        with open(self.path, "rb") as file:
            file.seek(place)
            for line in file:
                following = place + len(line)
                if line.strip():
                    yield self._document(line, place, following)
                place = following

    def _document(self, line: bytes, place: int, following: int) -> Document:
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            raise ConfigError(f"{self.where(place)} is not UTF-8: convert the file or leave the line out") from None
        except (ValueError, RecursionError) as error:
            problem = getattr(error, "msg", error)  # without a position, which would count within the line
            raise ConfigError(f"{self.where(place)} is not JSON ({problem}): write one object per line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{self.where(place)} is not a JSON object: write one per line, with a field `text`")
        return _document(record, self, place, following)

    def where(self, place: int) -> str:
        """Return path and line number."""
        with open(self.path, "rb") as file:
            return f"{self.path}:{1 + sum(1 for _ in _until(file, place))}"


def _until(file, place: int) -> Iterator[bytes]:
    while file.tell() < place and (line := file.readline()):
        yield line


class Parquet(Source):
    """Parquet file, a document per row; a place is the number of a row.

    One row group is in memory at a time, and no file stays open.
    """

    loaded: tuple[int, object] = (-1, None)

    def __init__(self, path: Path):
        super().__init__(path)
        self.open = _needs("pyarrow.parquet").ParquetFile
        try:
            with self.open(path) as file:
                names, meta = file.schema_arrow.names, file.metadata
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            _unreadable(path, "a Parquet file", error)
        self.columns = _columns(names, path)
        self.counts = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
        self.extent = sum(self.counts)

    def read(self, place: int) -> Iterator[Document]:
        """Yield documents from ``place`` on."""
        first = 0
        for group, count in enumerate(self.counts):
            if place < first + count:
                rows = self._load(group)
                for start in range(max(place - first, 0), count, 64):
                    for row, record in enumerate(rows.slice(start, 64).to_pylist(), first + start):
                        yield _document(record, self, row, row + 1)
                self.loaded = -1, None
            first += count

    def _load(self, group: int):
        if self.loaded[0] != group:
            try:
                with self.open(self.path) as file:
                    self.loaded = group, file.read_row_group(group, columns=self.columns)
            except (OSError, ValueError) as error:
                _unreadable(self.path, "a whole Parquet file", error)
        return self.loaded[1]

    def where(self, place: int) -> str:
        """Return path and row number."""
        return f"{self.path}, row {place}"


class Saved(Source):
    """Folder written by ``Dataset.save_to_disk``, a document per row; a place is the number of a row."""

    def __init__(self, path: Path):
        super().__init__(path)
        datasets = _needs("datasets")
        try:
            rows = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            _unreadable(path, "a `datasets` folder", error)
        self.rows = rows.select_columns(_columns(rows.column_names, path))
        self.files = sorted(path.glob("*.arrow"))
        self.size = sum(file.stat().st_size for file in self.files)
        self.extent = len(self.rows)

    def read(self, place: int) -> Iterator[Document]:
        """Yield documents from ``place`` on."""
        for row in range(place, self.extent):
            yield _document(self.rows[row], self, row, row + 1)

    def where(self, place: int) -> str:
        """Return path and row number."""
        return f"{self.path}, row {place}"

    def fingerprint(self) -> list:
        """Return name, size and a hash of a sample of each file."""
        return [self.path.name, self.size, [_sample(file) for file in self.files]]


FORMATS = {".txt": TextFile, ".jsonl": Jsonl, ".parquet": Parquet}


def find_sources(paths: Iterable[str | Path] | str | Path) -> list[Source]:
    """Return the sources in ``paths``, each once, in the order of their resolved paths.

    Folders are searched. Hidden files in them are ignored; files of other kinds are ignored and counted on
    stderr.

    Raises:
        ConfigError: a path does not exist, is of another kind, or is a folder without sources.
    """
    found: dict[Path, tuple[Path, type[Source]]] = {}
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if not paths:
        raise ConfigError("no text is given: name files or folders with --data")
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}: give --data one that exists")
        if not path.is_dir() and path.suffix.lower() not in FORMATS:
            raise ConfigError(f"{path} is of no kind that can be read: {', '.join(FORMATS)} or a `datasets` folder")
        here = dict(_search(path)) if path.is_dir() else {path: FORMATS[path.suffix.lower()]}
        if not here:
            raise ConfigError(f"folder {path} holds no {', '.join(FORMATS)} file and no `datasets` folder")
        found |= {file.resolve(): (file, kind) for file, kind in here.items()}
    return [kind(file) for _, (file, kind) in sorted(found.items())]


def _search(folder: Path) -> Iterator[tuple[Path, type[Source]]]:
    others: list[str] = []
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
                others.append(file.suffix or file.name)
    if others and os.environ.get("RANK", "0") == "0":
        kinds = ", ".join(sorted(set(others))[:5])
        print(f"{folder}: {len(others)} files of other kinds are passed over ({kinds})", file=sys.stderr)


def _columns(names: list[str], path: Path) -> list[str]:
    if not ("text" in names or "messages" in names or {"prompt", "response"} <= set(names)):
        raise ConfigError(
            f"{path} has no column `text` or `messages`, nor `prompt` and `response`, only {', '.join(names)}: rename one"
        )
    return [name for name in (*FIELDS, "group") if name in names]


def _document(record: dict, source: Source, place: int, following: int) -> Document:
    group = record.get("group")
    content = content_of(record, partial(source.where, place))
    return Document(content, None if group is None else str(group), place, following)


def _unreadable(path: Path, kind: str, error: Exception):
    raise ConfigError(f"{path} is not {kind} ({' '.join(str(error).split())}): leave it out") from None


def _needs(module: str):
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"this data needs {module.split('.')[0]}: pip install 'kvpop-vllm[distill]'") from None


LANES = 8
"""Number of files read in turn."""


class ReadingOrder:
    """Order that visits all documents of all sources once and depends on the sources alone.

    Sources are distributed to lanes. The next document comes from the lane of which the smallest part has
    been read. Several files are thus mixed in proportion to their sizes, with few of them open.
    """

    def __init__(self, sources: list[Source]):
        self.sources = sources
        self.lanes = [_Lane(sources[i::LANES]) for i in range(min(LANES, len(sources)))]

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        return self

    def __next__(self) -> tuple[int, Document]:
        """Return the number of a source, and its next document."""
        while open_lanes := [lane for lane in self.lanes if not lane.finished]:
            lane = min(open_lanes, key=_Lane.progress)
            index = lane.index
            if (document := lane.next()) is not None:
                return index * LANES + self.lanes.index(lane), document
        raise StopIteration

    def state(self) -> list[tuple[int, int]]:
        """Return a source and a place for every lane."""
        return [(lane.index, lane.place) for lane in self.lanes]

    def seek(self, state: list[tuple[int, int]]) -> None:
        """Go to a state."""
        for lane, (index, place) in zip(self.lanes, state, strict=True):
            lane.seek(index, place)


class _Lane:
    """Sources read one after another."""

    def __init__(self, sources: list[Source]):
        self.sources = sources
        self.before = list(accumulate((source.size for source in sources), initial=0))
        self.seek(0, 0)

    def seek(self, index: int, place: int) -> None:
        """Go to a place of a source."""
        self.index, self.place, self.reader = index, place, None

    @property
    def finished(self) -> bool:
        """True if all sources have been read."""
        return self.index == len(self.sources)

    def progress(self) -> float:
        """Return the share of the lane's bytes that has been read."""
        source = self.sources[self.index]
        return (self.before[self.index] + source.size * self.place / max(source.extent, 1)) / max(self.before[-1], 1)

    def next(self) -> Document | None:
        """Return the next document, or None at the end of a source."""
        if self.reader is None:
            self.reader = self.sources[self.index].read(self.place)
        document = next(self.reader, None)
        if document is None:
            self.seek(self.index + 1, 0)
        else:
            self.place = document.following
        return document
