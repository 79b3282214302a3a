"""`kvpop distill`: trains on files and writes an adapter folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import DocumentRows, PackedTokens, Rows
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.sharding import Process, empty_model, policy_of, read_weights, shard_layers
from kvpop_vllm.distill.student import Teacher
from kvpop_vllm.distill.teacher import TeacherReader, settings_of, top_logits, write_rows
from kvpop_vllm.distill.trainer import Trainer
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


def rows_of(model, data, recipe: Recipe, folder: Path) -> Rows:
    """Return the training rows; ``folder`` is that of their tokens."""
    check_length(model, recipe.length)
    options = {"seed": recipe.seed, "vocab_size": vocabulary_of(model), "folder": folder}
    tokenizer = load_tokenizer(model)
    if recipe.pack:
        return PackedTokens(data, tokenizer, recipe.length, **options)
    options |= {"least": recipe.least, "behind_prompt": recipe.protect_prompt}
    return DocumentRows(data, tokenizer, recipe.length, **options)


def default_device() -> torch.device:
    """Return a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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

    def forward(self, tokens: torch.Tensor, row: int):
        """Return the top logits of a row; see :data:`kvpop_vllm.distill.student.Teacher`."""
        return top_logits(self.model, tokens, self.top, attend=Dense())[:2]


def train(
    model: str,
    data: list[str],
    out: str,
    recipe: Recipe,
    *,
    teacher: str | None = None,
    save_every: int = 50,
    quiet: bool = False,
) -> dict[str, float]:
    """Start or continue a training run; see :class:`kvpop_vllm.distill.trainer.Trainer`.

    Args:
        model: folder of the base model.
        data: files and folders of text.
        out: folder of the results.
        recipe: see :class:`Recipe`.
        teacher: folder of stored teacher logits; default: the model itself.
        save_every: optimiser steps between checkpoints.
        quiet: True to hide the progress bar.

    Returns:
        Metrics of the last step.

    Raises:
        ConfigError: model, data, recipe and folders do not fit each other.
        TrainingError: training cannot go on.
    """
    with Process.start() as process, only_run_in(Path(out) / "run"):
        rows = rows_of(model, data, recipe, Path(out) / "run")
        asks = _teacher(teacher, model, rows, recipe, process)
        trainer = Trainer(
            model,
            recipe,
            out,
            rows,
            teacher=asks,
            process=process,
            save_every=save_every,
            quiet=quiet,
        )
        result = trainer.run()
        if recipe.trains_base and process.rank == 0:
            load_tokenizer(model).save_pretrained(Path(out) / "model")
    return result


def _teacher(folder: str | None, model: str, rows: Rows, recipe: Recipe, process: Process) -> Teacher | None:
    """Return the stored logits in ``folder``, or else the model itself; None if the recipe has no KL.

    Raises:
        ConfigError: a folder is given and the recipe has no use for it, or it does not fit the run.
    """
    if recipe.distils and recipe.phase != "uptrain" and recipe.kl > 0:
        return stored_teacher(folder, model, rows, recipe) if folder else OnlineTeacher(model, recipe, process)
    if folder and recipe.phase == "uptrain":
        raise ConfigError("phase uptrain has no teacher: leave --teacher out")
    if folder and not recipe.distils:
        raise ConfigError(
            "a teacher is for training the base model, which is frozen: leave --teacher out, or give --train-base"
        )
    if folder:
        raise ConfigError("with --kl 0 there is no use for a teacher: leave --teacher out, or give --kl")
    return None


def write_teacher(model: str, data: list[str], out: str, recipe: Recipe, *, rows: int | None = None) -> None:
    """Write the teacher's logits of a run's first ``rows`` rows (default: all).

    A folder that exists is continued.

    Raises:
        ConfigError: the data cannot be used, the folder holds logits of other data, model or settings, or
            there are several processes.
        OSError: the disk is full; rows of files that were written before are safe.
    """
    _check_alone("teacher")
    asked = OnlineTeacher(model, recipe, Process(device=default_device()))
    tokens = rows_of(model, data, recipe, Path(out))
    vocabulary = vocabulary_of(model)
    settings = settings_of(model, tokens, min(recipe.kl_top, vocabulary), recipe.dtype)
    count = rows or recipe.steps * recipe.batch
    write_rows(asked.model, tokens, out, settings, count, vocab_size=vocabulary, attend=Dense())


def _check_alone(action: str) -> None:
    """Check that this is the only process.

    Raises:
        ConfigError: torchrun has started several.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"kvpop distill {action} runs in one process: leave torchrun out")


def stored_teacher(folder: str, model: str, rows: Rows, recipe: Recipe) -> TeacherReader:
    """Return the logits that :func:`write_teacher` wrote for ``rows``.

    Raises:
        ConfigError: the folder holds logits of other rows, of another model, or too few.
    """
    settings = settings_of(model, rows, min(recipe.kl_top, vocabulary_of(model)), recipe.dtype)
    return TeacherReader(folder, settings, rows=recipe.steps * recipe.batch)
