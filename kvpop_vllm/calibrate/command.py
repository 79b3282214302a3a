"""Options of `kvpop calibrate`; nothing heavy is imported before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpop_vllm.argument_types import add_setting, non_negative, positive
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import model_folder
from kvpop_vllm.supported import DTYPES

if TYPE_CHECKING:
    from kvpop_vllm.calibrate.plan import Options

LEAST_ROWS = 8


def add_calibrate(commands) -> None:
    """Add `kvpop calibrate` to argparse's ``commands``."""
    summary = (
        "measure how layers (or heads) of MODEL should share the slots, and which window each policy should have; no training,"
        " no scorer"
    )
    command = commands.add_parser("calibrate", help=summary, description=summary)
    command.add_argument("model", metavar="MODEL", help="folder of the model, or its name on the hub")
    command.add_argument(
        "--out",
        metavar="DIR",
        help="folder to write; a stopped call is continued (default with --scorer: calibration in its folder)",
    )
    command.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="text, JSONL, Parquet or datasets folders (default: 300 kB of prose, code and chat of this package)",
    )
    _add_policies(command)
    _add_rows(command)
    for name, things in (("tensor", "ranks"), ("pipeline", "stages")):
        command.add_argument(
            f"--{name}-parallel-size",
            type=positive,
            default=1,
            metavar="N",
            help=f"{things} that will serve the model, among which slots are balanced (default 1)",
        )
    command.add_argument("--dtype", choices=DTYPES["cpu"], help="of the model (default float32)")
    command.add_argument("--threads", type=positive, help="CPU threads (default: all)")
    command.add_argument(
        "--dry-run", action="store_true", help="say how long it takes at most and how much memory, and write nothing"
    )
    command.set_defaults(run=run_calibrate)


def _add_policies(command) -> None:
    """Add what is measured: shares of layers or heads, and the policies and budgets of the report."""
    command.add_argument(
        "--shares",
        choices=("layer", "head"),
        default="layer",
        help="what may differ in its slots: layers (default), or also the heads of those that lose most",
    )
    command.add_argument(
        "--policies",
        nargs="*",
        metavar="NAME",
        help="further policies of the report, which streaming-llm is in with equal shares; without a name none, as for a server with"
        " a GPU (default: triattention, but none with --policy, --scorer or a GPU; those that read token by token take long)",
    )
    command.add_argument(
        "--policy",
        metavar="NAME",
        help="the policy that shares are measured with, and that decides about them (default: the scorer's, else triattention if it is in"
        " the report, else streaming-llm)",
    )
    add_setting(command, "scorer", "of that policy; shares are also written into its folder, or a full checkpoint's")
    command.add_argument(
        "--budget",
        type=positive,
        nargs="+",
        metavar="B",
        help="budgets of the report, in tokens after a protected prompt; the middle one is recommended (default: 1/2, 1/4 and"
        " 1/8 of a row)",
    )


def _add_rows(command) -> None:
    """Add the options of rows of text."""
    command.add_argument("--length", type=positive, metavar="S", help="tokens of a row (default 2048)")
    command.add_argument(
        "--rows",
        type=positive,
        metavar="N",
        help="rows to measure on, and as many to judge by (default 10, at least 8)",
    )
    command.add_argument(
        "--rounds",
        type=non_negative,
        metavar="N",
        help="most rounds in which shares are improved, each of dozens of passes (default 8 with --scorer, else 0)",
    )
    command.add_argument(
        "--protect-prompt", action="store_true", help="rows are documents, whose prompts are never evicted"
    )


def options_of(options) -> Options:
    """Return the options of a calibration as the command line gives them."""
    # before the imports below, which take seconds
    if options.rows is not None and options.rows < LEAST_ROWS:
        raise ConfigError(f"--rows {options.rows} is too few for an interval: give at least {LEAST_ROWS}")
    from kvpop_vllm.calibrate.plan import Options

    if not options.out and not options.scorer:
        raise ConfigError("kvpop calibrate needs a folder to write: give --out DIR")
    names = "length", "rows", "dtype", "scorer", "policy"
    chosen = {name: getattr(options, name) for name in names if getattr(options, name)}
    chosen |= {} if options.rounds is None else {"rounds": options.rounds}
    chosen |= {"unit": options.shares, "protect": options.protect_prompt}
    # descending, since the middle one is recommended
    chosen |= {"budgets": tuple(sorted(set(options.budget or ()), reverse=True))}
    chosen |= {} if options.policies is None else {"policies": tuple(options.policies)}
    chosen |= {"ranks": options.tensor_parallel_size, "stages": options.pipeline_parallel_size}
    out = options.out or f"{options.scorer}/calibration"
    return Options(model_folder(options.model), out, tuple(options.data), **chosen)


def run_calibrate(options) -> None:
    """Run `kvpop calibrate`."""
    settings = options_of(options)
    from kvpop_vllm.calibrate.run import calibrate, dry_run

    (dry_run if options.dry_run else calibrate)(settings)
