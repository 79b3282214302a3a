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

Rows that are shorter than S end with zeros. Log-probabilities are float16 because the tokens that carry the mass have a
logp near 0, where float16 is finest. The relative error of an entry is at most 2^-11 (2^-25 absolute next to 0), so the
relative error of the teacher's probabilities is about that times their logp. The KL from the demo model's top 256 to
the stored ones is 2e-7 nats a position on average and 7e-7 at most (3,072 positions of held-out text; bfloat16 and
float32 alike). A position costs 4 K + 8 bytes (6 K + 8 beyond 65,536 tokens).

Files are written whole or not at all, and the index names only files that exist. A folder left by a kill or a
full disk is therefore readable and is continued by the same call, with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.checkpoints import barrier, is_main
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.token_file import TOKENS
from kvpop_vllm.files import replacing, size_text, write_whole
from kvpop_vllm.model_hook import POSITIONS, decoder_of

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
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        tokens: ``[B, S]``.
        top: K, at most the vocabulary.
        options: arguments of the model's forward, ``attend=Dense()``.
    """
    hidden = decoder_of(model)(input_ids=tokens, use_cache=False, **options).last_hidden_state
    parts = []
    for a in range(0, tokens.shape[1], POSITIONS):
        logits = model.get_output_embeddings()(hidden[:, a : a + POSITIONS])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        best = logits.topk(min(top, logits.shape[-1]), dim=-1)
        parts.append((best.values, best.indices, logits.logsumexp(-1)))
    return TopLogits(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


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
            # samples, since a whole model takes minutes to read
            for place in range(0, size, max(4096, size // 256)):
                file.seek(place)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


def row_bytes(settings: dict, vocab_size: int) -> int:
    """Return the bytes of a row of logits on the disk, with its tokens."""
    return settings["length"] * (settings["top"] * (2 + _id_type(vocab_size).itemsize) + 8)


def _id_type(vocab_size: int) -> torch.dtype:
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def begun(folder: str | Path, settings: dict) -> dict | None:
    """Return the index of the logits that a folder has, None if it has none.

    Raises:
        ConfigError: it has other settings.
    """
    if not (Path(folder) / INDEX).exists():
        return None
    index = read_index(Path(folder))
    _refuse_others(Path(folder), index["settings"], settings)
    return index


def check_disk(folder: str | Path, settings: dict, count: int, vocab_size: int) -> None:
    """Print what the logits of ``count`` rows will take of the disk without those that a folder has, and its tokens' bytes.

    Raises:
        ConfigError: less is free, or the folder has other settings.
    """
    index, tokens = begun(folder, settings), Path(folder) / TOKENS
    rows = max(0, count - (index["rows"] if index else 0))
    needed = rows * row_bytes(settings, vocab_size)
    free = shutil.disk_usage(folder).free
    if is_main():
        written = f", after {size_text(tokens.stat().st_size)} of tokens" if tokens.exists() else ""
        print(f"teacher's logits of {rows} rows: {size_text(needed)}; free in {folder}: {size_text(free)}{written}")
    if needed > free:
        raise ConfigError(
            f"{folder} has {size_text(free)} free and the teacher's logits need {size_text(needed)}: give fewer --rows or"
            " another --out, or train without stored logits"
        )


def write_rows(
    ask: Callable[[torch.Tensor], TopLogits],
    rows,
    folder: str | Path,
    settings: dict,
    count: int,
    *,
    vocab_size: int,
    process: Process | None = None,
    shard_bytes: int = 1 << 26,
    quiet: bool = False,
) -> None:
    """Write the logits of the first ``count`` of ``rows``, without those that ``folder`` has already.

    Several processes take turns file by file, and ask as often as each other. Any number of them may go on.

    Args:
        ask: returns the :func:`top_logits` of tokens ``[1, S]``.
        rows: ``rows[j]`` is row j, ``[S]``.
        folder: folder to write; it is continued if it exists.
        settings: see :func:`settings_of`; a folder with other settings is refused.
        count: number of rows.
        vocab_size: vocabulary of the model.
        process: this process; default: one alone, on the CPU.
        shard_bytes: size of a file; a kill loses at most one file of each process.
        quiet: True to hide the progress bar.

    Raises:
        ConfigError: the folder has other settings.
        OSError: a file cannot be written; the rows of earlier files are safe.
    """
    folder, process, ids = Path(folder), process or Process(), _id_type(vocab_size)
    shard = max(1, shard_bytes // row_bytes(settings, vocab_size))
    folder.mkdir(parents=True, exist_ok=True)
    index, done = begun(folder, settings), 0
    if index:
        shard, done = index["rows_per_shard"], index["rows"]
    with tqdm(total=count, initial=min(done, count), unit="row", disable=quiet or process.rank > 0) as bar:
        while done < count:
            first = done - done % shard  # a file that is not full is written again
            end = min(first + process.world * shard, count)
            start, parts = first + process.rank * shard, []
            for row in range(start, start + min(shard, count - first)):
                # every process asks as often as the others, since a sharded teacher needs all of them
                tokens = rows[min(row, count - 1)].unsqueeze(0)
                best = ask(tokens.to(process.device))
                if row < count:
                    # the smallest number of float16: a KL over infinity would be NaN
                    logp = (best.logits - best.lse.unsqueeze(-1)).clamp_min(-65504).half()
                    tensors = {"tokens": tokens.int(), "ids": best.ids.to(ids), "lse": best.lse.float(), "logp": logp}
                    parts.append({name: _filled(tensor.cpu(), settings["length"]) for name, tensor in tensors.items()})
            index = FORMAT | {"settings": settings, "rows": end, "rows_per_shard": shard}
            with _full_disk(folder, end, done):
                if parts:
                    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                    with replacing(_shard(folder, start // shard)) as draft:
                        draft.write_bytes(save(tensors))
                # the index names rows only when the files of all processes are on the disk
                barrier()
                if process.rank == 0:
                    write_whole(folder / INDEX, json.dumps(index, indent=1))
            bar.update(end - done)
            done = end


@contextmanager
def _full_disk(folder: Path, rows: int, safe: int) -> Iterator[None]:
    """Name in an error of the disk how many rows are safe, and how many were to be."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free >> 20
        raise OSError(
            f"teacher logits of rows {safe} to {rows - 1} cannot be written to {folder}, where {free} MiB are"
            f" free: {error.strerror or error}; the {safe} rows before them are safe: make room and run the same"
            " command again"
        ) from None


