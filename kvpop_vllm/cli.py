"""The ``kvpop`` command.

A subcommand imports what it needs when it runs, so that ``kvpop --help`` is fast and works anywhere.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpop_vllm import __version__
from kvpop_vllm.argument_types import add_setting, memory, positive, share
from kvpop_vllm.calibrate.command import add_calibrate
from kvpop_vllm.compaction.command import add_compact, add_train_compactor
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.command import add_distill
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.evaluation.command import add_eval
from kvpop_vllm.flags import FLAGS
from kvpop_vllm.hub import FILES, PICKLES, config_folder, local_folder, model_folder
from kvpop_vllm.supported import DTYPES

DOCTOR = "print versions, whether vLLM loads the plugin, kernels, and what `vllm serve` with the same MODEL and options would keep"

SERVING_PLAN = dict.fromkeys(
    "kv_memory budget scorer calibration correction allocator protect_prompt dtype max_model_len prompt_length block_size mamba_ssm_cache_dtype enable_prefix_caching".split()
) | {"drafts": 0, "dense_block_size": 128, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
"""Options of ``kvpop plan`` that are about serving, with their defaults."""
TRAINING_PLAN = dict.fromkeys(
    "recipe train_base length batch micro_batch steps stored_teacher gpus gpu_memory mfu tflops".split()
)
"""Options of ``kvpop plan --train``, with their defaults."""

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def fetch_demo_model(options: argparse.Namespace) -> None:
    """Run ``kvpop fetch-demo-model``."""
    from kvpop_vllm.demo_model import fetch_demo_model

    fetch_demo_model(options.directory)


def init_scorer(options: argparse.Namespace) -> None:
    """Run ``kvpop init-scorer``."""
    from kvpop_vllm.scorers.untrained import init_scorer

    chosen = {name: getattr(options, name) for name in ("scorer", "sinks", "window", "topk", "seed")}
    init_scorer(
        config_folder(options.model), options.directory, **{name: v for name, v in chosen.items() if v is not None}
    )
    print(f"wrote an untrained {options.scorer} scorer to {options.directory}")


def import_published(options: argparse.Namespace) -> None:
    """Run ``kvpop import``."""
    from kvpop_vllm.compaction.published import import_cartridge, published_cartridge
    from kvpop_vllm.scorers.published import check_served, import_gates

    roles = {name: getattr(options, name) for name in ("sinks", "window", "topk")}
    # downloaded once, for all that reads it below
    options.source = str(local_folder(options.source, files=(*FILES, *PICKLES)))
    check_served(options.source)
    if pickle := published_cartridge(options.source):
        if unused := [name for name, value in roles.items() if value is not None]:
            raise ConfigError(f"a cartridge has no use for --{unused[0]}: leave it out")
        if options.model is None:
            raise ConfigError(f"{pickle} is a cartridge, which names no model: give its base model with --model")
        config = import_cartridge(pickle, options.directory, model_folder(options.model))
        print(f"wrote a cartridge of {config.slots} slots to {options.directory}")
        return
    if options.model is not None:
        raise ConfigError("gates name their model themselves: leave --model out")
    imported = import_gates(options.source, options.directory, **roles, map_file=options.map)
    print("\n".join([*imported.notes, f"wrote a {imported.config.scorer} scorer to {options.directory}"]))


def inspect_checkpoint(options: argparse.Namespace) -> None:
    """Run ``kvpop inspect-checkpoint``."""
    from kvpop_vllm.scorers.inspect_checkpoint import inspect_checkpoint

    print("\n".join(inspect_checkpoint(options.directory, options.out, options.map)))


def check_checkpoint(options: argparse.Namespace) -> None:
    """Run ``kvpop check-checkpoint``."""
    from kvpop_vllm.evaluation.check_checkpoint import check_checkpoint

    check_checkpoint(options)


def export(options: argparse.Namespace) -> None:
    """Run ``kvpop export``."""
    from kvpop_vllm.scorers.export import export_checkpoint

    export_checkpoint(model_folder(options.base), options.adapter, options.directory)
    print(f"wrote a full checkpoint to {options.directory}")


def policies(options: argparse.Namespace) -> None:
    """Run ``kvpop policies``: print the table of policies."""
    from kvpop_vllm.policies import describe

    print(describe())


def bench_plot(options: argparse.Namespace) -> None:
    """Run ``kvpop bench plot``."""
    from kvpop_vllm.bench.plot import bench_plot

    bench_plot(options)


def plan(options: argparse.Namespace) -> None:
    """Run ``kvpop plan``."""
    use, names, remedy = (
        ("serving", SERVING_PLAN, "leave --train out") if options.train else ("training", TRAINING_PLAN, "give --train")
    )
    # an option that is not at its default was given
    if unused := [name for name, default in names.items() if getattr(options, name) != default]:
        raise ConfigError(f"--{unused[0].replace('_', '-')} is about {use}: leave it out, or {remedy}")
    if options.kv_memory is None and not options.train:
        raise ConfigError("kvpop plan needs --kv-memory, or --train for the memory of training")
    options.model = config_folder(options.model)
    if options.train:
        from kvpop_vllm.distill.training_plan import plan_training

        plan_training(options)
        return
    from kvpop_vllm.plan import plan

    plan(options)


def serve(arguments: Sequence[str]) -> None:
    """Run ``kvpop serve``: end this program, and begin ``vllm serve`` in its place."""
    from kvpop_vllm.vllm_glue.start.doctor import serve

    serve(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Run ``kvpop doctor``. Return its exit code."""
    from kvpop_vllm.vllm_glue.start.doctor import doctor

    return doctor(arguments)


