"""Files and folders that appear whole or not at all, and JSON that may be anybody's.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpop_vllm.config import ConfigError

MAX_JSON_BYTES = 1 << 24
"""Most bytes of a JSON file that is read."""
DISK_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of a disk that is full, of a quota and of a limit of file sizes."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which becomes ``path`` once it is on the disk.

    After an error it is removed, and what was at ``path`` is still there. A folder replaces a folder. Each process has
    a draft of its own.
    """
    # in the same folder, so that os.replace() stays on one file system
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    # of a killed process that had the same number
    remove(draft)
    try:
        with naming(path):
            yield draft
            # on the disk before it is renamed, since a crash must not leave an empty file under the final name
            to_disk(draft)
        if draft.is_dir():  # which only an empty folder makes way for
            remove(path)
        os.replace(draft, path)
    # interrupts of the user too
    except BaseException:
        remove(draft)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in the error of a full disk, if it names no file itself."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file by :func:`replacing`."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file with their ends, without a last one that was cut off, and none if there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def json_lines(path: Path, *keys: str) -> list[dict]:
    """Return the objects of a JSONL file, without a last line that was cut off, and none if there is no file.

    Args:
        path: the file.
        keys: keys that every object has.
    """
    try:
        lines = list(map(json.loads, whole_lines(path)))
    # deeply nested JSON raises RecursionError
    except (ValueError, RecursionError):
        lines = [None]
    if not all(isinstance(line, dict) and {*keys} <= line.keys() for line in lines):
        raise ConfigError(f"{path} is damaged: remove it")
    return lines


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit of which there is at least one, MB at least."""
    for unit, size in (("TB", 10**12), ("GB", 10**9)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e6:.1f} MB"


def write_figure(path: Path, figure) -> None:
    """Write a figure of matplotlib as PNG by :func:`replacing`."""
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120, format="png")


def read_json(path: str | Path, advice: str) -> object:
    """Return the contents of a JSON file.

    Args:
        path: the file.
        advice: what to do if it cannot be read, for the error.
    """
    try:
        with open(path, "rb") as file:
            # one byte more than allowed shows that there are more
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read as JSON ({reason}): {advice}") from None


def check_new(folder: str | Path) -> None:
    """Check that a folder to write does not exist or is empty."""
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something already: choose another folder")


def add_file(digest, path: Path) -> None:
    """Add the contents of a file to a digest of hashlib."""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


def sample_digest(path: Path) -> str:
    """Return the SHA-256 of the first and the last 4,096 bytes of a file, in hexadecimal."""
    with open(path, "rb") as file:
        sample = file.read(4096)
        file.seek(max(0, path.stat().st_size - 4096))
        return hashlib.sha256(sample + file.read(4096)).hexdigest()


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for entry in path.rglob("*") if path.is_dir() else ():
        _sync(entry)
    _sync(path)


def _sync(path: Path) -> None:
    # a folder can be opened for reading only, which is enough for fsync
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
