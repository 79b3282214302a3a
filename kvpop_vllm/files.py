"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, which becomes ``path`` once it is on the disk.

    After an error it is removed, and what was at ``path`` is still there. Each process has a draft of its own.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    remove(draft)
    try:
        yield draft
        to_disk(draft)
        os.replace(draft, path)
    except BaseException:
        remove(draft)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file by :func:`replacing`."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for each in path.rglob("*") if path.is_dir() else ():
        _sync(each)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
