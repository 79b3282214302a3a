"""`kvpop distill`: trains on files and writes an adapter folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import DocumentRows, PackedTokens, Rows
from kvpop_vllm.distill.metrics import find_tracker
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.sharding import Process, empty_model, policy_of, read_weights, shard_layers
from kvpop_vllm.distill.stream import StreamedRows
from kvpop_vllm.distill.student import Teacher
from kvpop_vllm.distill.teacher import TeacherReader, TopLogits, begun, check_disk, settings_of, top_logits, write_rows
from kvpop_vllm.distill.trainer import Trainer, Validation
from kvpop_vllm.distill.training_loop import only_run_in
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.model_shape import check_length, vocabulary_of


def load_tokenizer(model: str | Path):
    """Return the tokenizer in a model's folder.

    Raises:
        ConfigError: there is none that loads.
    """
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} has no tokenizer that loads: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class Reading:
    """Settings of how text is read.

    Attributes:
        stream: True to read data sets as a stream, as far as rows are needed.
        processes: processes that tokenise text which is not streamed.
    """

    stream: bool = False
    processes: int = 1


READING = Reading()
"""Settings of how text is read by default."""


def rows_of(model, data, recipe: Recipe, folder: Path, reading: Reading = READING) -> Rows:
    """Return the training rows; ``folder`` is that of their tokens.

    Raises:
        ConfigError: the data cannot be used.
    """
    check_length(model, recipe.length)
    options = {name: getattr(recipe, name) for name in ("seed", "select", "longest")}
    options |= {"vocab_size": vocabulary_of(model)}
    cut = {} if recipe.pack else {"shortest": recipe.shortest_row, "after_prompt": recipe.protect_prompt}
    tokenizer = load_tokenizer(model)
    if reading.stream:
        return StreamedRows(data, tokenizer, recipe.length, pack=recipe.pack, **options, **cut)
    kind = PackedTokens if recipe.pack else DocumentRows
    return kind(data, tokenizer, recipe.length, folder=folder, processes=reading.processes, **options, **cut)


def default_device() -> torch.device:
    """Return a GPU if there is one, else the CPU, and say so on stderr if torch is built for GPUs."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.version.cuda is not None:
        print("no GPU is visible: the CPU is used", file=sys.stderr)
    return torch.device("cpu")


class OnlineTeacher(torch.nn.Module):
    """Teacher that runs the untrained model with dense attention row by row, sharded among all processes.

    Args:
        model: folder of the model.
        recipe: gives dtype and number of logits per position.
        process: process that has the model, or a shard of it.
    """

    def __init__(self, model: str | Path, recipe: Recipe, process: Process):
        super().__init__()
        self.top = recipe.kl_top
        sharded = process.world > 1
        self.model = self._load(model, getattr(torch, recipe.dtype), sharded).eval().requires_grad_(False)
        if not sharded:
            self.to(process.device)
            return
        shard_layers(self.model, process.mesh, policy_of(False))
        fully_shard(self, mesh=process.mesh, reshard_after_forward=True)
        if any(parameter.is_meta for parameter in self.parameters()):
            read_weights(self.model, model, process.device)

    @staticmethod
    def _load(model: str | Path, dtype: torch.dtype, sharded: bool) -> torch.nn.Module:
        base = empty_model(model, dtype) if sharded else None
        return load_model(model, dtype) if base is None else base

    def forward(self, tokens: torch.Tensor, row: int | None = None) -> TopLogits:
        """Return the top logits of a row; see :data:`kvpop_vllm.distill.student.Teacher`."""
        return top_logits(self.model, tokens, self.top, attend=Dense())


