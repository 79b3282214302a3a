"""Compare policies on long reasoning: accuracy against cache size, trained policies and training-free ones.

    python examples/reasoner/compare.py runs --jobs 2

trains the reasoner (train.py) and each policy that is trained, all on as many problems; chooses the window of each
training-free policy on validation problems; solves test problems under all of them; and writes runs/table.md and
runs/figure.png. What is there already is not made again, and a stopped training goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from kvpop_vllm.evaluation.output import markdown_table, read_records
from kvpop_vllm.evaluation.pictures import draw_reasoning
from kvpop_vllm.evaluation.summaries import REASONING_COLUMNS, summarise_reasoning

HERE = Path(__file__).parent
FREE = "streaming-llm", "random", "h2o", "tova", "momentkv", "l2norm", "rkv", "vase"
"""Policies that need no training."""
WINDOWS = 32, 48, 64, 96
COMPRESSIONS = 2, 3, 4, 5, 6, 8
CHOSEN_AT = 6
"""Compression at which windows are chosen."""

COMMON = "--no-pack --protect-prompt --length 1600 --batch 1 --dtype float32 --no-activation-checkpointing"
BUDGETS = "--window 48 --topk 220 84 130 168"
"""Budgets of 1/4, 1/8, 1/6 and 1/5 of a worked solution, which problems take in turn."""
LISTWISE = "--boundary 0 --listwise 1 --groups mean --decay-min 0.99 --decay-max 0.9999 --lr-new 1e-2 --lr-new-end 1e-3"
BASE = "--train-base --lr-base 5e-4 --lr-base-end 2e-5 --kl-top 64"
GATES = "--lr-new 2e-3 --lr-new-end 2e-4 --kl-top 64"
TRAINED = {
    "kvpop": f"{BUDGETS} {LISTWISE} {BASE} --skip",
    "kvpop-frozen-base": f"{BUDGETS} {LISTWISE} --no-train-base --skip",
    "kvpop-boundary-loss": f"{BUDGETS} {BASE} --skip --decay-min 0.99 --decay-max 0.9999 --lr-new 1e-2 --lr-new-end 1e-3",
    "kvpop-immediate": f"{BUDGETS} {LISTWISE} {BASE} --skip --no-delayed",
    "kvpop-mlp": f"{BUDGETS} {LISTWISE} {BASE} --scorer mlp",
    "kvpop-linear": f"{BUDGETS} {LISTWISE} {BASE} --scorer linear",
    "streaming-plus": f"{BUDGETS} {BASE} --phase streaming-plus",
    "trimkv": f"--recipe trimkv --topk 180 --gate-width 64 {GATES}",
    "dms": f"--recipe dms --window 48 --topk 130 --compression 6 {GATES}",
}
"""Options of `kvpop distill` for each trained policy; streaming-plus is streaming-llm on a base trained for it."""


class Comparison:
    """Folder of a comparison.

    Args:
        folder: holds the reasoner, the trained policies and the records.
        kinds: kinds of problems.
        rows: test problems of each kind.
        jobs: processes at once, one thread each.
        size: steps of a problem; None for the kinds' own.
    """

    def __init__(self, folder: Path, kinds: list[str], rows: int, jobs: int, size: int | None = None):
        self.folder, self.rows, self.jobs = folder, rows, jobs
        self.kinds, self.size = kinds, ["--size", size] if size else []
        self.model, self.problems, self.records = folder / "reasoner", folder / "problems.jsonl", folder / "records"
        self.records.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Train the reasoner, and write problems to train policies on."""
        if not (self.model / "config.json").exists():
            _run(["python", HERE / "train.py", self.model, "--kinds", *self.kinds, "--threads", "1"])
        if not self.problems.exists():
            _run(["python", HERE / "write_problems.py", self.problems, "--kinds", *self.kinds, *self.size])

    def train(self, names: Iterable[str], steps: int) -> None:
        """Train policies on ``steps`` problems each."""
        common = ["--model", self.model, "--data", self.problems, *COMMON.split(), "--threads", 1]
        self._all(
            ["kvpop", "distill", *common, *TRAINED[name].split(), "--steps", steps, "--out", self.folder / name]
            for name in names
            if not self._is_trained(name)
        )

    def choose_windows(self, names: Iterable[str]) -> dict[str, int]:
        """Return the window of each training-free policy with which validation problems go well longest."""
        tries = {(name, w): self.records / f"{name}-window-{w}.jsonl" for name in names for w in WINDOWS}
        what = ["--split", "validation", "--rows", 16, "--share", CHOSEN_AT]
        self._all(
            self._eval(out, "--model", self.model, "--policies", name, "--window", w, *what)
            for (name, w), out in tries.items()
            if not out.exists()
        )
        good = {
            each: fmean(record["before_error"] for record in read_records(out)[1] if "budget" in record)
            for each, out in tries.items()
        }
        return {name: max(WINDOWS, key=lambda w: good[name, w]) for name in names}

    def evaluate(self, trained: Iterable[str], windows: dict[str, int]) -> None:
        """Solve the test problems under all policies."""
        what = ["--rows", self.rows, "--share", *COMPRESSIONS]
        asked = {name: ["--model", self.model, "--policies", name, "--window", w] for name, w in windows.items()}
        asked |= {name: self._contender(name) for name in trained}
        self._all(
            self._eval(self.records / f"{name}.jsonl", *words, *what)
            for name, words in asked.items()
            if not (self.records / f"{name}.jsonl").exists()
        )

    def report(self) -> None:
        """Write the table and the figure of all records."""
        records, dense = [], set()
        for name in (*FREE, *TRAINED):
            if (path := self.records / f"{name}.jsonl").exists():
                for record in read_records(path)[1]:
                    of = record["policy"]
                    if "budget" not in record:  # dense models are run again for each policy
                        unit = (name if "own" in of else of, record["kind"], record["unit"])
                        if unit in dense:
                            continue
                        dense.add(unit)
                    name_of = {"dense": "dense", "dense (own)": f"{name}, nothing evicted"}
                    records.append(record | {"policy": name_of.get(of, name)})
        table = summarise_reasoning(records, "h2o")
        (self.folder / "table.md").write_text(markdown_table(table, REASONING_COLUMNS))
        drawing = Figure(layout="constrained")
        draw_reasoning(drawing, table)
        drawing.savefig(self.folder / "figure.png", dpi=120)
        print(f"{self.folder} holds table.md, figure.png")

    def _is_trained(self, name: str) -> bool:
        return any((self.folder / name / result).exists() for result in ("kvpop_config.json", "model/config.json"))

    def _contender(self, name: str) -> list:
        out, words = self.folder / name, []
        if "--phase streaming-plus" in TRAINED[name]:
            words = ["--policies", "streaming-llm", "--window", 48]
        else:
            words = ["--policies", "--scorer", out]
        based = (out / "model").exists()
        return [
            "--model",
            out / "model" if based else self.model,
            *(["--teacher", self.model] if based else []),
            *words,
        ]

    def _eval(self, out: Path, *words) -> list:
        fixed = "--task reasoning --protect-prompt all --dtype float32 --requests 64 --threads 1".split()
        return ["kvpop", "eval", *fixed, "--kinds", *self.kinds, *self.size, *words, "--out", out]

    def _all(self, commands: Iterable[list]) -> None:
        """Run commands, ``jobs`` at once."""
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(_run, list(commands)))


def _run(command: list) -> None:
    """Run a program of this environment; print the command first.

    Raises:
        SystemExit: it failed.
    """
    program, *words = map(str, command)
    print(program, *words, flush=True)
    done = subprocess.run([Path(sys.executable).with_name(program), *words])
    if done.returncode:
        sys.exit(f"{program} {words[0]} failed: see above")


def main(given: list[str] | None = None) -> None:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["programs", "ledgers"])
    parser.add_argument("--steps", type=int, default=3000, help="problems that each policy is trained on")
    parser.add_argument("--rows", type=int, default=64, help="test problems of each kind")
    parser.add_argument("--size", type=int, help="steps of a problem (default: about 1,000 tokens)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, one thread each")
    parser.add_argument("--only", nargs="+", choices=[*FREE, *TRAINED], default=[*FREE, *TRAINED], metavar="POLICY")
    options = parser.parse_args(given)
    comparison = Comparison(options.folder, options.kinds, options.rows, options.jobs, options.size)
    trained = [name for name in TRAINED if name in options.only]
    comparison.prepare()
    comparison.train(trained, options.steps)
    comparison.evaluate(trained, comparison.choose_windows([name for name in FREE if name in options.only]))
    comparison.report()


if __name__ == "__main__":
    main()
