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
from typing import NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HEADS, KV_HEADS, SIZE = 32, 8, 128
"""Attention shape of Qwen3-8B."""
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

    @property
    def few(self) -> bool:
        """Whether few cases run, and none of times."""
        return self.small or self.watched

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


class Case(NamedTuple):
    """Case of a section, which is a function that yields cases, ``section(bench)``.

    Attributes:
        name: name of the case.
        run: ``run(bench)`` yields rows and raises AssertionError if something is wrong.
        needs: names of the cases that must be right, for a case of times.
    """

    name: str
    run: Callable[[Bench], Iterator[dict]]
    needs: tuple[str, ...] = ()


Section = Callable[[Bench], Iterator[Case]]
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
            sections = {name: imported(name) for name in options.sections or SECTIONS}
            share = 0 if options.sections else 60 * options.minutes / 8
            shares = {name: share * eighths for name, eighths in SHARES.items() if share}
            return run_sections(bench, sections, shares, out / "gpu.csv", about | versions)


def run_sections(
    bench: Bench, sections: dict[str, Section], shares: dict[str, float], results: Path, about: dict
) -> int:
    """Run all cases; return 0 if some were done and none failed, else 1.

    Args:
        bench: see :class:`Bench`.
        sections: name -> section.
        shares: seconds of each section; a section without an entry has all that are left.
        results: the CSV file.
        about: columns of all rows.
    """
    outcomes = dict.fromkeys(("done", "wrong", "skipped", "not reached"), 0)
    until = time.monotonic()
    for section, cases in sections.items():
        until += shares.get(section, math.inf)
        bench.until = until
        for case in guarded(bench, section, cases):
            if case is not None and case.needs and bench.few:
                continue
            outcome = "wrong" if case is None else run_case(bench, section, case, results, about)
            outcomes[outcome] += 1
            if outcome == "wrong" and not usable(bench):
                bench.say("the GPU answers no more in this process: what is left was not tried")
                return 1
    bench.say(", ".join(f"{count} cases {outcome}" for outcome, count in outcomes.items()))
    return int(outcomes["wrong"] > 0 or outcomes["done"] == 0)


def guarded(bench: Bench, name: str, section: Section) -> Iterator[Case | None]:
    """Yield a section's cases; yield None if an error occurs between cases, or before the first.

    The other sections then still run.
    """
    try:
        yield from section(bench)
    except Exception as error:  # noqa: BLE001  another transformers or another shape of a config, say
        bench.say(f"{name}: WRONG between its cases, what is left of it was not tried: {type(error).__name__}: {error}")
        bench.say(traceback.format_exc())
        yield None


def imported(name: str) -> Section:
    """Return a section, which is imported when its first case is asked for."""

    def section(bench: Bench) -> Iterator[Case]:
        module, _, function = SECTIONS[name].partition(":")
        yield from getattr(importlib.import_module(module), function)(bench)

    return section


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

    usual, calls = dispatch.select, set()

    def select(op, tensor):
        forced = implementation if op in dispatch.TRITON_DTYPES else "reference"
        selected = usual(op, tensor) if implementation is None else forced
        calls.add((op, selected))
        return selected

    with patch.object(dispatch, "select", select):
        yield calls


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


def run_case(bench: Bench, section: str, case: Case, results: Path, about: dict) -> str:
    """Run one case if there is time; return "done", "wrong", "skipped" or "not reached".

    Raises:
        ValueError: the results have other columns.
    """
    import record

    name = f"{section}, {case.name}"
    if wrong := sorted(bench.wrong.intersection(case.needs)):
        bench.say(f"{name}: not timed, as it is wrong that {wrong[0]}")
        return "skipped"
    if bench.left() < 0:
        bench.say(f"{name}: not reached")
        return "not reached"
    begin, about = time.monotonic(), {"section": section, "case": case.name} | about
    rows = case.run(bench)
    while True:
        try:
            row = next(rows, None)
        except Skipped as why:
            bench.say(f"{name}: skipped, {why}")
            return "skipped"
        except Exception as error:  # noqa: BLE001  what one case does must not cost the others
            bench.say(f"{name}: WRONG {type(error).__name__}: {error}")
            bench.say(traceback.format_exc())
            bench.wrong.add(case.name)
            return "wrong"
        if row is None:
            break
        floor = f", {row['over_floor']} of its floor {row['floor']}" if row["floor"] else ""
        bench.say(f"{name}: {row['measure']} {row['value']} {row['unit']}{floor}")
        record.append(results, [{column: (row | about)[column] for column in ("machine", "commit", *COLUMNS)}])
    bench.say(f"{name}: done in {time.monotonic() - begin:.1f} s")
    return "done"


if __name__ == "__main__":
    sys.exit(main())
