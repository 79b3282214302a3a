"""Compare policies on long reasoning: accuracy against cache size, trained policies and training-free ones.

    python examples/reasoner/compare.py runs --jobs 2

trains each policy that is trained, all on as many problems; finds the shares of heads of each policy, and the window of
each training-free one, on validation problems; solves test problems under all of them, with equal shares and with those
that were found; and writes runs/summary.md (all kinds together), runs/table.md (each kind) and runs/answers.csv, which
`kvpop bench plot` draws. Records that are there already are not made again, and a stopped training or calibration goes
on. Problems, records and calibrations of other problems, models, scorers or settings are refused.

With --train-shares 12 each scorer is trained a second time, from the start, with the shares that were found for the
first one at 12 times. With --calibrations EARLIER/calibrations the shares are those of an earlier comparison, and no
scorer is trained with equal ones first. --trainings 3 trains each scorer, as it was trained last, with two more seeds,
with the shares of the first. Every training is then measured, and solves problems with the shares that were found for
it. Intervals draw trainings and problems. How long all this takes is printed before each command, as soon as one of
each kind has been timed.

--test-size 45 and --samples 16 solve other problems with what is trained, or each several times at --temperature. Their
records and tables are named by it. --at 4 8 solves problems at these compressions alone. Its records are not those of
a call for all compressions, which refuses them. --tables writes the tables of the records that are there, and makes
nothing else.
"""

import argparse
from pathlib import Path

import contenders
from commands import Comparison, suffix_of
from tables import write_tables

from kvpop_vllm.argument_types import positive, temperature
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.problems import KINDS, make_problem

HERE = Path(__file__).parent


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="the reasoner (default: the shipped one)")
    parser.add_argument("--protect-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["programs", "ledgers"])
    parser.add_argument("--steps", type=positive, default=2900, help="problems that each policy is trained on")
    parser.add_argument("--rows", type=positive, default=64, help="test problems of each kind")
    parser.add_argument("--size", type=positive, help="steps of a problem (default: about 1,000 tokens)")
    parser.add_argument("--test-size", type=positive, help="steps of a test problem (default: --size)")
    parser.add_argument("--samples", type=positive, help="solutions of each test problem (default: 1)")
    parser.add_argument("--temperature", type=temperature, help="of sampling test solutions (default: 0, greedy)")
    parser.add_argument(
        "--at",
        type=int,
        nargs="+",
        choices=contenders.all_compressions(),
        help="compressions at which test problems are solved (default: all)",
    )
    parser.add_argument("--trainings", type=positive, default=1, help="seeds that each scorer is trained with")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the test problems, and of those that windows are chosen by (default: 0)"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="processes at once, one thread each")
    parser.add_argument(
        "--only", nargs="*", choices=contenders.TRAINED, default=contenders.TRAINED, help="trained policies"
    )
    parser.add_argument(
        "--train-shares",
        type=int,
        nargs="*",
        choices=contenders.calibrated_at("kvpop"),
        default=[],
        help="train once more with the shares found at that many times less (default: do not)",
    )
    parser.add_argument(
        "--calibrations",
        type=Path,
        metavar="DIR",
        help="calibrations of an earlier comparison, with whose shares --train-shares trains without an equal training before",
    )
    parser.add_argument(
        "--untrained", nargs="*", choices=contenders.FREE, default=contenders.FREE, help="training-free policies"
    )
    parser.add_argument(
        "--against", default="kvpop", help="policy of the tables that differences are from (default: kvpop)"
    )
    parser.add_argument("--tables", action="store_true", help="write the tables of the records that are there, no more")
    return parser


def main(words: list[str] | None = None) -> None:
    """Make what is not there yet."""
    parser = options_parser()
    options = parser.parse_args(words)
    if options.train_shares and not options.protect_prompt:
        parser.error("--train-shares needs protected prompts, with which shares are measured: leave one out")
    if (options.samples or 1) > 1 and not options.temperature:
        parser.error("--samples needs --temperature: greedy decoding gives equal solutions")
    try:
        for kind in options.kinds:
            make_problem(kind, 0, options.test_size)
    except ConfigError as error:
        parser.error(f"--test-size: {error}")
    if options.calibrations and not (options.train_shares and options.calibrations.is_dir()):
        parser.error(
            "--calibrations names a folder of shares for --train-shares: name one that is there, and give both"
        )
    test = {"size": options.test_size, "samples": options.samples, "temperature": options.temperature}
    test = {name: value for name, value in test.items() if value is not None}
    if options.tables:
        write_tables(options.folder, suffix_of(test), options.against)
        return
    problems = options.kinds, options.rows, options.jobs, options.size, options.seed, options.untrained
    comparison = Comparison(
        options.folder,
        options.model,
        options.protect_prompt,
        *problems,
        options.train_shares,
        options.trainings,
        test=test,
        earlier=options.calibrations,
        compressions=options.at and sorted(set(options.at)),
    )
    comparison.prepare_calibration()
    comparison.check_trained(options.only, options.steps)
    comparison.solve_dense()
    comparison.run_trained(options.only, options.steps)
    comparison.calibrate_untrained()
    comparison.run_untrained(comparison.choose_windows())
    write_tables(comparison.folder, comparison.suffix, options.against)


if __name__ == "__main__":
    main()
