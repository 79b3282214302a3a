"""Teacher logits, the top 256 of each position: computed, and stored on disk so that they are computed once.

A folder of them holds ``rows-00000.safetensors``, ... and ``index.json``. Per row of S tokens a file holds

==========  ===================================  ============================================================
tensor      shape and type                       content
==========  ===================================  ============================================================
tokens      ``[R, S]`` int32                     the row itself, compared with the requested row
ids         ``[R, S, K]`` uint16 or int32        the K tokens with the highest logits, in descending order
logp        ``[R, S, K]`` float16                their log-probabilities over the whole vocabulary
lse         ``[R, S]`` float32                   log-normaliser: logit = logp + lse
==========  ===================================  ============================================================

Log-probabilities are float16 because the tokens that carry the mass have a logp near 0, where float16 is
finest. The relative error of an entry is at most 2^-11 (2^-25 absolute next to 0), so the relative error of
the teacher's probabilities is about that times their logp. The KL from the demo model's top 256 to the stored
ones is 2e-7 nats a position on average and 7e-7 at most (3,072 positions of held-out text; bfloat16 and
float32 alike). A position costs 4 K + 8 bytes (6 K + 8 beyond 65,536 tokens).

Files are written whole or not at all, and the index names only files that exist. A folder left by a kill or a
full disk is therefore readable and is continued by the same call.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import POSITIONS

INDEX = "index.json"
FORMAT = {"format": "kvpop-teacher", "version": 1}


class TopLogits(NamedTuple):
    """Top logits of every position.

    Attributes:
        logits: ``[.., S, K]``, in descending order.
        ids: ``[.., S, K]`` int64.
        lse: ``[.., S]``, log-normaliser.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    lse: torch.Tensor


