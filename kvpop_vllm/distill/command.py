"""Options of `kvpop distill`; nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import types
import typing

from kvpop_vllm.argument_types import positive
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.recipe import FORMER_NAMES, Recipe
from kvpop_vllm.distill.recipes import RECIPES
from kvpop_vllm.hub import model_folder

TRAINING = "save_every", "validate_every", "validation_rows", "tracker"
"""Options of a training run that its recipe does not have."""


def add_distill(commands) -> None:
    """Add `kvpop distill` to argparse's ``commands``."""
    summary = (
        "train scorers for MODEL (with --train-base the model too); 'teacher' writes its logits to disk; 'texts' fetches real"
        " text ('shares' has become 'kvpop calibrate')"
    )
    command = commands.add_parser("distill", help=summary, description=summary)
    add = command.add_argument
    add("action", nargs="?", choices=("train", "teacher", "shares", "texts"), default="train")
    add("--model", metavar="MODEL", help="folder of the base model, or its name on the hub")
    add(
        "--data",
        nargs="+",
        metavar="TEXT",
        help="text, JSONL or Parquet files, folders, or data sets: hf:NAME[@REVISION][:[CONFIG/]SPLIT]",
    )
    add("--out", required=True, metavar="DIR", help="folder to write; a stopped run is continued")
    add("--recipe", choices=sorted(RECIPES), help="defaults of all that follows (default: paper)")
    add(
        "--teacher",
        metavar="DIR",
        help="logits written by 'kvpop distill teacher', instead of a teacher (which only a base that is trained has)",
    )
    add("--stream", action="store_const", const=True, help="read data sets as far as rows are needed")
    add("--processes", type=positive, metavar="N", help="processes that tokenise text (default 1)")
    add("--save-every", type=positive, help="optimiser steps between checkpoints (default 50)")
    add("--validate-every", type=positive, help="optimiser steps between judgements of held-out rows (default: none)")
    add("--validation-rows", type=positive, metavar="N", help="held-out rows (default 8)")
    add("--tracker", metavar="MODULE:FUNCTION", help="function to call with each step's number and metrics")
    add(
        "--rows",
        type=positive,
        help="teacher: rows of tokens to write (default: all that the recipe needs)",
    )
    add("--threads", type=positive, help="CPU threads (default: all)")
    group = command.add_argument_group("recipe", "each overrides the named recipe")
    hints = typing.get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        _add_field(group, item.name, item.name, hints[item.name], item.metadata["help"])
    for former, name in FORMER_NAMES.items():
        _add_field(group, former, name, hints[name], argparse.SUPPRESS)
    command.set_defaults(run=distill)


def _add_field(group, flag: str, name: str, hint, text: str) -> None:
    """Add the option of a recipe's field to argparse's ``group``."""
    settings = {"dest": name, "default": None, "help": text}
    if hint is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(hint) is list:
        settings |= {"nargs": "+", "type": typing.get_args(hint)[0], "metavar": "N"}
    else:
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
        kind = next(kind for kind in kinds if kind is not type(None))
        settings |= {"type": kind, "metavar": "X"} if isinstance(kind, type) else {"metavar": "DIR"}
    group.add_argument(_flag(flag), **settings)


def recipe_of(options) -> Recipe:
    """Return the named recipe with the command line's overrides.

    Raises:
        ConfigError: a value is invalid, an option has no effect, or options contradict each other.
    """
    overrides = {f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)}
    preset = RECIPES[options.recipe or "paper"]
    if options.shares is not None:
        from kvpop_vllm.distill.shares import read_shares

        overrides["shares"] = read_shares(options.shares, options.model, options.length or preset.length)
    recipe = dataclasses.replace(preset, **{n: v for n, v in overrides.items() if v is not None})
    if options.train_base is False and recipe.trains_base:
        raise ConfigError(f"--phase {options.phase} trains the base model: leave --no-train-base out")
    if options.action == "teacher":  # the recipe identifies the run that the logits are for
        return recipe
    disabled = [f.name for f in dataclasses.fields(Recipe) if f.default is False and overrides[f.name] is False]
    if unused := recipe.without_effect(
        [n for n, value in overrides.items() if value is not None and n not in disabled]
    ):
        name, reason = unused
        remedy = ", or give --train-base" if "frozen" in reason and not recipe.trains_gates_alone else ""
        raise ConfigError(f"{_flag(name)} {reason}: leave it out{remedy}")
    return recipe


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_options_of_others(options) -> None:
    """Refuse options that the action does not use.

    'teacher' takes all options of the recipe that its logits are for.

    Raises:
        ConfigError: names the option.
    """
    recipe = tuple(f.name for f in dataclasses.fields(Recipe))
    unused = {
        "train": ("rows",),
        "teacher": ("teacher", *TRAINING),
        "texts": ("model", "recipe", "teacher", *TRAINING, "stream", "processes", "rows", "threads", *recipe),
    }
    for name in unused[options.action]:
        if getattr(options, name) is not None:
            raise ConfigError(f"kvpop distill {options.action} has no use for {_flag(name)}: leave it out")


def distill(options) -> None:
    """Run `kvpop distill`.

    Raises:
        ConfigError: an option is missing or of no use, or texts are not available.
    """
    if options.action == "shares":
        words = [options.model or "MODEL", "--scorer", options.out, "--shares", "head"]
        words += ["--data", *options.data] if options.data else []
        words += ["--protect-prompt"] if options.protect_prompt else []
        raise ConfigError(f"shares are measured by another command: run 'kvpop calibrate {shlex.join(words)}'")
    _refuse_options_of_others(options)
    if options.action == "texts":
        from kvpop_vllm.distill.texts import KINDS, fetch_texts

        texts = fetch_texts(options.out, options.data)
        for name, (documents, characters) in texts.items():
            print(f"{name}: {documents} documents, {characters} characters")
        if missing := [name for name in options.data or KINDS if name not in texts]:
            raise ConfigError(
                f"no {', '.join(missing)} among the texts: to do without, name the other kinds with --data"
            )
        return
    if options.stream and options.processes:
        raise ConfigError("--processes is about text that is tokenised once: leave it out, or --stream")
    if options.validation_rows and not options.validate_every:
        raise ConfigError("--validation-rows is about held-out rows: give --validate-every")
    for name in ("model", "data"):
        if not getattr(options, name):
            raise ConfigError(f"kvpop distill needs --{name}")
    options.model = model_folder(options.model)
    from kvpop_vllm.distill.run import Reading, train, write_teacher

    reading = Reading(bool(options.stream), options.processes or 1)
    recipe = recipe_of(options)
    if options.action == "teacher":
        write_teacher(options.model, options.data, options.out, recipe, rows=options.rows, reading=reading)
    else:
        train(
            options.model,
            options.data,
            options.out,
            recipe,
            teacher=options.teacher,
            save_every=options.save_every or 50,
            reading=reading,
            validate_every=options.validate_every or 0,
            validation_rows=options.validation_rows or 8,
            tracker=options.tracker,
        )