def vllm_backend() -> type:
    """Return the evaluation backend that runs vLLM's engine."""
    from kvpop_vllm.vllm_glue.extras.evaluation import EngineBackend

    return EngineBackend


def vllm_sampler() -> Callable:
    """Return the function that starts vLLM to make the conversations of `kvpop compact`."""
    from kvpop_vllm.vllm_glue.extras.self_study import engine_sampler

    return engine_sampler


def add_command(commands: Commands, name: str, purpose: str, run: Callable | None = None) -> argparse.ArgumentParser:
    """Add and return a subcommand.

    Args:
        commands: subcommands that it is added to.
        name: name of the subcommand.
        purpose: its line in ``kvpop --help`` and its description.
        run: takes the options and runs it.
    """
    command = commands.add_parser(name, help=purpose, description=purpose)
    command.set_defaults(run=run)
    return command


def add_init(commands: Commands) -> None:
    """Add ``kvpop init-scorer``."""
    command = add_command(commands, "init-scorer", "write an untrained scorer for MODEL into DIR", init_scorer)
    command.add_argument("model", metavar="MODEL", help="folder of the base model, or its name on the hub")
    command.add_argument("directory", metavar="DIR", help="folder to write")
    kinds = "mlstm (default), mlp, linear, trimkv, dms or kvzap"
    command.add_argument("--scorer", metavar="KIND", default="mlstm", help=kinds)
    add_setting(command, "sinks", "first tokens always kept (default 4)", default=4)
    add_setting(command, "window", "latest tokens always kept (default 256)", default=256)
    command.add_argument("--topk", type=positive, help="long-range tokens per KV head that serving starts from")
    command.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")


def add_import(commands: Commands) -> None:
    """Add ``kvpop import``."""
    purpose = (
        "write a published checkpoint into DIR: the gates of TRIM-KV, DMS or KVzap, or KVpop's scorer, as a scorer folder, a cartridge as"
        " one of ours"
    )
    command = add_command(commands, "import", purpose, import_published)
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="folder with its config.json and weights, or its name on the hub; a cartridge's .pt file",
    )
    command.add_argument("directory", metavar="DIR", help="folder to write")
    command.add_argument("--model", metavar="MODEL", help="folder of a cartridge's base model, or its name on the hub")
    command.add_argument("--map", metavar="FILE", help="how to read a KVpop checkpoint (kvpop inspect-checkpoint)")
    add_setting(command, "sinks", "first tokens always kept (default: TRIM-KV and FastDMS 0, DMS 1, KVzap 4)")
    add_setting(command, "window", "latest tokens always kept (default: TRIM-KV 1, DMS its own, KVzap 128)")
    help_of_topk = "long-range tokens per KV head (default: TRIM-KV its memory size, KVzap 3964)"
    command.add_argument("--topk", type=positive, help=help_of_topk)