def train(
    model: str,
    data: list[str],
    out: str,
    recipe: Recipe,
    *,
    teacher: str | None = None,
    save_every: int = 50,
    reading: Reading = READING,
    validate_every: int = 0,
    validation_rows: int = 8,
    tracker: str | None = None,
    **loop,
) -> dict[str, float]:
    """Start or continue a training run; see :class:`kvpop_vllm.distill.trainer.Trainer`.

    Args:
        model: folder of the base model.
        data: files and folders of text.
        out: folder of the results.
        recipe: see :class:`Recipe`.
        teacher: folder of stored teacher logits; default: the model itself.
        save_every: optimiser steps between checkpoints.
        reading: how the data is read.
        validate_every: optimiser steps between judgements of held-out rows; 0 for none.
        validation_rows: number of these rows, of the validation split.
        tracker: ``MODULE:FUNCTION`` of a tracker, which the first process alone imports; see :data:`Tracker`.
        loop: ``quiet``; see :class:`kvpop_vllm.distill.training_loop.Loop`.

    Returns:
        Metrics of the last step.

    Raises:
        ConfigError: model, data, recipe and folders do not fit each other.
        TrainingError: training cannot go on.
    """
    if teacher and validate_every:
        raise ConfigError("--teacher has no logits of held-out rows: leave it or --validate-every out")
    with Process.start() as process, only_run_in(Path(out) / "run"):
        track = find_tracker(tracker) if tracker and process.rank == 0 else None
        rows = rows_of(model, data, recipe, Path(out) / "run", reading)
        teacher_logits = _teacher(teacher, model, rows, recipe, process)
        validation = _validation(rows, validate_every, validation_rows) if validate_every else None
        trainer = Trainer(
            model,
            recipe,
            out,
            rows,
            teacher=teacher_logits,
            process=process,
            save_every=save_every,
            validation=validation,
            track=track,
            **loop,
        )
        result = trainer.run()
        if recipe.trains_base and process.rank == 0:
            load_tokenizer(model).save_pretrained(Path(out) / "model")
    return result


def _validation(rows: Rows, every: int, count: int) -> Validation:
    """Return held-out rows, the first ones of the validation split."""
    held_out = rows.of_split("validation")
    numbers = range(count)
    return Validation(every, [held_out[row] for row in numbers], [held_out.prompt_length(row) for row in numbers])


def _teacher(folder: str | None, model: str, rows: Rows, recipe: Recipe, process: Process) -> Teacher | None:
    """Return the stored logits in ``folder``, or else the model itself; None if the recipe has no KL.

    Raises:
        ConfigError: a folder is given and the recipe has no use for it, or it does not fit the run.
    """
    if recipe.has_teacher:
        return stored_teacher(folder, model, rows, recipe) if folder else OnlineTeacher(model, recipe, process)
    if folder:
        raise ConfigError(_no_teacher(recipe, "leave --teacher out"))
    return None


def _no_teacher(recipe: Recipe, remedy: str) -> str:
    """Return why a recipe has no teacher, and what to do."""
    if recipe.phase == "uptrain" or recipe.regresses:
        return f"phase {recipe.phase} has no teacher: {remedy}"
    if not recipe.distils:
        return f"a teacher is for training the base model, which is frozen: {remedy}, or give --train-base"
    return f"with --kl 0 there is no use for a teacher: {remedy}, or give --kl"


def write_teacher(
    model: str, data: list[str], out: str, recipe: Recipe, *, rows: int | None = None, reading: Reading = READING
) -> None:
    """Write the teacher's logits of a run's first ``rows`` rows (default: all), by all processes.

    A folder that exists is continued. What it will take of the disk is printed first.

    Raises:
        ConfigError: the recipe has no teacher, the data cannot be used, the folder holds logits of other data, model or
            settings, or the disk is too small.
        OSError: the disk is full; rows of files that were written before are safe.
    """
    if not recipe.has_teacher:
        raise ConfigError(_no_teacher(recipe, "write no logits"))
    vocabulary = vocabulary_of(model)
    with Process.start() as process, only_run_in(Path(out)):
        tokens = rows_of(model, data, recipe, Path(out), reading)
        settings = settings_of(model, tokens, min(recipe.kl_top, vocabulary), recipe.dtype)
        count = rows or recipe.steps * recipe.batch
        begun(out, settings)  # ahead of the tokens, which would replace those of another run
        tokens[0]  # writes the file of tokens, if there is to be one, which takes of the disk as well
        check_disk(Path(out), settings, count, vocabulary)
        online = OnlineTeacher(model, recipe, process)
        write_rows(online, tokens, out, settings, count, vocab_size=vocabulary, process=process)


def stored_teacher(folder: str, model: str, rows: Rows, recipe: Recipe) -> TeacherReader:
    """Return the logits that :func:`write_teacher` wrote for ``rows``.

    Raises:
        ConfigError: the folder holds logits of other rows, of another model, or too few.
    """
    settings = settings_of(model, rows, min(recipe.kl_top, vocabulary_of(model)), recipe.dtype)
    return TeacherReader(folder, settings, rows=recipe.steps * recipe.batch)
