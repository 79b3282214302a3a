"""``kvpop plan --train``: memory of a GPU, disk and hours of a training run."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.memory import Run, Sizes
from kvpop_vllm.distill.recipes import RECIPES
from kvpop_vllm.files import size_text
from kvpop_vllm.model_shape import check_length, positions_of, read_model_config

GPUS, GPU_MEMORY, MFU, TFLOPS = 8, 80 * 10**9, 0.35, 989
"""Defaults: GPUs, bytes of one, share of the peak, and an H100's peak in bfloat16."""
RECIPE = "train_base", "length", "batch", "micro_batch", "steps"
"""Fields of a recipe that the command takes."""
LOGITS = "teacher's logits"
ROW = 1024
"""Tokens by which the length of the longest row that fits is rounded down."""
CHECKPOINTS = 3
"""Checkpoints on the disk while one is written."""


def plan_training(options) -> None:
    """Run ``kvpop plan --train`` and print its table.

    Args:
        options: options of ``kvpop plan``.

    Raises:
        ConfigError: the model, the recipe or their fit cannot be counted.
    """
    print("\n".join(lines_of(options)))


def lines_of(options) -> list[str]:
    """Return the lines that ``kvpop plan --train`` prints; raises as :func:`plan_training`."""
    changes = {name: value for name in RECIPE if (value := getattr(options, name)) is not None}
    recipe = RECIPES[options.recipe or "paper"]
    if options.micro_batch and options.micro_batch > 1 and len(recipe.trained) > 1:
        raise ConfigError(f"recipe {options.recipe} has a budget for each row: leave out --micro-batch")
    recipe = dataclasses.replace(recipe, **changes)
    check_length(options.model, recipe.length)
    gpus = options.gpus or GPUS
    run = Run(Sizes.of(options.model, recipe), recipe, gpus, bool(options.stored_teacher))
    if run.stored and not run.has_kl:
        raise ConfigError("a frozen base has no teacher: leave --stored-teacher out, or give --train-base")
    room, positions = options.gpu_memory or GPU_MEMORY, positions_of(read_model_config(options.model))
    return [*_memory(run, room), _longest_row(run, room, positions), *_time(run, options), *_disk(run)]


def _memory(run: Run, room: int) -> list[str]:
    """Return the lines on the memory of a GPU that has ``room`` bytes."""
    moment, bytes_by_part = run.peak()
    recipe, trained = run.recipe, "scorers and base" if run.recipe.trains_base else "scorers"
    peak = sum(bytes_by_part.values())
    verdict = "fits into" if peak <= room else "does not fit into"
    return [
        f"{run.sizes.base / 1e9:.2f} billion parameters, {trained} trained on {run.gpus} GPU{'s' if run.gpus > 1 else ''};"
        f" rows of {recipe.length} tokens, {recipe.micro_batch} in a pass",
        *_table({name: f"{count / 1e9:.2f} GB" for name, count in (bytes_by_part | {"in all": peak}).items()}),
        f"most in the {moment}; {verdict} {room / 1e9:.0f} GB, before what CUDA, NCCL and fragments take",
    ]


def _longest_row(run: Run, room: int, positions: int | None) -> str:
    """Return the line on the longest row for which a GPU has ``room`` bytes; a process has whole rows."""
    shortest = run.recipe.sinks + max(map(sum, run.recipe.trained)) + 1  # else nothing is evicted
    lengths = range(-(-shortest // ROW) * ROW, (positions or run.recipe.length) + 1, ROW)

    def exceeds(length: int) -> bool:
        longer = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, length=length))
        return sum(longer.peak()[1].values()) > room

    fitting = bisect_left(lengths, True, key=exceeds)
    of_all = ", all positions of the model" if fitting == len(lengths) and positions else ""
    return (
        f"rows of at most {lengths[fitting - 1]} tokens fit{of_all}"
        if fitting
        else f"no row of {lengths.start} tokens fits"
    )


def _time(run: Run, options) -> list[str]:
    """Return the line on steps and hours."""
    recipe, mfu, peak = run.recipe, options.mfu or MFU, options.tflops or TFLOPS
    hours = run.operations() / (run.gpus * peak * 1e12 * mfu) / 3600
    return [
        f"{recipe.steps} steps of {recipe.batch} rows are {run.tokens / 1e9:.2f} billion tokens:"
        f" {hours:.1f} hours at {mfu:.0%} of {peak} TFLOPS a GPU"
    ]


def _disk(run: Run) -> list[str]:
    """Return the lines on the disk."""
    disk = run.disk()
    lines = [
        f"disk: {size_text(CHECKPOINTS * disk['checkpoint'])} of checkpoints, {CHECKPOINTS} of {size_text(disk['checkpoint'])};"
        f" {size_text(disk['result'])} of results;",
        f"with text that is not streamed {size_text(disk['tokens'])} of tokens, for as many as are trained on",
    ]
    if disk[LOGITS]:
        remark = "" if run.stored else ", which this run does not store"
        lines.append(f"logits of the teacher for all rows: {size_text(disk[LOGITS])}{remark}")
    return lines


def _table(cells: dict[str, str]) -> list[str]:
    """Return lines of two columns."""
    width, size = max(map(len, cells)), max(map(len, cells.values()))
    return [f"{name.ljust(width)}  {value.rjust(size)}" for name, value in cells.items()]