class TeacherReader:
    """Reader of a folder of teacher logits; a :data:`kvpop_vllm.distill.student.Teacher`.

    Rows may be read in any order.

    Args:
        folder: written by :func:`write_rows`.
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
        stored, length = self._row(row), tokens.shape[1]
        if not torch.equal(stored["tokens"].long(), _filled(tokens.cpu(), len(stored["tokens"]))[0]):
            raise ConfigError(
                f"row {row} of {self.folder} was written for other text: write the teacher's logits again for this data"
            )
        logits, ids = stored["logp"][:length].float(), stored["ids"][:length].long()
        return logits.unsqueeze(0).to(tokens.device), ids.unsqueeze(0).to(tokens.device)

    def _row(self, row: int) -> dict[str, torch.Tensor]:
        self._require(row + 1)
        path, part = _shard(self.folder, row // self.shard), row % self.shard
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_slice(name)[part] for name in file.keys()}
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{path} cannot be read ({reason}): write the teacher's logits again in another folder"
            ) from None

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


def _filled(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``[1, S, ..]`` with zeros up to ``length``; a row that is a document may be shorter."""
    zeros = tensor.new_zeros(1, max(0, length - tensor.shape[1]), *tensor.shape[2:])
    return torch.cat([tensor, zeros], 1)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"rows-{number:05d}.safetensors"
