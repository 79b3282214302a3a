"""The ``kvpop`` command.

A subcommand imports what it needs when it runs, so that ``kvpop --help`` is fast and works anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpop_vllm import __version__
from kvpop_vllm.argument_types import non_negative, positive, protected
from kvpop_vllm.config import ALLOCATORS, CORRECTIONS
from kvpop_vllm.distill.command import add_distill
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.evaluation.command import add_eval

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def fetch_demo_model(options: argparse.Namespace) -> None:
    """Run ``kvpop fetch-demo-model``."""
    from kvpop_vllm.demo_model import fetch_demo_model

    fetch_demo_model(options.directory)


def init_scorer(options: argparse.Namespace) -> None:
    """Run ``kvpop init-scorer``."""
    from kvpop_vllm.scorers.init import init_scorer

    chosen = {name: getattr(options, name) for name in ("scorer", "sinks", "window", "topk", "seed")}
    init_scorer(options.model, options.directory, **{name: v for name, v in chosen.items() if v is not None})
    print(f"wrote an untrained {options.scorer} scorer to {options.directory}")


def import_gates(options: argparse.Namespace) -> None:
    """Run ``kvpop import``."""
    from kvpop_vllm.scorers.published import import_gates

    roles = {name: getattr(options, name) for name in ("sinks", "window", "topk")}
    config = import_gates(options.source, options.directory, **roles)
    print(f"wrote a {config.scorer} scorer to {options.directory}")


def export(options: argparse.Namespace) -> None:
    """Run ``kvpop export``."""
    from kvpop_vllm.scorers.export import export_checkpoint

    export_checkpoint(options.base, options.adapter, options.directory)
    print(f"wrote a full checkpoint to {options.directory}")


def policies(options: argparse.Namespace) -> None:
    """Run ``kvpop policies``: print the table of policies."""
    from kvpop_vllm.policies import describe

    print(describe())


def add_command(commands: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Add and return a subcommand; ``purpose`` is its line in ``kvpop --help`` and its description."""
    return commands.add_parser(name, help=purpose, description=purpose)


def add_fetch(commands: Commands) -> None:
    """Add ``kvpop fetch-demo-model``."""
    command = add_command(commands, "fetch-demo-model", "put SmolLM2-135M-Instruct into DIR as a Hugging Face folder")
    command.add_argument("directory", metavar="DIR")
    command.set_defaults(run=fetch_demo_model)


def add_init(commands: Commands) -> None:
    """Add ``kvpop init-scorer``."""
    command = add_command(commands, "init-scorer", "write an untrained scorer for MODEL into DIR")
    command.add_argument("model", metavar="MODEL", help="folder of the base model")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.add_argument(
        "--scorer", metavar="KIND", default="mlstm", help="mlstm (default), mlp, linear, trimkv or dms"
    )
    command.add_argument("--sinks", type=non_negative, default=4, help="first tokens always kept (default 4)")
    command.add_argument("--window", type=positive, default=256, help="latest tokens always kept (default 256)")
    command.add_argument("--topk", type=positive, help="long-range tokens per KV head that serving starts from")
    command.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    command.set_defaults(run=init_scorer)


def add_import(commands: Commands) -> None:
    """Add ``kvpop import``."""
    purpose = "write the gates of a published TRIM-KV or DMS checkpoint into DIR as a scorer"
    command = add_command(commands, "import", purpose)
    command.add_argument("source", metavar="SOURCE", help="folder with its config.json and weights")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.add_argument("--sinks", type=non_negative, help="first tokens always kept (default: TRIM-KV 0, DMS 1)")
    command.add_argument("--window", type=positive, help="latest tokens always kept (default: TRIM-KV 1, DMS its own)")
    command.add_argument(
        "--topk", type=positive, help="long-range tokens per KV head (default: TRIM-KV its memory size)"
    )
    command.set_defaults(run=import_gates)


def add_export(commands: Commands) -> None:
    """Add ``kvpop export``."""
    purpose = "write one checkpoint into DIR that holds the model BASE and the scorer ADAPTER"
    command = add_command(commands, "export", purpose)
    command.add_argument("base", metavar="BASE", help="folder of the base model")
    command.add_argument("adapter", metavar="ADAPTER", help="folder of the scorer")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.set_defaults(run=export)


