"""Compare policies on long reasoning: accuracy against cache size, trained policies and training-free ones.

    python examples/reasoner/compare.py runs --jobs 2

trains each policy that is trained, all on as many problems; finds the shares of heads of each policy, and the window of
each training-free one, on validation problems; solves test problems under all of them, with equal shares and with those
that were found; and writes runs/summary.md (all kinds together), runs/table.md (each kind) and runs/answers.csv, which
`kvpop bench plot` draws. Records that are there already are not made again, and a stopped training or calibration goes
on. Problems, records and calibrations of other problems, models, scorers or settings are refused.

With --train-shares 8 each scorer is trained a second time, from the start, with the shares that were found for the
first one at 8 times, and its shares are found again; --train-windows 32 trains each once more with a window of 32
tokens and as many slots in all. --trainings 3 trains each policy, as it was trained last, with two more seeds; its shares
are those of the first. Intervals then draw trainings and problems. How long all this takes is printed before each
command, as soon as one of each kind has been timed.

--test-size 45 and --samples 16 solve other problems with what is trained, or each several times at --temperature. Their
records and tables are named by it.
"""

import argparse
import csv
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

from write_problems import problems_text

from kvpop_vllm.argument_types import positive, temperature
from kvpop_vllm.calibrate.command import options_of
from kvpop_vllm.calibrate.plan import Plan
from kvpop_vllm.calibrate.records import differing
from kvpop_vllm.calibration.shares import NAME, UNITS
from kvpop_vllm.cli import make_parser
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.output import markdown_table, read_records
from kvpop_vllm.evaluation.problems import KINDS, make_problem
from kvpop_vllm.evaluation.runner import DENSE, OWN
from kvpop_vllm.evaluation.statistics import INTERVAL
from kvpop_vllm.evaluation.summaries import REASONING_COLUMNS, summarise_reasoning
from kvpop_vllm.files import write_whole
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME

HERE = Path(__file__).parent
FREE = "streaming-llm", "random", "h2o", "tova", "momentkv", "l2norm", "rkv", "vase", "triattention"
"""Policies that need no training."""
COMPRESSING = ("snapkv",)
"""Policies that need no training and cannot protect prompts."""
WINDOWS = 16, 32, 64
COMPRESSIONS = {4: (2, 4), 8: (6, 8), 16: (12, 16)}
"""Compressions: those at which windows are chosen, each with those at which they are used."""
CALIBRATED = {4: (2, 4), 8: (6, 8), 12: (12,), 16: (16,)}
"""Compressions: those at which shares are measured, each with those at which they are used."""
CALIBRATION_ROWS = 32
"""Validation problems that shares are measured on; as many others judge them."""
SHARES = re.compile(r"shares-\d+-(.*)")
"""Names of records of policies with shares, with the compression at which they were measured and the policy."""
STATISTICS = "triattention"
"""Policy that cannot do without a calibration."""
WITHOUT_SHARES = "trimkv", "dms", "dense-longer"
"""Trained policies that have no shares: gates, and a base that nothing is evicted from."""
VARIANT = re.compile(
    r"(?P<first>(?P<policy>.+?)(-window-(?P<window>\d+))?(-shares-(?P<shares>\d+))?)(-seed-(?P<seed>\d+))?"
)
"""Names of trained policies.

A key of :data:`TRAINED`, another window, the compression whose shares it is trained with, and another seed of the training.
``first`` is the name without that seed.
"""
ROLES = re.compile(r"--window (\d+) --topk ([\d ]*\d)")
"""Window and long-range slots among the options of a trained policy."""
MEASURES = {
    "exact": "exact answers",
    "before_error": "share of a solution before its first error",
    "fewer bytes": "bytes of a dense request over those of a request, prompts included",
}
"""Measures of the summary."""

