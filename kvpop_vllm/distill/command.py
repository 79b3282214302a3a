"""Options of `kvpop distill`; nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing

from kvpop_vllm.argument_types import positive
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.recipes import RECIPES

SHARES = "length", "pack", "protect_prompt", "seed", "window", "topk", "dtype"
"""Options of a recipe that `kvpop distill shares` takes too."""


def add_distill(commands) -> None:
    """Add `kvpop distill` to argparse's ``commands``."""
    summary = (
        "train scorers for MODEL (with --train-base the model too); 'teacher' writes its logits to disk; 'shares' measures how"
        " heads should share the slots of a scorer; 'texts' fetches real text"
    )
    command = commands.add_parser("distill", help=summary, description=summary)
    add = command.add_argument
    add("action", nargs="?", choices=("train", "teacher", "shares", "texts"), default="train")
    add("--model", metavar="MODEL", help="folder of the base model")
    add("--data", nargs="+", metavar="TEXT", help="text, JSONL, Parquet or datasets folders")
    add(
        "--out", required=True, metavar="DIR", help="folder to write; a stopped run is continued (shares: the scorer's)"
    )
    add("--recipe", choices=sorted(RECIPES), help="defaults of all that follows (default: paper)")
    add(
        "--teacher",
        metavar="DIR",
        help="logits written by 'kvpop distill teacher', instead of a teacher (which only a base that is trained has)",
    )
    add("--save-every", type=positive, help="optimiser steps between checkpoints (default 50)")
    add(
        "--rows",
        type=positive,
        help="rows of tokens; teacher: to write (default: all that the recipe needs); shares: to measure on (default 6)",
    )
    add("--threads", type=positive, help="CPU threads (default: all)")
    group = command.add_argument_group("recipe", "each overrides the named recipe")
    hints = typing.get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        flag, hint, text = _flag(item.name), hints[item.name], item.metadata["help"]
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif typing.get_origin(hint) is list:
            group.add_argument(flag, nargs="+", type=typing.get_args(hint)[0], metavar="N", help=text)
        else:
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
            kind = next(kind for kind in kinds if kind is not type(None))
            group.add_argument(flag, type=kind, metavar="X", help=text)
    command.set_defaults(run=distill)


def recipe_of(options) -> Recipe:
    """Return the named recipe with the command line's overrides.

    Raises:
        ConfigError: a value is invalid, an option has no effect, or options contradict each other.
    """
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)}
    recipe = dataclasses.replace(
        RECIPES[options.recipe or "paper"], **{n: v for n, v in given.items() if v is not None}
    )
    if options.train_base is False and recipe.trains_base:
        raise ConfigError(f"--phase {options.phase} trains the base model: leave --no-train-base out")
    if options.action == "teacher":  # the recipe identifies the run that the logits are for
        return recipe
    off = [f.name for f in dataclasses.fields(Recipe) if f.default is False and given[f.name] is False]
    if unused := recipe.without_effect([n for n, value in given.items() if value is not None and n not in off]):
        name, why = unused
        remedy = ", or give --train-base" if "frozen" in why else ""
        raise ConfigError(f"{_flag(name)} {why}: leave it out{remedy}")
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
    others = {
        "train": ("rows",),
        "teacher": ("teacher", "save_every"),
        "shares": ("recipe", "teacher", "save_every", *(name for name in recipe if name not in SHARES)),
        "texts": ("model", "recipe", "teacher", "save_every", "rows", "threads", *recipe),
    }
    for name in others[options.action]:
        if getattr(options, name) is not None:
            raise ConfigError(f"kvpop distill {options.action} has no use for {_flag(name)}: leave it out")


def distill(options) -> None:
    """Run `kvpop distill`.

    Raises:
        ConfigError: an option is missing or of no use, or texts are not available.
    """
    _refuse_options_of_others(options)
    if options.action == "texts":
        from kvpop_vllm.distill.texts import KINDS, fetch_texts

        found = fetch_texts(options.out, options.data)
        for name, (documents, characters) in found.items():
            print(f"{name}: {documents} documents, {characters} characters")
        if missing := [name for name in options.data or KINDS if name not in found]:
            raise ConfigError(
                f"no {', '.join(missing)} among the texts: to do without, name the other kinds with --data"
            )
        return
    for name in ("model", "data"):
        if not getattr(options, name):
            raise ConfigError(f"kvpop distill needs --{name}")
    from kvpop_vllm.distill.run import train, write_shares, write_teacher

    if options.action == "shares":
        given = {name: getattr(options, name) for name in SHARES if getattr(options, name) is not None}
        found = write_shares(options.model, options.data, options.out, given, options.rows or 6)
        print(
            f"long-range slots of a head: {found['least']:.2f} to {found['most']:.2f} times the mean;"
            f" error of attention over that of equal heads: {found['error']:.2f}"
        )
        return
    recipe = recipe_of(options)
    if options.action == "teacher":
        if recipe.phase == "uptrain":
            raise ConfigError("phase uptrain has no teacher: there are no logits to write for it")
        write_teacher(options.model, options.data, options.out, recipe, rows=options.rows)
    else:
        train(
            options.model,
            options.data,
            options.out,
            recipe,
            teacher=options.teacher,
            save_every=options.save_every or 50,
        )
