"""Documents on disk: plain text, JSONL, Parquet and `datasets` folders, read in a fixed order.

A document is a text or a conversation, see :func:`kvpop_vllm.distill.chat.content_of`. Its optional ``group``
names documents that belong together.
"""

from __future__ import annotations

import hashlib
import heapq
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import FIELDS, content_of

LANES = 8
"""Number of files read in turn."""


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        content: its text, or a list of messages as chat templates take them.
        group: name of its group, or None.
        where: its name for error messages.
        before: bytes of its source before it.
    """

    content: str | list[dict]
    group: str | None
    where: str
    before: float


class Source:
    """One file, or one `datasets` folder.

    Attributes:
        size: bytes.
    """

    def __init__(self, path: Path):
        self.path, self.files = path, [path]
        self.size = path.stat().st_size

    def documents(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            ConfigError: a line or row cannot be read; the message names it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no documents()")

    def fingerprint(self) -> list:
        """Return name, size and a hash of a sample of each file, which reveal a change without reading all."""
        return [self.path.name, self.size, [_sample(file) for file in self.files]]


def _sample(path: Path) -> str:
    with open(path, "rb") as file:
        sample = file.read(4096)
        file.seek(max(0, path.stat().st_size - 4096))
        return hashlib.sha256(sample + file.read(4096)).hexdigest()


class TextFile(Source):
    """Text file, which is one document."""

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
                    where = f"{self.path}:{number}"
                    yield _document(_parsed(line, where), where, before)
                before += len(line)


def _parsed(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8: convert the file or leave the line out") from None
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", error)  # without a position, which would count within the line
        raise ConfigError(f"{where} is not JSON ({problem}): write one object per line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object: write one per line, with a field `text`")
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
            yield _document(record, f"{self.path}, row {row}", self.size * row / self.rows)

    def records(self) -> Iterator[dict]:
        """Yield the rows."""
        raise NotImplementedError(f"{type(self).__name__} has no records()")


class Parquet(Table):
    """Parquet file, of which a few rows are in memory at a time."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.open = _needs("pyarrow.parquet").ParquetFile
        try:
            with self.open(path) as file:
                names, self.rows = file.schema_arrow.names, file.metadata.num_rows
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise _unreadable(path, "a Parquet file", error) from None
        self.columns = _columns(names, path)

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

    def __init__(self, path: Path):
        super().__init__(path)
        datasets = _needs("datasets")
        try:
            table = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, "a `datasets` folder", error) from None
        self.table, self.rows = table.select_columns(_columns(table.column_names, path)), len(table)
        self.files = sorted(path.glob("*.arrow"))
        self.size = sum(file.stat().st_size for file in self.files)

    def records(self) -> Iterator[dict]:
        """Yield the rows."""
        return iter(self.table)


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


def _document(record: dict, where: str, before: float) -> Document:
    group = record.get("group")
    return Document(content_of(record, where), None if group is None else str(group), where, before)


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is not {kind} ({' '.join(str(error).split())}): leave it out")


def _needs(module: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"this data needs {module.split('.')[0]}: pip install 'kvpop-vllm[distill]'") from None


def documents_of(sources: list[Source]) -> Iterator[Document]:
    """Yield all documents of all sources once, in an order that depends on the sources alone.

    Sources are distributed to lanes. The next document comes from the lane of which the smallest part has
    been read. Several files are thus mixed in proportion to their sizes, with few of them open.
    """
    lanes = [_lane(sources[i::LANES]) for i in range(min(LANES, len(sources)))]
    return map(itemgetter(1), heapq.merge(*lanes, key=itemgetter(0)))


def _lane(sources: list[Source]) -> Iterator[tuple[float, Document]]:
    """Yield the documents of sources one after another, each with the share of the lane before it."""
    before, total = 0, max(1, sum(source.size for source in sources))
    for source in sources:
        yield from (((before + document.before) / total, document) for document in source.documents())
        before += source.size
