"""The `kvpop` command. A subcommand imports what it needs when it runs, so that `kvpop --help` is quick anywhere."""

import argparse
import sys

from kvpop_vllm import __version__
from kvpop_vllm.argument_types import non_negative, positive
from kvpop_vllm.distill.command import add_distill
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.evaluation.command import add_eval

SCORERS = ("mlstm", "mlp", "linear")


def fetch_demo_model(options):
    from kvpop_vllm.demo_model import fetch_demo_model

    fetch_demo_model(options.directory)


def init_scorer(options):
    from kvpop_vllm.scorers.init import init_scorer

    chosen = {name: getattr(options, name) for name in ("scorer", "sinks", "window", "topk", "seed")}
    init_scorer(options.model, options.directory, **{name: v for name, v in chosen.items() if v is not None})
    print(f"wrote an untrained {options.scorer} scorer to {options.directory}")


def export(options):
    from kvpop_vllm.scorers.export import export_checkpoint

    export_checkpoint(options.base, options.adapter, options.directory)
    print(f"wrote a full checkpoint to {options.directory}")


def policies(options):
    from kvpop_vllm.policies import describe

    print(describe())


def add_fetch(commands):
    help = "put SmolLM2-135M-Instruct into DIR as a Hugging Face folder"
    command = commands.add_parser("fetch-demo-model", help=help, description=help)
    command.add_argument("directory", metavar="DIR")
    command.set_defaults(run=fetch_demo_model)


def add_init(commands):
    help = "write an untrained scorer for MODEL into DIR"
    command = commands.add_parser("init-scorer", help=help, description=help)
    command.add_argument("model", metavar="MODEL", help="folder of the base model")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.add_argument("--scorer", choices=SCORERS, default="mlstm")
    command.add_argument("--sinks", type=non_negative, default=4, help="first tokens always kept (default 4)")
    command.add_argument("--window", type=positive, default=256, help="latest tokens always kept (default 256)")
    command.add_argument("--topk", type=positive, help="long-range tokens per KV head that serving starts from")
    command.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    command.set_defaults(run=init_scorer)


def add_export(commands):
    help = "write one checkpoint into DIR that holds the model BASE and the scorer ADAPTER"
    command = commands.add_parser("export", help=help, description=help)
    command.add_argument("base", metavar="BASE", help="folder of the base model")
    command.add_argument("adapter", metavar="ADAPTER", help="folder of the scorer")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.set_defaults(run=export)


def add_policies(commands):
    help = "list the policies that --kv-policy takes"
    commands.add_parser("policies", help=help, description=help).set_defaults(run=policies)


def make_parser():
    parser = argparse.ArgumentParser(prog="kvpop", description="Fixed-budget KV caches for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvpop {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (add_fetch, add_init, add_distill, add_eval, add_export, add_policies):
        add(commands)
    return parser


def main(arguments=None):
    """Run one subcommand. Returns 0, or 2 after one line on stderr when the user's input is at fault."""
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