@torch.no_grad()
def top_logits(model, tokens: torch.Tensor, top: int = 256, **options) -> TopLogits:
    """Return the teacher's top tokens, float32 (float64 for a float64 model). No ``[S, V]`` array is formed.

    Args:
        model: from :func:`kvpop_vllm.distill.hook.load_model`.
        tokens: ``[B, S]``.
        top: K, at most the vocabulary.
        options: arguments of the model's forward, ``attend=Dense()``.
    """
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False, **options).last_hidden_state
    parts = []
    for a in range(0, tokens.shape[1], POSITIONS):
        logits = model.get_output_embeddings()(hidden[:, a : a + POSITIONS])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        best = logits.topk(min(top, logits.shape[-1]), dim=-1)
        parts.append((best.values, best.indices, logits.logsumexp(-1)))
    return TopLogits(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


def teacher_logits(model, tokens: torch.Tensor, top: int = 256, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and ids of :func:`top_logits`, as :data:`kvpop_vllm.distill.student.Teacher` does."""
    return top_logits(model, tokens, top, **options)[:2]


def settings_of(model: str | Path, rows, top: int = 256, dtype: str = "bfloat16") -> dict:
    """Return the settings that logits depend on.

    Args:
        model: folder of the teacher.
        rows: a :class:`kvpop_vllm.distill.data.PackedTokens`.
        top: K.
        dtype: dtype that the teacher computes with.
    """
    return {
        "dtype": dtype,
        "length": rows.length,
        "seed": rows.seed,
        "top": top,
        "model": model_fingerprint(model),
        "data": rows.fingerprint,
    }


def model_fingerprint(folder: str | Path) -> str:
    """Return a hash of a model's configuration, and of the sizes and 256 samples of each weight file."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("pytorch_model*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for place in range(0, size, max(4096, size // 256)):
                file.seek(place)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


class TeacherWriter:
    """Writer of a folder of teacher logits, row by row; a context manager.

    It continues where the folder ends.

    Args:
        folder: folder to write.
        settings: see :func:`settings_of`; a folder with other settings is refused.
        vocab_size: vocabulary of the model.
        shard_bytes: size of a file; a kill loses at most one file.

    Attributes:
        rows: number of rows added, those found in the folder included; also the number of the next row.
    """

    def __init__(self, folder: str | Path, settings: dict, *, vocab_size: int, shard_bytes: int = 1 << 26):
        self.folder, self.settings = Path(folder), settings
        self.ids = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
        per_row = settings["length"] * (settings["top"] * (2 + self.ids.itemsize) + 8)
        self.shard, self.rows, self.pending = max(1, shard_bytes // per_row), 0, []
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / INDEX).exists():
            index = read_index(self.folder)
            _refuse_others(self.folder, index["settings"], settings)
            self.shard, self.rows = index["rows_per_shard"], index["rows"]
            self._reopen_last()

    def _reopen_last(self) -> None:
        first = self.rows - self.rows % self.shard
        if first < self.rows:
            whole = _read(self.folder, first // self.shard, slice(0, self.rows - first))
            self.pending = [{name: tensor[i] for name, tensor in whole.items()} for i in range(self.rows - first)]

    def add(self, tokens: torch.Tensor, best: TopLogits) -> None:
        """Add a row.

        Args:
            tokens: ``[S]``.
            best: top logits of the row, without a batch axis.

        Raises:
            ValueError: the row has another shape than the settings say.
            OSError: a file cannot be written; the rows of earlier files are safe.
        """
        shape = (self.settings["length"], self.settings["top"])
        if best.logits.shape != shape or tokens.shape != shape[:1]:
            raise ValueError(
                f"a row of {tuple(tokens.shape)} tokens and {tuple(best.logits.shape)} logits, not {shape}"
            )
        row = {"tokens": tokens.int(), "ids": best.ids.to(self.ids), "lse": best.lse.float()}
        row["logp"] = (best.logits - best.lse.unsqueeze(-1)).clamp_min(-65504).half()
        self.pending.append({name: tensor.cpu() for name, tensor in row.items()})
        self.rows += 1
        if self.rows % self.shard == 0:
            self._write()
            self.pending = []

    def flush(self) -> None:
        """Write all rows that have been added so far."""
        if self.pending:
            self._write()

    def _write(self) -> None:
        first = self.rows - len(self.pending)
        tensors = {name: torch.stack([row[name] for row in self.pending]) for name in self.pending[0]}
        index = FORMAT | {"settings": self.settings, "rows": self.rows, "rows_per_shard": self.shard}
        try:
            _replace(_shard(self.folder, first // self.shard), save(tensors))
            _replace(self.folder / INDEX, json.dumps(index, indent=1).encode())
        except OSError as error:
            safe = read_index(self.folder)["rows"] if (self.folder / INDEX).exists() else 0
            free = shutil.disk_usage(self.folder).free >> 20
            raise OSError(
                f"teacher logits of rows {safe} to {self.rows - 1} cannot be written to {self.folder}, where {free} MiB are"
                f" free: {error.strerror or error}; the {safe} rows before them are safe: make room and run the same"
                " command again"
            ) from None

    def __enter__(self) -> TeacherWriter:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.flush()


def write_rows(
    model, rows: Iterable[torch.Tensor], writer: TeacherWriter, count: int, *, quiet=False, **options
) -> None:
    """Write the first ``count`` of ``rows`` (each ``[S]``), without those that ``writer`` has already.

    Args:
        model: see :func:`top_logits`.
        rows: rows of tokens in their global order.
        writer: receives the logits.
        count: number of rows.
        quiet: True to hide the progress bar.
        options: see :func:`top_logits`.
    """
    device, top, done = next(model.parameters()).device, writer.settings["top"], writer.rows
    with writer, tqdm(total=count, initial=min(done, count), unit="row", disable=quiet) as bar:
        for tokens in islice(rows, done, max(done, count)):
            best = top_logits(model, tokens.unsqueeze(0).to(device), top, **options)
            writer.add(tokens, TopLogits(*(tensor[0] for tensor in best)))
            bar.update()


class TeacherReader:
    """Reader of a folder of teacher logits; a :data:`kvpop_vllm.distill.student.Teacher`.

    Rows may be read in any order.

    Args:
        folder: written by :class:`TeacherWriter`.
        settings: settings that it must have been written with, see :func:`settings_of`; None accepts any.
        rows: minimum number of rows.

    Raises:
        ConfigError: the folder does not exist, was written with other settings, or holds fewer rows.
    """

    def __init__(self, folder: str | Path, settings: dict | None = None, rows: int = 0):
        self.folder, self.index = Path(folder), read_index(Path(folder))
        self.rows, self.shard = self.index["rows"], self.index["rows_per_shard"]
        if settings is not None:
            _refuse_others(self.folder, self.index["settings"], settings)
        self._require(rows)

    def __call__(self, tokens: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored logits of a row.

        The logits are the log-probabilities, that is, shifted by the log-normaliser, which does not change a
        KL.

        Args:
            tokens: ``[1, S]``, the row's tokens.
            row: number of the row.

        Returns:
            Logits ``[1, S, K]`` float32 and ids ``[1, S, K]`` int64.

        Raises:
            ConfigError: the row was written for other tokens, or is missing.
        """
        found = self._row(row)
        if not torch.equal(found["tokens"].long(), tokens[0].cpu()):
            raise ConfigError(
                f"row {row} of {self.folder} was written for other text: write the teacher's logits again for this data"
            )
        logits, ids = found["logp"].float(), found["ids"].long()
        return logits.unsqueeze(0).to(tokens.device), ids.unsqueeze(0).to(tokens.device)

    def top(self, row: int) -> TopLogits:
        """Return the stored row itself, logits ``[S, K]``, ids ``[S, K]`` and lse ``[S]``."""
        found = self._row(row)
        logits = found["logp"].float() + found["lse"].unsqueeze(-1)
        return TopLogits(logits, found["ids"].long(), found["lse"])

    def _row(self, row: int) -> dict[str, torch.Tensor]:
        self._require(row + 1)
        part = row % self.shard
        return {name: t[0] for name, t in _read(self.folder, row // self.shard, slice(part, part + 1)).items()}

    def _require(self, rows: int) -> None:
        if rows > self.rows:
            raise ConfigError(
                f"{self.folder} holds the teacher's logits of {self.rows} rows, {rows} are needed: let `kvpop distill teacher`"
                " go on"
            )


def read_index(folder: Path) -> dict:
    """Return the index of a folder of teacher logits.

    Raises:
        ConfigError: the index is missing or of another format.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no teacher logits: write them with `kvpop distill teacher`") from None
    except ValueError:
        index = None
    if not isinstance(index, dict) or {name: index.get(name) for name in FORMAT} != FORMAT:
        raise ConfigError(f"{path} is not an index of teacher logits of version {FORMAT['version']}: write them again")
    return index


def _refuse_others(folder: Path, before: dict, settings: dict) -> None:
    for name, value in settings.items():
        # older folders do not give their dtype
        if before.get(name, value if name == "dtype" else None) != value:
            raise ConfigError(
                f"{folder} holds teacher logits with {name} = {before.get(name)!r}, not {value!r}: use the same"
                f" {name}, or another folder"
            )


def _shard(folder: Path, number: int) -> Path:
    return folder / f"rows-{number:05d}.safetensors"


def _read(folder: Path, number: int, rows: slice) -> dict[str, torch.Tensor]:
    path = _shard(folder, number)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name)[rows] for name in file.keys()}
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} cannot be read ({reason}): write the teacher's logits again in another folder"
        ) from None


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".draft")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