def vllm_backend() -> type:
    """Return the evaluation backend that runs vLLM's engine."""
    from kvpop_vllm.vllm_glue.evaluation import EngineBackend

    return EngineBackend


def add_evaluation(commands: Commands) -> None:
    """Add ``kvpop eval``, with vLLM's engine as a backend."""
    add_eval(commands, vllm_backend)


def add_policies(commands: Commands) -> None:
    """Add ``kvpop policies``."""
    add_command(commands, "policies", "list the policies that --kv-policy takes").set_defaults(run=policies)


def bench_plot(options: argparse.Namespace) -> None:
    """Run ``kvpop bench plot``."""
    from kvpop_vllm.bench.plot import bench_plot

    bench_plot(options)


def add_bench(commands: Commands) -> None:
    """Add ``kvpop bench``."""
    command = add_command(commands, "bench", "what the scripts in benchmarks/ measured")
    group = command.add_subparsers(metavar="ACTION", required=True)
    plot = add_command(group, "plot", "draw their CSV files as one figure, and write one table")
    plot.add_argument("--results", default="benchmarks/results", metavar="DIR", help="folder of the CSV files")
    plot.add_argument("--out", metavar="DIR", help="folder to write figure.png and table.md (default: the same)")
    plot.add_argument("--commit", help="the measurement of this commit, rather than the newest")
    plot.add_argument("--machine", metavar="TEXT", help="the newest measurement of a machine with TEXT in its name")
    plot.set_defaults(run=bench_plot)


def plan(options: argparse.Namespace) -> None:
    """Run ``kvpop plan``."""
    from kvpop_vllm.plan import plan

    plan(options)


def memory(text: str) -> int:
    """Return a size in bytes, see :func:`kvpop_vllm.plan.memory`."""
    from kvpop_vllm.plan import memory

    return memory(text)


def add_plan(commands: Commands) -> None:
    """Add ``kvpop plan``."""
    command = add_command(commands, "plan", "bytes of a request and how many fit, for every policy and budget")
    command.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder; its config.json is read")
    command.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of a request (default: all positions of the model)"
    )
    command.add_argument("--kv-memory", required=True, type=memory, metavar="SIZE", help="of the pool, such as 40GiB")
    command.add_argument(
        "--budget", nargs="+", type=positive, metavar="B", help="tokens per KV head (default: 1/2, 1/4 and 1/8 of N)"
    )
    command.add_argument(
        "--scorer", metavar="DIR", help="of the kvpop policies (default: the size of an untrained one)"
    )
    command.add_argument("--correction", choices=CORRECTIONS, help="as --kv-correction")
    command.add_argument("--allocator", choices=ALLOCATORS, help="as --kv-allocator")
    command.add_argument("--protect-prompt", type=protected, metavar="all|N", help="as --kv-protect-prompt")
    command.add_argument(
        "--prompt-length",
        type=positive,
        metavar="N",
        help="of a request's tokens those of its prompt (default: what needs most)",
    )
    command.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the cache (default: the model's)")
    command.add_argument("--block-size", type=positive, default=64, metavar="N", help="slots of a block (default 64)")
    command.add_argument(
        "--dense-block-size",
        type=positive,
        default=128,
        metavar="N",
        help="tokens of stock's (default 128, as on a CPU)",
    )
    command.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="R", help="ranks; all numbers are then those of one"
    )
    command.set_defaults(run=plan)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the ``kvpop`` command with all subcommands."""
    parser = argparse.ArgumentParser(prog="kvpop", description="Fixed-budget KV caches for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvpop {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parts = (
        add_fetch,
        add_init,
        add_import,
        add_distill,
        add_evaluation,
        add_export,
        add_policies,
        add_plan,
        add_bench,
    )
    for add in parts:
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return 0, or 2 after one line on stderr if the user's input is wrong."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, TrainingError) as error:  # ConfigError and DemoModelError are ValueErrors
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"kvpop: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