COMMON = "--no-pack --length 1600 --batch 1 --dtype float32 --no-activation-checkpointing --validate-every 50"
BUDGETS = "--window 24 --topk 244 108 154 108 192"
"""Budgets of 1/4, 1/8 (twice), 1/6 and 1/5 of a worked solution, which problems take in turn."""
LISTWISE = "--boundary 0 --listwise 1 --groups mean --decay-min 0.99 --decay-max 0.9999 --lr-new 1e-2 --lr-new-end 1e-3"
BASE = "--train-base --lr-base 5e-4 --lr-base-end 2e-5 --kl-top 64"
GATES = "--lr-new 2e-3 --lr-new-end 2e-4 --kl-top 64"
TRAINED = {
    "kvpop": f"{BUDGETS} {LISTWISE} {BASE} --skip",
    "kvpop-frozen-base": f"{BUDGETS} {LISTWISE} --no-train-base --skip",
    "kvpop-boundary-loss": f"{BUDGETS} {LISTWISE} {BASE} --skip --boundary 1 --listwise 0",
    "kvpop-immediate": f"{BUDGETS} {LISTWISE} {BASE} --skip --no-delayed",
    "kvpop-mlp": f"{BUDGETS} {LISTWISE} {BASE} --scorer mlp",
    "kvpop-mlp-frozen-base": f"{BUDGETS} {LISTWISE} --no-train-base --scorer mlp",
    "kvpop-linear": f"{BUDGETS} {LISTWISE} {BASE} --scorer linear",
    "streaming-plus": f"{BUDGETS} {BASE} --phase streaming-plus",
    "trimkv": f"--recipe trimkv --topk 180 --gate-width 64 {GATES}",
    "dms": f"--recipe dms --window 24 --topk 244 --compression 4 {GATES} {BASE}",
    "dense-longer": "--phase uptrain --lr-base 5e-4 --lr-base-end 2e-5",
}
"""Options of `kvpop distill` for each trained policy.

streaming-plus is streaming-llm on a base trained for it. dense-longer is a base that was trained as long without eviction.
"""


def takes_shares(name: str) -> bool:
    """Return whether a trained policy, of any window, can have shares."""
    return VARIANT.fullmatch(name)["policy"] not in WITHOUT_SHARES


def trains_base(name: str) -> bool:
    """Return whether the base model is trained with a policy, of any window."""
    return bool({"--train-base", "--phase"} & {*training_options(name)})


def training_options(name: str) -> list[str]:
    """Return the options of `kvpop distill` for a trained policy, without those for shares. See :data:`VARIANT`.

    With another window the long-range slots make up for it.
    """
    variant = VARIANT.fullmatch(name)
    options = TRAINED[variant["policy"]]
    if variant["window"]:
        window, topk = ROLES.search(options).groups()
        wider = int(variant["window"]) - int(window)
        slots = " ".join(str(int(k) - wider) for k in topk.split())
        options = ROLES.sub(f"--window {variant['window']} --topk {slots}", options)
    return options.split() + (["--seed", variant["seed"]] if variant["seed"] else [])