def add_checkpoints(commands: Commands) -> None:
    """Add ``kvpop inspect-checkpoint`` and ``kvpop check-checkpoint``."""
    purpose = "print what a KVpop checkpoint of other authors holds and how its scorer is read, and write a map of it"
    command = add_command(commands, "inspect-checkpoint", purpose, inspect_checkpoint)
    command.add_argument("directory", metavar="DIR", help="folder of the checkpoint, or its name on the hub")
    command.add_argument(
        "--out", metavar="FILE", default="kvpop_map.json", help="file to write (default kvpop_map.json)"
    )
    command.add_argument("--map", metavar="FILE", help="a map to check instead; nothing is written")
    purpose = "compare the likelihood of a text under a KVpop checkpoint with dense, a shuffled scorer and a window of the same size"
    command = add_command(commands, "check-checkpoint", purpose, check_checkpoint)
    command.add_argument("directory", metavar="DIR", help="folder of the checkpoint, or its name on the hub")
    command.add_argument("--data", required=True, metavar="TEXT", help="a text file")
    command.add_argument("--map", metavar="FILE", action="append", help="how to read it; repeat it to compare maps")
    add_setting(command, "budget", "tokens per KV head (default: the checkpoint's)")
    command.add_argument(
        "--length", type=positive, metavar="N", help="tokens of a row (default: twice the budget, at least 2048)"
    )
    command.add_argument("--rows", type=positive, metavar="N", default=16, help="most rows (default 16)")
    command.add_argument("--dtype", choices=DTYPES["cpu"], help="of the model (default: its own)")
    command.add_argument("--seed", type=int, default=0, help="of the shuffled scorer and the interval (default 0)")


def add_export(commands: Commands) -> None:
    """Add ``kvpop export``."""
    purpose = "write one checkpoint into DIR that holds the model BASE and the scorer ADAPTER"
    command = add_command(commands, "export", purpose, export)
    command.add_argument("base", metavar="BASE", help="folder of the base model, or its name on the hub")
    command.add_argument("adapter", metavar="ADAPTER", help="folder of the scorer")
    command.add_argument("directory", metavar="DIR", help="folder to write")


def add_bench(commands: Commands) -> None:
    """Add ``kvpop bench``."""
    command = add_command(commands, "bench", "what the scripts in benchmarks/ measured")
    group = command.add_subparsers(metavar="ACTION", required=True)
    plot = add_command(group, "plot", "draw one figure of decode times and of answers, and write one table", bench_plot)
    plot.add_argument("--results", default="benchmarks/results", metavar="DIR", help="folder of the CSV files")
    plot.add_argument("--out", metavar="DIR", help="folder to write figure.png and table.md (default: the same)")
    plot.add_argument("--commit", help="the measurement of this commit, rather than the newest")
    plot.add_argument("--machine", metavar="TEXT", help="the newest measurement of a machine with TEXT in its name")


def add_plan(commands: Commands) -> None:
    """Add ``kvpop plan``."""
    command = add_command(commands, "plan", "bytes of a request and how many fit, for every policy and budget", plan)
    command.add_argument(
        "--model", required=True, metavar="DIR", help="a Hugging Face folder or a name of the hub; config.json is read"
    )
    command.add_argument("--kv-memory", type=memory, metavar="SIZE", help="of the pool, such as 40GiB")
    add_setting(command, "budget", "tokens per KV head (default: 1/2, 1/4 and 1/8 of N)", nargs="+")
    add_setting(command, "scorer", "of the kvpop policies (default: the size of an untrained one)")
    add_setting(command, "calibration", "as --kv-calibration (default: triattention is left out)")
    for name in ("correction", "allocator", "protect_prompt"):
        add_setting(command, name, f"as {FLAGS[name]}")
    command.add_argument("--dtype", choices=DTYPES["cpu"], help="of the cache (default: the model's)")
    for name, metavar, default, text in (
        ("max-model-len", "N", None, "tokens of a request (default: all positions of the model)"),
        ("prompt-length", "N", None, "of a request's tokens those of its prompt (default: what needs most)"),
        ("drafts", "M", 0, "of a step, as num_speculative_tokens of --speculative-config (default: none)"),
        ("block-size", "N", None, "slots of a block (default 64), or what divides them in models with windows (16)"),
        ("dense-block-size", "N", SERVING_PLAN["dense_block_size"], "tokens of stock's (default 128, as on a CPU)"),
        ("tensor-parallel-size", "R", 1, "ranks; all numbers are then those of one"),
        ("pipeline-parallel-size", "R", 1, "stages; all numbers are then those of the one with the most layers"),
    ):
        command.add_argument(f"--{name}", type=positive, metavar=metavar, default=default, help=text)
    dtypes = sorted({*DTYPES["cpu"], *DTYPES["cuda"]})
    states = "of recurrent states (default: the config's, or the model's)"
    command.add_argument("--mamba-ssm-cache-dtype", choices=dtypes, help=states)
    cached = "count the states that a prefix cache keeps (default: where a policy protects prompts; not in stock vLLM)"
    command.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help=cached)
    add_training_plan(command)


