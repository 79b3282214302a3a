"""Tokens of all documents, in one file that is written once."""

from __future__ import annotations

import fcntl
import json
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from kvpop_vllm.distill.hub_data import needs
from kvpop_vllm.distill.sources import Document, Source, documents_of
from kvpop_vllm.distill.splits import digest, has_content, share_of_document, text_of
from kvpop_vllm.distill.tokens import DocumentEncoder
from kvpop_vllm.files import replacing, write_whole
from kvpop_vllm.progress import progress


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
        with progress(1, "tokenise" if self.processes == 1 else "read text") as tick:
            for document in documents_of(self.sources, tick):
                text = text_of(document)
                if has_content(document):
                    self.read += 1
                    if (number := digest(text)) not in digests:
                        digests.add(number)
                        yield document