class Comparison:
    """Folder of a comparison.

    Args:
        folder: holds the trained policies and the records.
        model: folder of the reasoner, for example one that train.py has written.
        protect: True if prompts are never evicted.
        kinds: kinds of problems.
        rows: test problems of each kind.
        jobs: processes at once, one thread each.
        size: steps of a problem, None for the kinds' own.
        seed: other seeds have other test problems.
        untrained: names of training-free policies, of :data:`FREE`.
        shares: compressions whose shares trained policies are trained with a second time.
        trainings: how often each policy, as it is trained last, is trained, each time with another seed.
        test: options of `kvpop eval` for the test problems alone, by name; a size takes the place of ``size``.

    Attributes:
        seconds: how long commands took, by the name of their action.
        cells: outputs of the commands that are still to end, with the name of the action.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        protect: bool,
        kinds: list[str],
        rows: int,
        jobs: int,
        size: int | None = None,
        seed: int = 0,
        untrained: Iterable[str] = FREE,
        shares: Iterable[int] = (),
        trainings: int = 1,
        test: dict[str, float] | None = None,
    ):
        self.folder, self.model, self.protect, self.rows, self.jobs = folder, model, protect, rows, jobs
        self.seed, self.untrained, self.shares = seed, tuple(untrained), tuple(shares)
        self.seconds: dict[str, list[float]] = {}
        self.cells: dict[Path, str] = {}
        self.kinds, self.size, self.trainings, self.test = kinds, size, trainings, test or {}
        self.suffix = "".join(f"-{name}-{value:g}" for name, value in self.test.items())
        self.problems, self.records = folder / "problems.jsonl", folder / f"records{self.suffix}"
        self.validation, self.calibrations = folder / "validation.jsonl", folder / "calibrations"
        # windows are chosen once, whatever the test problems are
        self.windows = folder / "records"
        for records in (self.records, self.windows):
            records.mkdir(parents=True, exist_ok=True)

    def _prepare(self) -> None:
        """Write problems to train policies on."""
        self._write(self.problems, problems_text(self.kinds, size=self.size))

    def prepare_calibration(self) -> None:
        """Write problems to measure shares on."""
        count = math.ceil(2 * CALIBRATION_ROWS / len(self.kinds))
        self._write(self.validation, problems_text(self.kinds, "validation", count, self.size))

    def _write(self, path: Path, problems: str) -> None:
        """Write problems unless they are there.

        Raises:
            SystemExit: other problems are there.
        """
        if not path.exists():
            write_whole(path, problems)
        elif path.read_text() != problems:
            size = "their own size" if self.size is None else f"size {self.size}"
            sys.exit(
                f"{path} has other problems than {' and '.join(self.kinds)} of {size}: name another folder, or remove it"
            )

    def _calibration(self, name: str, compression: int, words: list) -> Iterator[list]:
        """Yield the command that measures a policy's shares of heads, unless they are there.

        Args:
            name: name of the policy here.
            compression: how many times less it keeps.
            words: model and policy.

        Raises:
            SystemExit: shares that were measured with something else are there.
        """
        out = self.calibrations / f"{name}-{compression}"
        if not self.protect or not takes_shares(name):
            return
        tokenizer = load_tokenizer(self.model)
        problems = [json.loads(line) for line in self.validation.read_text().splitlines()]
        prompts, lengths = (
            [len(tokenizer(text)["input_ids"]) for text in texts]
            for texts in zip(*((row["prompt"], row["prompt"] + row["response"]) for row in problems), strict=True)
        )
        budget = (min(lengths) - max(prompts)) // compression
        fixed = ["--data", self.validation, "--rows", CALIBRATION_ROWS, "--length", min(lengths), "--threads", 1]
        fixed += ["--budget", budget, "--protect-prompt", "--shares", "head"]
        command = ["kvpop", "calibrate", *words, "--out", out, *fixed]
        if not (out / NAME).exists():
            yield command
            return
        try:
            plan = Plan(options_of(make_parser().parse_args(list(map(str, command[1:])))))
            keys = differing(out, plan.settings)
        except ConfigError as error:
            sys.exit(str(error))
        if json.loads((out / NAME).read_text())["unit"] not in (UNITS[0], plan.options.unit):
            keys.append("shares")
        if keys:
            sys.exit(f"{out} was measured with other settings ({', '.join(keys)}): name another folder, or remove it")

    def calibrate_untrained(self) -> None:
        """Find the shares of the training-free policies."""
        for name in self.untrained if self.protect else ():
            self._expect_shares(name)
        self._all(
            self._calibration(name, c, [self.model, "--policy", name])
            for name in self.untrained
            for c in _calibrated(name)
        )

    def _with_shares(self, name: str, words: list) -> Iterator[list]:
        """Yield the commands that solve the test problems with a policy's shares, where some are better than equal ones.

        Args:
            name: name of the policy here.
            words: model and policy.
        """
        for measured, used in CALIBRATED.items():
            folder, out = self.calibrations / f"{first_training(name)}-{measured}", self._shared(name, measured)
            path = folder / NAME
            if not path.exists() or json.loads(path.read_text())["unit"] == UNITS[0]:
                self.cells.pop(out, None)
            elif not self._has(out, self.rows):
                shares = ["--calibration", folder, "--share", *used, "--rows", self.rows, "--no-dense"]
                yield self._evaluation(out, [*words, *shares])

    def _shared(self, name: str, compression: int) -> Path:
        """Return the file of the records of a policy with the shares that were found at a compression."""
        return self.records / f"shares-{compression}-{name}.jsonl"

    def run_trained(self, names: Iterable[str], steps: int) -> None:
        """Train policies on ``steps`` problems each, and solve the test problems under each as soon as it is trained."""
        common = ["--model", self.model, "--data", self.problems, *COMMON.split(), "--threads", 1]
        common += ["--protect-prompt"] * self.protect
        names = list(names)
        variants = [name for base in names for name in (base, *self._with_trained_shares(base))]
        if any(not self._has(self.records / f"{name}.jsonl", self.rows) for name in variants):
            self._prepare()
        for name in variants:
            self._expect(name)
        self._all(self._trainings(name, common, steps) for name in names)

    def _with_trained_shares(self, name: str) -> list[str]:
        """Return the names under which a policy is trained with shares."""
        return [f"{name}-shares-{c}" for c in self.shares] if takes_shares(name) and self.protect else []

    def _with_other_seeds(self, name: str) -> list[str]:
        """Return the names under which a policy is trained with other seeds."""
        return [f"{name}-seed-{seed}" for seed in range(1, self.trainings)]

    def _expect(self, name: str) -> None:
        """Note the commands of a trained policy."""
        if not (record := self.records / f"{name}.jsonl").exists():
            self.cells |= {self.folder / name: "distill", record: "eval"}
        if self.protect and takes_shares(name):
            self._expect_shares(name)

    def _expect_shares(self, name: str) -> None:
        """Note the commands about a policy's shares."""
        for c in _calibrated(name):
            files = {self._shared(name, c): "eval"}
            if name == first_training(name):
                files[self.calibrations / f"{name}-{c}"] = "calibrate"
            for file, action in files.items():
                if not (file / NAME if action == "calibrate" else file).exists():
                    self.cells[file] = action

    def _trainings(self, name: str, common: list, steps: int) -> Iterator[list]:
        """Yield the commands of a trained policy, then those of the same one trained with the shares that were found.

        Where no shares were better than equal ones there is nothing to train with. What was trained last is trained with
        other seeds.
        """
        yield from self._steps_of(name, common, steps)
        final, options = name, common
        for variant, c in zip(self._with_trained_shares(name), self.shares, strict=False):
            source = self.calibrations / f"{name}-{c}"
            if json.loads((source / NAME).read_text())["unit"] == UNITS[0]:
                for out in [out for out in list(self.cells) if variant in str(out)]:
                    self.cells.pop(out, None)
            else:
                final, options = variant, [*common, "--shares", source]
                yield from self._steps_of(final, options, steps)
        for repeated in self._with_other_seeds(final):
            self._expect(repeated)
            yield from self._steps_of(repeated, options, steps)

    def _steps_of(self, name: str, common: list, steps: int) -> Iterator[list]:
        """Yield the commands of a trained policy: training, and what follows from it."""
        out, words = self.folder / name, self._contender(name)
        steps = 0 if self._has(self.records / f"{name}.jsonl", self.rows) else steps
        # a training that has ended would be exported again, without the shares that were found for it
        if steps and not ((out / CONFIG_NAME).exists() and (out / "run" / f"step-{steps}").exists()):
            options = training_options(name)
            fixed = [word for word in common if word != "--protect-prompt" or "uptrain" not in options]
            yield ["kvpop", "distill", *fixed, *options, "--steps", steps, "--out", out]
        decides = ["--policy", "streaming-llm"] if "--scorer" not in words else ["--scorer", out]
        for compression in CALIBRATED if name == first_training(name) else ():
            yield from self._calibration(name, compression, [words[1], *decides])
        if steps:
            equal = ["--allocator", "uniform", "--share", *sum(COMPRESSIONS.values(), ())]
            options = [] if words[-1] == "--policies" else equal
            # a base that was trained answers without a policy too
            options += ["--no-dense"] if words[1] == self.model else []
            yield self._evaluation(self.records / f"{name}.jsonl", [*words, *options, "--rows", self.rows])
        yield from self._with_shares(name, words)

    def solve_dense(self) -> None:
        """Solve the test problems with the dense model."""
        self._solve({self.records / f"{DENSE}.jsonl": ["--model", self.model, "--policies"]}, self.rows)

    def choose_windows(self) -> dict[tuple[str, int], int]:
        """Return the window of each training-free policy and compression with which validation problems go well longest.

        It is one that is possible at equal bytes too.
        """
        outs = {(names, w): self.windows / f"windows-{w}-{names[0]}.jsonl" for names in self._free() for w in WINDOWS}
        compressions = ["--share", *COMPRESSIONS, "--no-dense"]
        self._solve(
            {out: [*self._untrained(names, w), *compressions] for (names, w), out in outs.items()},
            16,
            {"split": "validation"},
        )
        shares: dict[tuple[str, int], dict[int, list[float]]] = {}
        for (_, w), out in outs.items():
            for record in read_records(out)[1]:
                if "budget" in record:
                    of_budget = shares.setdefault((record["policy"], record["budget"]), {})
                    of_budget.setdefault(w, []).append(record["before_error"])
        best = {key: max(WINDOWS, key=lambda w: (len(by_w[w]), fmean(by_w[w]))) for key, by_w in shares.items()}
        budgets = sorted({budget for _, budget in best}, reverse=True)
        compression = dict(zip(budgets, sorted(COMPRESSIONS), strict=True))
        return {(name, compression[budget]): w for (name, budget), w in best.items()}

    def run_untrained(self, windows: dict[tuple[str, int], int]) -> None:
        """Solve the test problems under the training-free policies."""
        calls = {}
        for names, c, w in product(self._free(), COMPRESSIONS, WINDOWS):
            if names := [name for name in names if windows[name, c] == w]:
                out = self.records / f"at-{c}-window-{w}-{'-'.join(names)}.jsonl"
                calls[out] = [*self._untrained(names, w), "--share", *COMPRESSIONS[c], "--no-dense"]
        self._solve(calls, self.rows)
        self._all(self._with_shares(name, ["--model", self.model, "--policies", name]) for name in self.untrained)

    def report(self, against: str) -> None:
        """Write the tables of all records; differences are from the policy ``against``."""
        records, compressions = self._records()
        table, summaries, answers = (
            self.folder / f"{stem}{self.suffix}{ending}"
            for stem, ending in (("table", ".md"), ("summary", ".md"), ("answers", ".csv"))
        )
        table.write_text(markdown_table(summarise_reasoning(records, against), REASONING_COLUMNS))
        pooled = [record | {"kind": "all", "unit": f"{record['kind']} {record['unit']}"} for record in records]
        curves = curves_of(summarise_reasoning(pooled, against), compressions)
        measures = MEASURES | {"difference": f"exact answers less those of {against}, of the same problems"}
        tables = [f"{title.capitalize()}:\n\n{summary(curves, value)}" for value, title in measures.items()]
        repeated = {record["policy"] for record in pooled if record.get("training")}
        of_seeds = [
            record | {"policy": f"{record['policy']}, seed {record['training']}", "training": 0}
            for record in pooled
            if record["policy"] in repeated
        ]
        if of_seeds:
            curves_of_seeds = curves_of(summarise_reasoning(of_seeds), compressions)
            tables.append(f"Exact answers of each training:\n\n{summary(curves_of_seeds, 'exact')}")
        summaries.write_text("\n".join(tables))
        write_answers(answers, curves)
        print(f"{self.folder} holds {summaries.name}, {table.name}, {answers.name}")

    def _records(self) -> tuple[list[dict], dict[int, int]]:
        """Return the records of the test problems, and the compression of each budget. A trained policy has its name here."""
        records, dense, compressions = [], set(), {}
        for path in sorted(self.records.glob("*.jsonl")):
            if path.name.startswith("windows-"):
                continue
            shares = SHARES.fullmatch(path.stem)
            trained = VARIANT.fullmatch(shares[1] if shares else path.stem)
            is_trained = trained["policy"] in TRAINED
            about, of_file = read_records(path)
            budgets = sorted({record["budget"] for record in of_file if "budget" in record}, reverse=True)
            compression = dict(zip(budgets, sorted(about["options"]["share"] or ()), strict=bool(budgets)))
            # without a teacher the dense model of a file is the one that the policy runs in
            is_own = is_trained and trains_base(trained["policy"]) and about["options"]["teacher"] is None
            for record in of_file:
                policy = OWN if is_own and record["policy"] == DENSE else record["policy"]
                name = trained["first"] if is_trained or shares else policy
                name += ", shares" if shares else ""
                name = {DENSE: DENSE, OWN: f"{trained['first']}, nothing evicted"}.get(policy, name)
                if is_trained and policy != DENSE:
                    record["training"] = int(trained["seed"] or 0)
                if "budget" in record:
                    compressions[record["budget"]] = compression[record["budget"]]
                else:  # several commands may have solved the problems with a dense model
                    solution = name, record["kind"], record["unit"], record.get("sample"), record.get("training")
                    if solution in dense:
                        continue
                    dense.add(solution)
                records.append(record | {"policy": name})
        return records, compressions

    def _free(self) -> list[tuple[str, ...]]:
        """Return the training-free policies in groups that share a command."""
        groups = [tuple(name for name in self.untrained if name != STATISTICS)]
        groups += [(STATISTICS,)] if STATISTICS in self.untrained and self.protect else []
        groups += [] if self.protect else [COMPRESSING]
        return [group for group in groups if group]

    def _untrained(self, names: Iterable[str], window: int) -> list:
        words = ["--model", self.model, "--policies", *names, "--window", window]
        if STATISTICS not in names:
            return words
        return [
            *words,
            "--calibration",
            self.calibrations / f"{STATISTICS}-{min(CALIBRATED)}",
            "--allocator",
            "uniform",
        ]

    def _has(self, out: Path, rows: int, problems: dict | None = None) -> bool:
        """Return whether an evaluation's records are there.

        Args:
            out: file of the records.
            rows: problems of each kind.
            problems: options of the problems, None for those of the test problems.

        Raises:
            SystemExit: they are of other problems or settings.
        """
        if not out.exists():
            return False
        recorded = read_records(out)[0].get("options", {})
        settings = {"kinds": self.kinds, "rows": rows, "size": self.size, "seed": self.seed}
        settings |= self.test if problems is None else problems
        settings["share"] = sum(COMPRESSIONS.values(), ())
        if recorded.get("protect_prompt") is not None:
            settings["protect_prompt"] = [self.protect]
        for name, value in settings.items():
            measured = recorded.get(name)
            if set(measured or ()) - set(value) if name == "share" else measured != value:
                sys.exit(f"{out} has {name} {measured}, not {value}: name another folder, or remove this file")
        return True

    def _contender(self, name: str) -> list:
        """Return the options that name a trained policy and its model, which comes second."""
        out, options = self.folder / name, training_options(name)
        model = out / "model" if trains_base(name) else self.model
        if "uptrain" in options:
            return ["--model", model, "--policies"]
        if "streaming-plus" in options:
            window = options[options.index("--window") + 1]
            return ["--model", model, "--policies", "streaming-llm", "--window", window]
        return ["--model", model, "--policies", "--scorer", out]

    def _solve(self, calls: dict[Path, list], rows: int, problems: dict | None = None) -> None:
        """Run evaluations whose records are not there yet. See :meth:`_has`."""
        new = {out: [*words, "--rows", rows] for out, words in calls.items() if not self._has(out, rows, problems)}
        self.cells |= dict.fromkeys(new, "eval")
        self._all([self._evaluation(out, words, problems)] for out, words in new.items())

    def _evaluation(self, out: Path, words: list, problems: dict | None = None) -> list:
        fixed = "kvpop eval --task reasoning --dtype float32 --requests 64 --threads 1".split()
        protect = [] if set(words) & set(COMPRESSING) else ["--protect-prompt", "all" if self.protect else 0]
        options = {"size": self.size, "seed": self.seed} | (self.test if problems is None else problems)
        problem_options = [
            word for name, value in options.items() if value is not None for word in (f"--{name}", value)
        ]
        return [*fixed, *protect, "--kinds", *self.kinds, *problem_options, *words, "--out", out]

    def _all(self, chains: Iterable[Iterable[list]]) -> None:
        """Run chains of commands, ``jobs`` at once."""
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(lambda chain: [self._timed(command) for command in chain], list(chains)))

    def _timed(self, command: list) -> None:
        """Run a command, and print before how long it and all others take."""
        print(self.left(), flush=True)
        began = time.monotonic()
        _run(command)
        self.seconds.setdefault(command[1], []).append(time.monotonic() - began)
        self.cells.pop(command[command.index("--out") + 1], None)

    def left(self) -> str:
        """Return how many commands of this stage are still to end, and how long they take, by those that have ended."""
        actions = list(self.cells.values())
        timed = [fmean(self.seconds[action]) for action in actions if action in self.seconds]
        if not timed or len(timed) < len(actions):
            return f"{len(actions)} results to come"
        return f"{len(actions)} results to come, in about {math.ceil(sum(timed) / self.jobs / 60)} minutes"