def add_training_plan(command: argparse.ArgumentParser) -> None:
    """Add the options of ``kvpop plan --train``."""
    group = command.add_argument_group("training", "memory, disk and time of 'kvpop distill'")
    group.add_argument("--train", action="store_true", help="plan the training of a scorer, not serving")
    group.add_argument("--recipe", choices=("paper", "workshop"), help="as in kvpop distill (default: paper)")
    group.add_argument("--train-base", action=argparse.BooleanOptionalAction, default=None, help="as in kvpop distill")
    for name in ("length", "batch", "micro-batch", "steps"):
        group.add_argument(f"--{name}", type=positive, metavar="N", help="as in kvpop distill")
    group.add_argument("--stored-teacher", action="store_const", const=True, help="logits are read (--teacher DIR)")
    group.add_argument("--gpus", type=positive, metavar="N", help="GPUs, with a process each (default: 8)")
    group.add_argument("--gpu-memory", type=memory, metavar="SIZE", help="of a GPU (default: 80GB)")
    group.add_argument("--mfu", type=share, help="share of the peak that the run reaches (default: 0.35)")
    group.add_argument("--tflops", type=positive, metavar="N", help="peak in bfloat16 (default: 989, an H100's)")


def add_servers(commands: Commands) -> None:
    """Add ``kvpop serve`` and ``kvpop doctor``, whose arguments :func:`main` passes on as they are."""
    add_command(commands, "serve", "run `vllm serve` with the same arguments, if it has the plugin")
    add_command(commands, "doctor", DOCTOR)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the ``kvpop`` command with all subcommands."""
    parser = argparse.ArgumentParser(prog="kvpop", description="Fixed-budget KV caches for vLLM.")
    parser.add_argument("--version", action="version", version=f"kvpop {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    purpose = "put SmolLM2-135M-Instruct into DIR as a Hugging Face folder"
    add_command(commands, "fetch-demo-model", purpose, fetch_demo_model).add_argument("directory", metavar="DIR")
    add_init(commands)
    add_import(commands)
    add_checkpoints(commands)
    add_compact(commands, vllm_sampler)
    add_train_compactor(commands)
    add_calibrate(commands)
    add_distill(commands)
    add_eval(commands, vllm_backend)
    add_export(commands)
    add_command(commands, "policies", "list the policies that --kv-policy takes", policies)
    add_plan(commands)
    add_bench(commands)
    add_servers(commands)
    return parser


def _reader_has_gone() -> bool:
    """Return whether nobody reads stdout any more. What is left to print is then dropped."""
    try:
        file = sys.stdout.fileno()
    except (AttributeError, ValueError):  # there is none, or it is not a file
        return False
    stdout = select.poll()
    # 0 asks for no events, so that errors alone are reported
    stdout.register(file, 0)
    if gone := any(event & select.POLLERR for _, event in stdout.poll(0)):
        # what Python flushes at its exit must not fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return gone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Return 0, 1 if ``kvpop doctor`` found something wrong, 2 after one line on stderr if the user's input is wrong, or
    141 if whoever reads stdout has gone, as `head` does.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        # options of vLLM, which the parser below does not know
        if arguments[:1] == ["serve"]:
            serve(arguments[1:])
        if arguments[:1] == ["doctor"] and not {"-h", "--help"} & set(arguments):
            return doctor(arguments[1:])
        options = make_parser().parse_args(arguments)
        if getattr(options, "threads", None):
            import torch

            torch.set_num_threads(options.threads)
        options.run(options)
        # here, so that a pipe that has closed is an error inside of this try
        if sys.stdout is not None:
            sys.stdout.flush()
    except (ValueError, OSError, TrainingError) as error:  # ConfigError and DemoModelError are ValueErrors
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            return 141
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"kvpop: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
