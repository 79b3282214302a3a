"""Compare policies on long reasoning: accuracy against cache size, trained policies and training-free ones.

    python examples/reasoner/compare.py runs --jobs 2

trains each policy that is trained, all on as many problems; chooses the window of each training-free policy on
validation problems; solves test problems under all of them; and writes runs/table.md and runs/figure.png. What is
there already is not made again, and a stopped training goes on.
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
COMPRESSING = ("snapkv",)
"""Policies that need no training and cannot protect prompts."""
WINDOWS = 32, 48, 64, 96
COMPRESSIONS = {4: (2, 3, 4), 8: (5, 6, 8)}
"""Compressions: those at which windows are chosen, each with those at which they are used."""

COMMON = "--no-pack --length 1600 --batch 1 --dtype float32 --no-activation-checkpointing"
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
        folder: holds the trained policies and the records.
        model: folder of the reasoner, for example one that train.py has written.
        protect: True if prompts are never evicted.
        kinds: kinds of problems.
        rows: test problems of each kind.
        jobs: processes at once, one thread each.
        size: steps of a problem; None for the kinds' own.
    """

    def __init__(
        self, folder: Path, model: Path, protect: bool, kinds: list[str], rows: int, jobs: int, size: int | None = None
    ):
        self.folder, self.model, self.protect, self.rows, self.jobs = folder, model, protect, rows, jobs
        self.kinds, self.size = kinds, ["--size", size] if size else []
        self.problems, self.records = folder / "problems.jsonl", folder / "records"
        self.records.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Write problems to train policies on."""
        if not self.problems.exists():
            _run(["python", HERE / "write_problems.py", self.problems, "--kinds", *self.kinds, *self.size])

    def train(self, names: Iterable[str], steps: int) -> None:
        """Train policies on ``steps`` problems each."""
        common = ["--model", self.model, "--data", self.problems, *COMMON.split(), "--threads", 1]
        common += ["--protect-prompt"] * self.protect
        self._all(
            ["kvpop", "distill", *common, *TRAINED[name].split(), "--steps", steps, "--out", self.folder / name]
            for name in names
            if not self._is_trained(name)
        )

    def choose_windows(self, names: Iterable[str]) -> dict[tuple[str, int], int]:
        """Return the window of each training-free policy and compression with which validation problems go well longest."""
        tries = {(name, w): self.records / f"{name}-window-{w}.jsonl" for name in names for w in WINDOWS}
        what = ["--split", "validation", "--rows", 16, "--equal", "k", "--share", *COMPRESSIONS]
        self._all(
            self._eval(out, "--model", self.model, "--policies", name, "--window", w, *what)
            for (name, w), out in tries.items()
            if not out.exists()
        )
        good = {each: self._before_error(out) for each, out in tries.items()}
        return {(name, c): max(WINDOWS, key=lambda w: good[name, w][c]) for name in names for c in COMPRESSIONS}

    def evaluate(self, trained: Iterable[str], windows: dict[tuple[str, int], int]) -> None:
        """Solve the test problems under all policies."""
        asked = {
            f"{name}-at-{c}": ["--model", self.model, "--policies", name, "--window", w, "--share", *COMPRESSIONS[c]]
            for (name, c), w in windows.items()
        }
        asked |= {name: [*self._contender(name), "--share", *sum(COMPRESSIONS.values(), ())] for name in trained}
        outs = {name: self.records / f"{name}.jsonl" for name in asked}
        self._all(
            self._eval(outs[name], *words, "--rows", self.rows)
            for name, words in asked.items()
            if not outs[name].exists()
        )

    def _before_error(self, records: Path) -> dict[int, float]:
        """Return the mean share of a solution before its first error at each compression that windows are chosen at."""
        shares: dict[int, list[float]] = {}
        for record in read_records(records)[1]:
            if "budget" in record:
                shares.setdefault(record["budget"], []).append(record["before_error"])
        largest_first = sorted(shares, reverse=True)
        return {c: fmean(shares[budget]) for c, budget in zip(sorted(COMPRESSIONS), largest_first, strict=True)}

    def report(self) -> None:
        """Write the table and the figure of all records."""
        records, dense = [], set()
        for name in (*FREE, *COMPRESSING, *TRAINED):
            for path in (self.records / f"{each}.jsonl" for each in (name, *(f"{name}-at-{c}" for c in COMPRESSIONS))):
                for record in read_records(path)[1] if path.exists() else ():
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
        fixed = "--task reasoning --dtype float32 --requests 64 --threads 1".split()
        if not set(words) & set(COMPRESSING):
            fixed += ["--protect-prompt", "all" if self.protect else 0]
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
    parser.add_argument("--model", type=Path, default=HERE / "model", help="the reasoner (default: the shipped one)")
    parser.add_argument("--protect-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kinds", nargs="+", default=["programs", "ledgers"])
    parser.add_argument("--steps", type=int, default=3000, help="problems that each policy is trained on")
    parser.add_argument("--rows", type=int, default=64, help="test problems of each kind")
    parser.add_argument("--size", type=int, help="steps of a problem (default: about 1,000 tokens)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, one thread each")
    parser.add_argument("--only", nargs="+", choices=[*FREE, *COMPRESSING, *TRAINED], metavar="POLICY")
    options = parser.parse_args(given)
    what = options.model, options.protect_prompt, options.kinds, options.rows, options.jobs, options.size
    comparison = Comparison(options.folder, *what)
    free = FREE if options.protect_prompt else FREE + COMPRESSING
    trained, free = ([name for name in names if name in (options.only or names)] for names in (TRAINED, free))
    comparison.prepare()
    comparison.train(trained, options.steps)
    comparison.evaluate(trained, comparison.choose_windows(free))
    comparison.report()


if __name__ == "__main__":
    main()