def first_training(name: str) -> str:
    """Return the name of a policy without the seed of its training."""
    return VARIANT.fullmatch(name)["first"]


def _calibrated(name: str) -> list[int]:
    """Return the compressions at which a policy's shares are measured."""
    # the window of STATISTICS has 128 tokens, which leave no slot at the others
    return [min(CALIBRATED)] if name == STATISTICS else list(CALIBRATED)


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


def curves_of(table: list[dict], compressions: dict[int, int]) -> dict[tuple[str, str], dict[int, dict]]:
    """Return the lines of a table by policy and equality, then by compression; dense models compress by 1.

    Args:
        table: from :func:`summarise_reasoning`.
        compressions: compression of each budget.
    """
    curves: dict[tuple[str, str], dict[int, dict]] = {}
    for line in table:
        key = line["policy"], line["equal"] or ""
        curves.setdefault(key, {})[compressions.get(line["budget"], 1)] = line
    dense = next((line["MiB"] for line in table if line["policy"] == DENSE), None)
    for line in table if dense else ():
        line["fewer bytes"] = dense / line["MiB"]
    return curves


def compressions_of(curves: dict[tuple[str, str], dict[int, dict]]) -> list[int]:
    """Return the compressions of all curves in ascending order, without dense's."""
    return sorted({c for curve in curves.values() for c in curve} - {1})


