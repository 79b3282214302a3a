"""`python -m gpu.sections`: the Triton kernels on a GPU.

The machine needs torch, Triton and transformers, neither vLLM nor a network.

Its sections run one after another, the most valuable first, each case on its own: its results are in the CSV file and
in the log before the next case begins. Cases that there is no time for are named in the log. A run takes up where one
of the same commit, machine and versions was stopped. Correctness comes first, in bfloat16 against float64. A case of
times whose checks have failed is timed all the same, and its rows say so.

No case of a section begins after its share of ``--minutes`` and those of the sections before it, and a sanitizer is
ended then. :data:`gpu.run.SECTIONS` lists the sections, each of which is also a part of `make gpu` that runs by name.

With ``--interpret`` the same code runs on a CPU at reduced shapes in float32 with Triton's interpreter.
Nothing is timed then, and no CUDA graph is made.
"""

import csv
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import SkipTest
from unittest.mock import patch

import record
from record import RESULTS, ROOT

from gpu.run import SECTIONS

HEADS, KV_HEADS, SIZE = 32, 8, 128
"""Attention shape of Qwen3-8B."""
COLUMNS = "machine commit torch triton section case verified dtype measure value unit floor over_floor".split()
TIME = "time of the case"
"""Measure of the row that says that a case is done."""


@dataclass
class Bench:
    """Environment of the sections: device, sizes, time and outcomes.

    Attributes:
        device: device of tensors.
        dtype: dtype of tensors.
        small: True for reduced shapes without times.
        few: True for few cases without times, which reduced shapes are as well.
        until: ``time.monotonic()`` at which the section must be over.
        say: writes a line to the log.
        wrong: names of the cases that failed, each after its section's.
        doubts: what was found wrong in the present case of times.
        outcomes: number of cases that were done, done before, wrong, skipped and not reached.
    """

    device: str
    dtype: object
    small: bool
    few: bool
    until: float
    say: Callable[[str], None]
    wrong: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    outcomes: Counter = field(default_factory=Counter)

    def check(self, right: bool, otherwise: str) -> None:
        """Note what is wrong with a case of times, whose later rows are then unverified."""
        if not right:
            self.doubts.append(otherwise)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def row(self, measure: str, value: float, unit: str, floor: float | None = None) -> dict:
        """Return one line of the CSV file.

        Args:
            measure: name of the value.
            value: the value.
            unit: its unit.
            floor: value to compare with, in the same unit, or None.
        """
        over = "" if floor is None else f"{value / floor:.3f}"
        named = {"dtype": str(self.dtype).removeprefix("torch."), "measure": measure, "unit": unit}
        return named | {"value": f"{value:.6g}", "floor": "" if floor is None else f"{floor:.6g}", "over_floor": over}


class Case(NamedTuple):
    """Case of a section, whose module's function ``cases(bench)`` yields them.

    Attributes:
        name: name of the case.
        run: ``run(bench)`` yields rows. It raises AssertionError if something is wrong, and SkipTest if the
            case cannot run here, which is no failure.
        needs: names of the cases that must be right, for a case of times.
    """

    name: str
    run: Callable[[Bench], Iterator[dict]]
    needs: tuple[str, ...] = ()


def main(arguments: list[str] | None = None) -> int:
    """Run the sections of the command line and return the exit code."""
    options = parse_arguments(arguments)
    import torch

    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("there is no GPU here: give --interpret for reduced shapes on the CPU")
    take_packages_from(ROOT)
    import triton

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gpu.log").open("a") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        name = "interpreter" if options.interpret else torch.cuda.get_device_name()
        about = {"machine": name, "commit": options.commit or record.KEY["commit"]}
        about |= {"torch": torch.__version__, "triton": triton.__version__}
        say(f"# {record.KEY['date']} {about}")
        kind = ("cpu", torch.float32) if options.interpret else ("cuda", torch.bfloat16)
        few = options.interpret or options.watched
        shares = {section: float(SECTIONS[section]) for section in options.sections or SECTIONS}
        if options.minutes:
            scale = 60 * options.minutes / sum(shares.values())
            shares = {section: scale * share for section, share in shares.items()}
        bench = Bench(*kind, options.interpret, few, time.monotonic() + sum(shares.values()), say)
        return run_sections(bench, shares, out / "gpu.csv", about, options.cases)


