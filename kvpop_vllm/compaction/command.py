"""Options of `kvpop compact` and `kvpop train-compactor`. Nothing heavy is imported before it runs.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import argparse
import importlib.util
from collections.abc import Callable

from kvpop_vllm.argument_types import non_negative, positive
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import model_folder

FITTED = ("queries", "keys", "reference", "answers", "on_policy")
"""Options of ``--method attention-matching`` alone."""
TRAINED = ("init", "conversations", "steps", "batch", "lr", "save_every", "backend")
"""Options of ``--method cartridge`` alone."""
COMMON = ("dtype", "seed", "place", "system")
"""Options of all methods."""
SLOTS = 1024
"""Slots per KV head by default."""


def add_compact(commands, engine: Callable) -> None:
    """Add `kvpop compact` to argparse's ``commands``.

    Args:
        commands: subcommands that it is added to.
        engine: imports and returns the function that starts vLLM to make conversations.
    """
    summary = "write a cartridge of a corpus: a KV cache of a few slots that MODEL can use in place of the corpus"
    command = commands.add_parser("compact", help=summary, description=summary)
    add = command.add_argument
    add("model", metavar="MODEL", help="folder of the base model, or its name on the hub")
    add("--data", required=True, metavar="TEXT", help="the corpus: a text or JSONL file, or a folder")
    add("--out", required=True, metavar="DIR", help="folder to write; a stopped --method cartridge is continued")
    add(
        "--method",
        choices=("attention-matching", "cartridge", "still", "first", "last", "truncation"),
        default="attention-matching",
        help="attention-matching (default); cartridge: trained; still: by a trained compactor; first or last (the same as truncation): the corpus' own tokens, for comparison",
    )
    text = "slots per KV head (default 1024; still: those of the compactor)"
    add("--slots", type=positive, metavar="P", help=text)
    text = "still: folder of the compactor, from 'kvpop train-compactor'"
    add("--compactor", metavar="DIR", help=text)
    add(
        "--queries",
        choices=("self-study", "repeat-prefill"),
        default="self-study",
        help="what the cache is fitted to: sampled answers about the corpus (default), or the corpus repeated",
    )
    add(
        "--keys",
        choices=("highest", "omp"),
        default="highest",
        help="kept keys: of highest attention (default), or of a matching pursuit (slower)",
    )
    add(
        "--chunk",
        type=positive,
        metavar="N",
        help="compact N tokens at a time (default: all at once); cartridge: most tokens that a conversation is about (default 2048)",
    )
    add("--reference", type=positive, default=4096, metavar="N", help="queries per head (default 4096)")
    add("--answers", type=positive, default=10, metavar="N", help="answers of self-study (default 10)")
    add(
        "--on-policy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fit upper layers to queries that come from compacted lower ones (default)",
    )
    add(
        "--place",
        choices=("message", "front"),
        help="where the corpus stands: in the first message of a chat (default), or in front of any prompt (default without a chat template)",
    )
    text = "system message of the chats (default: that of the chat template); requests must have the same"
    add("--system", metavar="TEXT", help=text)
    add("--kv-calibration", metavar="DIR|FILE", help="folder of 'kvpop calibrate', or JSON with the heads' shares")
    add("--kv-allocator", help=argparse.SUPPRESS)
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the model and of the cartridge (default float32)",
    )
    add("--threads", type=positive, help="CPU threads (default: all)")
    add("--seed", type=int, default=0, help="of samples (default 0)")
    add_training(command)
    command.set_defaults(run=lambda options: run_compact(options, engine, command.get_default))


def add_training(command: argparse.ArgumentParser) -> None:
    """Add the options of ``--method cartridge``."""
    group = command.add_argument_group("--method cartridge")
    add = group.add_argument
    text = "start from the first P tokens of this text, or from this cartridge (default: the corpus' first P tokens)"
    add("--init", metavar="PATH", help=text)
    add("--conversations", type=positive, metavar="N", help="conversations to train on (default 256)")
    add("--steps", type=non_negative, metavar="N", help="optimiser steps (default 256)")
    add("--batch", type=positive, metavar="N", help="conversations of a step (default 16)")
    add("--lr", type=float, metavar="X", help="peak of the learning rate (default 0.02)")
    add("--save-every", type=positive, metavar="N", help="optimiser steps between checkpoints (default 50)")
    text = "what makes the conversations (default: vllm where it is installed)"
    add("--backend", choices=("vllm", "transformers"), help=text)


def check_method(options: argparse.Namespace, default: Callable[[str], object]) -> None:
    """Check that no option of another method is given."""
    owners = {"attention-matching": FITTED, "cartridge": TRAINED, "still": ("compactor",)}
    for owner, names in owners.items():
        for name in names if owner != options.method else ():
            # an option that is not at its default was given
            if getattr(options, name) != default(name):
                flag = "--no-on-policy" if name == "on_policy" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is of --method {owner}: leave it out, or choose that method")
    if options.queries != default("queries") and options.answers != default("answers"):
        raise ConfigError(f"--answers is about self-study: leave it out, or --queries {options.queries}")
    if options.chunk is not None and options.method not in ("attention-matching", "cartridge"):
        raise ConfigError(f"--method {options.method} has no chunks: leave --chunk out")


def run_compact(options: argparse.Namespace, engine: Callable, default: Callable[[str], object]) -> None:
    """Run `kvpop compact`.

    Args:
        options: of the command line.
        engine: see :func:`add_compact`.
        default: returns the default of an option.

    Raises:
        TrainingError: training cannot go on.
    """
    check_method(options, default)
    if options.kv_allocator is not None:
        raise ConfigError(f"--kv-allocator takes no file: give --kv-calibration {options.kv_allocator} instead")
    options.model = model_folder(options.model)
    if options.method == "cartridge":
        run_training(options, engine)
        return
    from kvpop_vllm.compaction.run import CompactOptions, compact
    from kvpop_vllm.rules.matching import Matching

    names = ("method", "queries", "chunk", "reference", "answers", "on_policy", *COMMON, "compactor")
    chosen = {name: getattr(options, name) for name in names}
    chosen["slots"] = options.slots or (None if options.method == "still" else SLOTS)
    settings = CompactOptions(**chosen, calibration=options.kv_calibration, matching=Matching(keys=options.keys))
    compact(options.model, options.data, options.out, settings)


def run_training(options: argparse.Namespace, engine: Callable) -> None:
    """Run `kvpop compact --method cartridge`. See :func:`run_compact`."""
    from kvpop_vllm.compaction.cartridge_training import Training, train_cartridge
    from kvpop_vllm.compaction.run import CompactOptions

    chosen = {name: getattr(options, name) for name in ("method", "chunk", *COMMON)}
    settings = CompactOptions(**chosen, slots=options.slots or SLOTS, calibration=options.kv_calibration)
    values = {name: getattr(options, name) for name in ("init", "conversations", "steps", "batch", "lr")}
    training = Training(**{name: value for name, value in values.items() if value is not None})
    backend = options.backend or ("vllm" if importlib.util.find_spec("vllm") else "transformers")
    train_cartridge(
        options.model,
        options.data,
        options.out,
        settings,
        training,
        engine=engine() if backend == "vllm" else None,
        save_every=options.save_every or 50,
    )


def add_train_compactor(commands) -> None:
    """Add `kvpop train-compactor` to argparse's ``commands``."""
    summary = "train a compactor (STILL) for MODEL on texts, once for 'kvpop compact --method still' of any corpus"
    command = commands.add_parser("train-compactor", help=summary, description=summary)
    add = command.add_argument
    add("model", metavar="MODEL", help="folder of the base model, or its name on the hub")
    add("--data", required=True, nargs="+", metavar="TEXT", help="text, JSONL, Parquet or datasets folders")
    add("--out", required=True, metavar="DIR", help="folder to write; a stopped run is continued")
    add("--slots", type=positive, metavar="P", help="slots per KV head (default 256)")
    text = "most tokens that are compacted at once; a quarter as many follow (default 1024)"
    add("--window", type=positive, metavar="N", help=text)
    add("--steps", type=non_negative, metavar="N", help="optimiser steps (default 1000)")
    add("--batch", type=positive, metavar="N", help="windows of a step (default 4)")
    add("--lr", type=float, metavar="X", help="peak of the learning rate (default 0.0001)")
    add("--kl", type=float, metavar="X", help="weight of the KL divergence from the full context (default 1)")
    add("--ce", type=float, metavar="X", help="weight of the cross-entropy to the text (default 0.1)")
    add("--save-every", type=positive, metavar="N", default=50, help="optimiser steps between checkpoints (default 50)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the model (default float32)")
    add("--threads", type=positive, help="CPU threads (default: all)")
    add("--seed", type=int, help="of the windows (default 0)")
    command.set_defaults(run=run_train_compactor)


def run_train_compactor(options: argparse.Namespace) -> None:
    """Run `kvpop train-compactor`. See :func:`run_compact` for errors."""
    from kvpop_vllm.compaction.compactor_training import StillOptions, train_compactor

    names = ("slots", "window", "steps", "batch", "lr", "kl", "ce", "dtype", "seed")
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    train_compactor(
        model_folder(options.model), options.data, options.out, StillOptions(**values), save_every=options.save_every
    )
