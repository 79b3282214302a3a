"""`make gpu`: the Triton kernels on a machine with a GPU, torch, Triton and transformers; neither vLLM nor a network.

Sections run one after another, each case on its own: what it found is in the CSV file and in the log before the next one begins, and what
there is no time for is named in the log. Correctness comes first, in bfloat16 against float64, and a kernel that is wrong is not timed.

With ``--interpret`` the same code runs on a CPU at reduced shapes in float32, interpreted: its times say nothing, and are not written.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = "torch triton section case dtype measure value unit floor over_floor".split()


@dataclass
class Bench:
    """What sections need: where they run, how large they may be, and how long they have.

    Attributes:
        device, dtype: of tensors. small: reduced shapes, no times. watched: no times, few cases, for a tool that watches. ends: ``time.monotonic()`` when all must be over.
    """

    device: str
    dtype: object
    small: bool
    watched: bool
    ends: float
    say: Callable[[str], None]

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def row(self, case: str, measure: str, value: float, unit: str, floor: float | None = None) -> dict:
        """One line of the CSV file; ``floor``: the least that the value could be, in its unit."""
        over = "" if floor is None else f"{value / floor:.3f}"
        named = {"case": case, "dtype": str(self.dtype).removeprefix("torch."), "measure": measure, "unit": unit}
        return named | {"value": f"{value:.6g}", "floor": "" if floor is None else f"{floor:.6g}", "over_floor": over}


Section = Callable[[Bench], Iterator[tuple[str, Callable[[], Iterator[dict]]]]]
"""``section(bench)`` yields cases: a name, and what gives its rows; it raises AssertionError where something is wrong."""


SECTIONS = {
    "serving-kernels": "gpu_serving:serving_kernels",
    "training-kernels": "gpu_training:training_kernels",
}
"""Name -> module and section, in the order in which they run."""


def main(arguments: list[str] | None = None) -> int:
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
        failed = 0
        for section in options.sections or SECTIONS:
            module, _, name = SECTIONS[section].partition(":")
            for case, measure in getattr(importlib.import_module(module), name)(bench):
                failed += run_case(
                    bench, section, case, measure, lambda rows: record.append(out / "gpu.csv", rows), about | versions
                )
        say("all is well" if not failed else f"{failed} cases are wrong or broke off")
    return int(failed > 0)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="on the CPU, interpreted, at reduced shapes")
    parser.add_argument("--watched", action="store_true", help="only few right cases, under a sanitizer")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="only these")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no case begins later than so long after the start (default 8)"
    )
    parser.add_argument(
        "--out", default=str(RESULTS), help="folder of gpu.csv and gpu.log (default benchmarks/results)"
    )
    parser.add_argument("--commit", help="of rows, where there is no git")
    return parser.parse_args(arguments)


def within(bench: Bench, actual, exact, eager, name: str, factor: float = 2.0) -> Iterator[dict]:
    """The row of an output that is as good as it must be: its error over the eager one's; ``factor``: how many times that one it may be.

    Raises:
        AssertionError: it is not.
    """
    from kvpop_vllm.testing import assert_within_budget

    actual, exact, eager = (x.detach().cpu() for x in (actual, exact, eager))
    assert_within_budget(actual, exact, eager, factor, name)
    finite = exact.isfinite()
    error, low = (float((x.double() - exact)[finite].abs().max()) for x in (actual, eager))
    yield bench.row(name, "largest error", error / (low or 1.0), "of the eager one" if low else "absolute")


def take_kernels_from(root: Path) -> None:
    """Makes kvpop_vllm importable as it lies here, the folder triton_kernels as kvpop_vllm.kernels.triton, installed or not."""
    for path in (root, root / "benchmarks", root / "tests"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    name, folder = "kvpop_vllm.kernels.triton", root / "triton_kernels"
    import kvpop_vllm.kernels

    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = kvpop_vllm.kernels.triton = module
        spec.loader.exec_module(module)


def run_case(bench: Bench, section: str, case: str, measure, append, about: dict) -> bool:
    """Runs one case if there is time; whether it failed."""
    if bench.left() < 0:
        bench.say(f"{section}, {case}: not reached")
        return False
    begin, told = time.monotonic(), {"section": section} | about
    try:
        for row in measure():
            bench.say(f"{section}, {row['case']}: {row['measure']} {row['value']} {row['unit']}" + of_floor(row))
            append([{name: (row | told)[name] for name in ("machine", "commit", *COLUMNS)}])
    except Exception as error:  # noqa: BLE001  what one case does must not cost the others
        bench.say(f"{section}, {case}: WRONG {type(error).__name__}: {error}")
        bench.say(traceback.format_exc())
        return True
    bench.say(f"{section}, {case}: done in {time.monotonic() - begin:.1f} s")
    return False


def of_floor(row: dict) -> str:
    return f", {row['over_floor']} of its floor {row['floor']}" if row["floor"] else ""


if __name__ == "__main__":
    sys.exit(main())