def parse_arguments(arguments):
    """Return the options of the command line."""
    parser = record.parser_of(__doc__)
    parser.add_argument(
        "sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=f"only these of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--interpret", action="store_true", help="on the CPU, interpreted, at reduced shapes")
    parser.add_argument("--watched", action="store_true", help="only few right cases, under a sanitizer")
    parser.add_argument("--cases", nargs="+", help="only the cases of these names")
    parser.add_argument("--minutes", type=float, help="of all, after which no case begins (default: their limits)")
    parser.add_argument("--out", default=str(RESULTS), help="folder of gpu.csv and gpu.log")
    parser.add_argument("--commit", help="of rows, where there is no git")
    return parser.parse_args(arguments)


def take_packages_from(root: Path) -> None:
    """Import kvpop_vllm from a checkout, triton_kernels as kvpop_vllm.kernels.triton, and ``kernels`` of the tests.

    Installed packages of these names are ignored.
    """
    sys.path[:0] = [str(path) for path in (root, root / "benchmarks") if str(path) not in sys.path]
    import kvpop_vllm.kernels

    folders = {"kvpop_vllm.kernels.triton": root / "triton_kernels", "kernels": root / "tests" / "kernels"}
    for name, folder in folders.items():
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    kvpop_vllm.kernels.triton = sys.modules["kvpop_vllm.kernels.triton"]


def run_sections(
    bench: Bench, shares: dict[str, float], results: Path, about: dict, only: list[str] | None = None
) -> int:
    """Run all cases; return 0 if some were done and none failed, else 1.

    Args:
        bench: see :class:`Bench`; its time is that of all sections.
        shares: section -> its seconds.
        results: the CSV file.
        about: columns of all rows.
        only: names of cases, None for all.
    """
    ends, until, before = bench.until, time.monotonic(), finished(results, about)
    for section, share in shares.items():
        until += share
        bench.until = min(ends, until)
        with guarded(bench, section):
            module = importlib.import_module(f"gpu.{section.removesuffix('-kernels')}")
            for case in module.cases(bench):
                if only and case.name not in only:
                    continue
                if (section, case.name) in before:
                    bench.outcomes["done before"] += 1
                elif not (case.needs and bench.few):
                    run_case(bench, section, case, results, about)
    counts = {
        outcome: bench.outcomes[outcome] for outcome in ("done", "done before", "wrong", "skipped", "not reached")
    }
    bench.say(", ".join(f"{count} cases {outcome}" for outcome, count in counts.items()))
    return int(counts["wrong"] > 0 or counts["done"] + counts["done before"] == 0)


def finished(results: Path, about: dict) -> set[tuple[str, str]]:
    """Return the section and name of the cases that a run of the same commit, machine and versions has finished well.

    These are none where the commit does not say what is run.
    """
    if not results.exists() or about["commit"] == "none" or about["commit"].endswith("+"):
        return set()
    with results.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if about.items() <= row.items() and row["measure"] == TIME]
    return {(row["section"], row["case"]) for row in rows if row["verified"] == "yes"}


def run_case(bench: Bench, section: str, case: Case, results: Path, about: dict) -> None:
    """Run one case if there is time; write its rows as they come, unverified where something that it needs is wrong."""
    name, begin = f"{section}, {case.name}", time.monotonic()
    if bench.left() < 0:
        bench.say(f"{name}: not reached")
        bench.outcomes["not reached"] += 1
        return
    bench.doubts = [f"{need} is not right" for need in case.needs if f"{section}, {need}" in bench.wrong]

    def write(row: dict) -> None:
        row = row | about | {"section": section, "case": case.name, "verified": "no" if bench.doubts else "yes"}
        record.append(results, [{column: row[column] for column in COLUMNS}])

    with guarded(bench, name):
        for row in case.run(bench):
            floor = f", {row['over_floor']} of its floor {row['floor']}" if row["floor"] else ""
            unverified = " (unverified)" if bench.doubts else ""
            bench.say(f"{name}: {row['measure']} {row['value']} {row['unit']}{floor}{unverified}")
            write(row)
        write(bench.row(TIME, time.monotonic() - begin, "s"))
        bench.say(
            f"{name}: {f'unverified, {bench.doubts[0]}' if bench.doubts else 'done'}, {time.monotonic() - begin:.1f} s"
        )
        bench.outcomes["wrong" if bench.doubts else "done"] += 1


@contextmanager
def guarded(bench: Bench, name: str) -> Iterator[None]:
    """Log and count an error within the context, so that it costs nothing else.

    Raises:
        SystemExit: the GPU cannot be used any more in this process, as after an illegal access.
    """
    try:
        yield
    except SkipTest as why:
        bench.say(f"{name}: skipped, {why}")
        bench.outcomes["skipped"] += 1
    except Exception as error:  # noqa: BLE001  another transformers or another shape of a config, say
        import torch

        bench.say(f"{name}: WRONG {type(error).__name__}: {error}")
        bench.say(traceback.format_exc())
        bench.wrong.add(name)
        bench.outcomes["wrong"] += 1
        try:
            torch.zeros(1, device=bench.device).item()
        except RuntimeError:
            bench.say("the GPU answers no more in this process: what is left was not tried")
            sys.exit(1)


def within(bench: Bench, actual, exact, eager, name: str, factor: float = 2.0) -> Iterator[dict]:
    """Check an output against the error of the eager output and yield its row.

    Args:
        bench: see :class:`Bench`.
        actual: the output.
        exact: the float64 output.
        eager: output of a plain implementation in the same precision.
        name: name of the output.
        factor: maximum ratio of the output's error to the eager one's.

    Raises:
        AssertionError: the error is larger.
    """
    from kvpop_vllm.testing import assert_within_budget

    actual, exact, eager = (x.detach().cpu() for x in (actual, exact, eager))
    assert_within_budget(actual, exact, eager, factor, name)
    finite = exact.isfinite()
    error, low = (float((x.double() - exact)[finite].abs().max()) for x in (actual, eager))
    yield bench.row(f"{name}, largest error", error / (low or 1.0), "of the eager one" if low else "absolute")


@contextmanager
def ops_take(implementation: str | None) -> Iterator[set[tuple[str, str]]]:
    """Make ops select an implementation on every device; other ops run the reference.

    Args:
        implementation: name of the implementation, None for the usual choice.

    Yields:
        A set that receives the ops that were called, each with the implementation selected.
    """
    from kvpop_vllm.kernels import dispatch

    usual, calls = dispatch.select, set()

    def select(op, tensor):
        forced = implementation if op in dispatch.TRITON_DTYPES else "reference"
        selected = usual(op, tensor) if implementation is None else forced
        calls.add((op, selected))
        return selected

    with patch.object(dispatch, "select", select):
        yield calls


if __name__ == "__main__":
    sys.exit(main())