def summary(curves: dict[tuple[str, str], dict[int, dict]], value: str) -> str:
    """Return a Markdown table of a measure with its intervals: policies down, compressions across."""
    times = {1: "all held"} | {c: f"{c} times less" for c in compressions_of(curves)}

    def order(key: tuple[str, str]) -> tuple[bool, float]:
        return 1 not in curves[key], -fmean(line[value] for line in curves[key].values() if value in line)

    lines = []
    for key in sorted((key for key in curves if any(value in line for line in curves[key].values())), key=order):
        lines.append({"policy": key[0], "equal": key[1]})
        for c, line in curves[key].items():
            if value in line:
                ends = line.get(value + INTERVAL)
                lines[-1][times[c]] = f"{line[value]:.2f}" + (" ({:.2f} to {:.2f})".format(*ends) if ends else "")
    return markdown_table(lines, ("policy", "equal", *times.values()))


def write_answers(path: Path, curves: dict[tuple[str, str], dict[int, dict]]) -> None:
    """Write the share of exact answers, with its interval, of each policy and compression as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("policy", "equal", "compression", "problems", "exact", "low", "high"))
        for (policy, equal), curve in sorted(curves.items()):
            for compression, line in sorted(curve.items()):
                interval = line.get(f"exact{INTERVAL}", (line["exact"],) * 2)
                shares = (f"{share:.4f}" for share in (line["exact"], *interval))
                writer.writerow((policy, equal, compression, line["problems"], *shares))


def main(words: list[str] | None = None) -> None:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=HERE / "model", help="the reasoner (default: the shipped one)")
    parser.add_argument("--protect-prompt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["programs", "ledgers"])
    parser.add_argument("--steps", type=positive, default=1450, help="problems that each policy is trained on")
    parser.add_argument("--rows", type=positive, default=64, help="test problems of each kind")
    parser.add_argument("--size", type=positive, help="steps of a problem (default: about 1,000 tokens)")
    parser.add_argument("--test-size", type=positive, help="steps of a test problem (default: --size)")
    parser.add_argument("--samples", type=positive, help="solutions of each test problem (default: 1)")
    parser.add_argument("--temperature", type=temperature, help="of sampling test solutions (default: 0, greedy)")
    parser.add_argument("--trainings", type=positive, default=1, help="seeds that each policy is trained with")
    parser.add_argument("--seed", type=int, default=0, help="of the test problems (default: 0)")
    parser.add_argument("--jobs", type=positive, default=1, help="processes at once, one thread each")
    parser.add_argument("--only", nargs="*", choices=TRAINED, default=TRAINED, help="trained policies")
    parser.add_argument(
        "--train-shares",
        type=int,
        nargs="*",
        choices=CALIBRATED,
        default=[],
        metavar="C",
        help=f"train once more with the shares found at C times less, of {', '.join(map(str, CALIBRATED))} (default: do not)",
    )
    parser.add_argument(
        "--train-windows", type=positive, nargs="*", default=[], metavar="W", help="train once more with these windows"
    )
    parser.add_argument("--untrained", nargs="*", choices=FREE, default=FREE, help="training-free policies")
    parser.add_argument("--against", default="kvpop", help="policy that differences are from (default: kvpop)")
    parser.add_argument("--tables", action="store_true", help="write the tables of the records that are there, no more")
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
    problems = options.kinds, options.rows, options.jobs, options.size, options.seed, options.untrained
    test = {"size": options.test_size, "samples": options.samples, "temperature": options.temperature}
    comparison = Comparison(
        options.folder,
        options.model,
        options.protect_prompt,
        *problems,
        options.train_shares,
        options.trainings,
        {name: value for name, value in test.items() if value is not None},
    )
    if options.tables:
        comparison.report(options.against)
        return
    comparison.prepare_calibration()
    comparison.solve_dense()
    windows = [
        f"{name}-window-{w}" for w in options.train_windows for name in options.only if ROLES.search(TRAINED[name])
    ]
    comparison.run_trained([*options.only, *windows], options.steps)
    comparison.calibrate_untrained()
    comparison.run_untrained(comparison.choose_windows())
    comparison.report(options.against)


if __name__ == "__main__":
    main()
