"""`make gpu`: the Triton kernels on a GPU.

The machine needs torch, Triton and transformers, neither vLLM nor a network.

Sections run one after another, each case on its own: its results are in the CSV file and in the log before
the next case begins. Cases that there is no time for are named in the log. Correctness comes first, in
bfloat16 against float64. A case of times is skipped if a check that it depends on has failed.

No case begins after ``--minutes``, and a sanitizer is ended then. The default of 7.5 keeps a run within 8
minutes if no case takes more than half a minute.

With ``--interpret`` the same code runs on a CPU at reduced shapes in float32 with Triton's interpreter.
Nothing is timed then, and no CUDA graph is made.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = "torch triton section case dtype measure value unit floor over_floor".split()


@dataclass
class Bench:
    """Environment of the sections: device, sizes and time.

    Attributes:
        device: device of tensors.
        dtype: dtype of tensors.
        small: True for reduced shapes without times.
        watched: True for few cases without times, under a sanitizer.
        ends: ``time.monotonic()`` at which everything must be over.
        say: writes a line to the log.
        until: ``time.monotonic()`` at which the section must be over.
    """

    device: str
    dtype: object
    small: bool
    watched: bool
    ends: float
    say: Callable[[str], None]
    wrong: set[str] = field(default_factory=set)
    """Names of the cases that failed."""
    until: float = math.inf

    def left(self) -> float:
        """Return the seconds that are left."""
        return min(self.ends, self.until) - time.monotonic()

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


Section = Callable[[Bench], Iterator[tuple[str, Callable[[], Iterator[dict]]]]]
"""Section: ``section(bench)`` yields cases, each a name and a function that yields its rows.

The function raises AssertionError if something is wrong.
"""


SECTIONS = {
    "serving-kernels": "gpu_serving:serving_kernels",
    "prefill-kernels": "gpu_prefill:prefill_kernels",
    "training-kernels": "gpu_training:training_kernels",
    "generation": "gpu_generation:generation",
    "distillation": "gpu_distillation:distillation",
    "sanitizers": "gpu_serving:sanitizers",
}
"""Name -> module and function, in the order in which sections run."""
SHARES = {
    "serving-kernels": 1.75,
    "prefill-kernels": 1.25,
    "training-kernels": 1.0,
    "generation": 2.0,
    "distillation": 0.75,
    "sanitizers": math.inf,
}
"""Eighths of the time, if all sections run.

No case of a section begins after the section's own share and those before it. Time that is left goes to later
sections.
"""


class Skipped(Exception):
    """Raised by a case that cannot run here, which is no failure; the message is for the log."""


def main(arguments: list[str] | None = None) -> int:
    """Run the sections of the command line and return the exit code."""
    options = parse_arguments(arguments)
    import torch

    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("there is no GPU here: give --interpret for reduced shapes on the CPU")
    take_kernels_from(ROOT)
    import record
    import triton

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gpu.log").open("a") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()

        name = "interpreter" if options.interpret else torch.cuda.get_device_name()
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        about = {"machine": name, "commit": options.commit or record.KEY["commit"]}
        say(f"# {record.KEY['date']} {about | versions}")
        bench = Bench(
            "cpu" if options.interpret else "cuda",
            torch.float32 if options.interpret else torch.bfloat16,
            options.interpret,
            options.watched,
            time.monotonic() + 60 * options.minutes,
            say,
        )
        with tests_of(ROOT):
            if options.interpret:
                quicken(say)
            sections = {section: imported(bench, section) for section in options.sections or SECTIONS}
        shares = {} if options.sections else {name: 60 * options.minutes * share / 8 for name, share in SHARES.items()}
        return run_sections(bench, sections, shares, out / "gpu.csv", about | versions)


def quicken(say: Callable[[str], None]) -> None:
    """Use the faster interpreter of the tests, or Triton's own if Triton's names have changed."""
    try:
        importlib.import_module("kernels.quicker_interpreter").quicken()
    except (AttributeError, ImportError) as error:
        say(f"Triton's interpreter stays as slow as it is: {error}")


def run_sections(
    bench: Bench, sections: dict[str, Section | None], shares: dict[str, float], results: Path, about: dict
) -> int:
    """Run all cases; return 0 if some were done and none failed, else 1.

    Args:
        bench: see :class:`Bench`.
        sections: name -> section, None for one that could not be imported.
        shares: seconds of each section; a section without an entry has all that are left.
        results: the CSV file.
        about: columns of all rows.
    """
    outcomes = dict.fromkeys(("done", "wrong", "skipped", "not reached"), 0)
    until = time.monotonic()
    for section, cases in sections.items():
        until += shares.get(section, math.inf)
        bench.until = until
        for case, measure in guarded(bench, section, cases):
            outcome = "wrong" if measure is None else run_case(bench, section, case, measure, results, about)
            outcomes[outcome] += 1
            if outcome == "wrong" and not usable(bench):
                bench.say("the GPU answers no more in this process: what is left was not tried")
                return 1
    bench.say(", ".join(f"{count} cases {outcome}" for outcome, count in outcomes.items()))
    return int(outcomes["wrong"] > 0 or outcomes["done"] == 0)


def guarded(bench: Bench, name: str, section: Section | None) -> Iterator[tuple[str, Callable | None]]:
    """Yield a section's cases; yield a case of None if an error occurs between cases.

    The other sections then still run.
    """
    try:
        if section is not None:
            yield from section(bench)
    except Exception as error:  # noqa: BLE001  another shape of a config, say
        bench.say(f"{name}: WRONG between its cases, what is left of it was not tried: {type(error).__name__}: {error}")
        bench.say(traceback.format_exc())
        section = None
    if section is None:
        yield "", None


def imported(bench: Bench, name: str) -> Section | None:
    """Return a section, or None if it cannot be imported; the other sections then still run."""
    module, _, function = SECTIONS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001  another transformers, say
        bench.say(f"{name}: WRONG it cannot be imported: {type(error).__name__}: {error}")
        bench.say(traceback.format_exc())
        return None


def usable(bench: Bench) -> bool:
    """Return whether kernels can run after a failure; an illegal access ends a process's use of the GPU."""
    import torch

    try:
        torch.zeros(1, device=bench.device).item()
    except RuntimeError:
        return False
    return True


