"""`kvpop distill` and `kvpop eval`: options, and what they run. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.recipe import RECIPES, Recipe


def add_distill(commands) -> None:
    """Adds `kvpop distill` to argparse's ``commands``."""
    help = "train scorers for MODEL (and the model with them); 'teacher' writes its logits to disk; 'texts' fetches real text"
    command = commands.add_parser("distill", help=help, description=help)
    command.add_argument("action", nargs="?", choices=("train", "teacher", "texts"), default="train")
    command.add_argument("--model", metavar="MODEL", help="folder of the base model")
    command.add_argument("--data", nargs="+", metavar="TEXT", help="text, JSONL, Parquet or datasets folders")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write; a stopped run is continued")
    command.add_argument("--recipe", choices=sorted(RECIPES), default="paper", help="defaults of all that follows")
    command.add_argument(
        "--teacher", metavar="DIR", help="logits written by 'kvpop distill teacher', instead of a teacher"
    )
    command.add_argument("--save-every", type=int, default=50, help="optimiser steps between checkpoints (default 50)")
    command.add_argument(
        "--rows", type=int, help="teacher: rows of tokens to write (default: all that the recipe needs)"
    )
    command.add_argument("--threads", type=int, help="CPU threads (default: all)")
    group = command.add_argument_group("recipe", "each overrides the named recipe")
    hints = typing.get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        flag, hint, help = "--" + item.name.replace("_", "-"), hints[item.name], item.metadata["help"]
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        elif typing.get_origin(hint) is list:
            group.add_argument(flag, nargs="+", type=typing.get_args(hint)[0], metavar="N", help=help)
        else:
            kinds = (
                [a for a in typing.get_args(hint) if a is not type(None)]
                if isinstance(hint, types.UnionType)
                else [hint]
            )
            group.add_argument(flag, type=kinds[0], metavar="X", help=help)
    command.set_defaults(run=distill)


def recipe_of(options) -> Recipe:
    """The named recipe with what the command line overrides."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Recipe)}
    return dataclasses.replace(RECIPES[options.recipe], **{n: v for n, v in given.items() if v is not None})


def require_positive(options, *names: str) -> None:
    """Refuses numbers below 1 in ``options``; None is an option left out.

    Raises:
        ConfigError: there is one.
    """
    for name in names:
        value = getattr(options, name)
        if any(number is not None and number < 1 for number in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def distill(options) -> None:
    """Runs `kvpop distill`."""
    if options.action == "texts":
        from kvpop_vllm.distill.texts import fetch_texts

        for name, (documents, characters) in fetch_texts(options.out, options.data).items():
            print(f"{name}: {documents} documents, {characters} characters")
        return
    for name in ("model", "data"):
        if not getattr(options, name):
            raise ConfigError(f"kvpop distill needs --{name}")
    require_positive(options, "save_every", "rows", "threads")
    from kvpop_vllm.distill.run import train, write_teacher

    recipe = recipe_of(options)
    if options.action == "teacher":
        write_teacher(options.model, options.data, options.out, recipe, rows=options.rows, threads=options.threads)
    else:
        train(
            options.model,
            options.data,
            options.out,
            recipe,
            teacher=options.teacher,
            save_every=options.save_every,
            threads=options.threads,
        )


def add_eval(commands) -> None:
    """Adds `kvpop eval` to argparse's ``commands``."""
    help = "compare policies on text: retention recall, hindsight recall, perplexity and accuracy"
    command = commands.add_parser("eval", help=help, description=help)
    command.add_argument("--model", required=True, metavar="MODEL", help="folder of the base model")
    command.add_argument(
        "--data", required=True, nargs="+", metavar="TEXT", help="text, JSONL, Parquet, datasets folders"
    )
    command.add_argument("--split", choices=("train", "validation", "test", "all"), default="test")
    command.add_argument(
        "--scorer", action="append", default=[], metavar="DIR", help="a scorer folder; may be repeated"
    )
    command.add_argument("--policies", nargs="*", default=["streaming-llm", "l2norm", "random"], metavar="NAME")
    command.add_argument("--length", nargs="+", type=int, default=[1024], metavar="S", help="tokens per row")
    command.add_argument("--share", nargs="+", type=int, default=[4], metavar="C", help="budgets: B = S / C")
    command.add_argument("--sinks", type=int, help="s (default: the scorer's, else 4)")
    command.add_argument("--window", type=int, help="w (default: the scorer's, else 64)")
    command.add_argument("--rows", type=int, default=4, help="rows of text (default 4)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument(
        "--equal", nargs="+", choices=("k", "bytes"), default=["k"], help="what is equal between policies"
    )
    command.add_argument("--out", metavar="FILE.jsonl", help="all records, one per line")
    command.add_argument("--threads", type=int, help="CPU threads (default: all)")
    command.set_defaults(run=run_eval)


def run_eval(options) -> None:
    """Runs `kvpop eval`."""
    require_positive(options, "length", "share", "rows", "threads")
    from kvpop_vllm.evaluation.command import evaluate_text

    evaluate_text(options)