def parse_arguments(arguments):
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="on the CPU, interpreted, at reduced shapes")
    parser.add_argument("--watched", action="store_true", help="only few right cases, under a sanitizer")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="only these")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="no case begins later than so long after the start (default 7.5)"
    )
    parser.add_argument(
        "--out", default=str(RESULTS), help="folder of gpu.csv and gpu.log (default benchmarks/results)"
    )
    parser.add_argument("--commit", help="of rows, where there is no git")
    return parser.parse_args(arguments)


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
        implementation: name of the implementation; None for the usual choice.

    Yields:
        A set that receives the ops that were called, each with the implementation selected.
    """
    from kvpop_vllm.kernels import dispatch

    chosen, told = dispatch.select, set()

    def select(op, tensor):
        own = implementation if op in dispatch.TRITON_DTYPES else "reference"
        found = chosen(op, tensor) if implementation is None else own
        told.add((op, found))
        return found

    dispatch.select = select
    try:
        yield told
    finally:
        dispatch.select = chosen


def take_kernels_from(root: Path) -> None:
    """Import kvpop_vllm from a checkout, with triton_kernels as kvpop_vllm.kernels.triton.

    An installed package is ignored.
    """
    sys.path[:0] = [str(path) for path in (root, root / "benchmarks") if str(path) not in sys.path]
    name, folder = "kvpop_vllm.kernels.triton", root / "triton_kernels"
    import kvpop_vllm.kernels

    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = kvpop_vllm.kernels.triton = module
    spec.loader.exec_module(module)


@contextmanager
def tests_of(root: Path) -> Iterator[None]:
    """Make the package ``kernels`` that of the tests for imports within the context."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "kernels"}
    spec = importlib.machinery.ModuleSpec("kernels", None, is_package=True)
    spec.submodule_search_locations = [str(root / "tests" / "kernels")]
    sys.modules["kernels"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            del sys.modules[name]
        sys.modules.update(others)


def run_case(bench: Bench, section: str, case: str, measure, results: Path, about: dict) -> str:
    """Run one case if there is time; return "done", "wrong", "skipped" or "not reached".

    Raises:
        ValueError: the results have other columns.
    """
    import record

    if bench.left() < 0:
        bench.say(f"{section}, {case}: not reached")
        return "not reached"
    begin, told = time.monotonic(), {"section": section, "case": case} | about
    rows = measure()
    while True:
        try:
            row = next(rows, None)
        except Skipped as why:
            bench.say(f"{section}, {case}: skipped, {why}")
            return "skipped"
        except Exception as error:  # noqa: BLE001  what one case does must not cost the others
            bench.say(f"{section}, {case}: WRONG {type(error).__name__}: {error}")
            bench.say(traceback.format_exc())
            bench.wrong.add(case)
            return "wrong"
        if row is None:
            break
        bench.say(f"{section}, {case}: {row['measure']} {row['value']} {row['unit']}" + of_floor(row))
        record.append(results, [{name: (row | told)[name] for name in ("machine", "commit", *COLUMNS)}])
    bench.say(f"{section}, {case}: done in {time.monotonic() - begin:.1f} s")
    return "done"


def of_floor(row: dict) -> str:
    """Return the part of a log line about the floor, or nothing."""
    return f", {row['over_floor']} of its floor {row['floor']}" if row["floor"] else ""


if __name__ == "__main__":
    sys.exit(main())
