"""Commands of a comparison: what trains policies, finds shares and windows, and solves problems."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product, takewhile
from pathlib import Path
from statistics import fmean

import contenders
from write_problems import problems_text

from kvpop_vllm.calibrate.command import options_of
from kvpop_vllm.calibrate.plan import PROBE, ROUNDS, Plan
from kvpop_vllm.calibrate.records import differing
from kvpop_vllm.calibration.shares import NAME, UNITS
from kvpop_vllm.cli import make_parser
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.command import recipe_of
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.shares import read_shares
from kvpop_vllm.evaluation.output import read_records
from kvpop_vllm.evaluation.problems import DRAW_SIZE, SEEDS
from kvpop_vllm.evaluation.runner import DENSE
from kvpop_vllm.files import write_whole
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME

RUN = Path("run", "run.json")
"""Settings of a training, in its folder."""


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
        seed: other seeds have other test problems, and others that windows are chosen by.
        untrained: names of training-free policies, of :data:`contenders.FREE`.
        shares: compressions whose shares scorers are trained with a second time.
        trainings: how often each scorer, as it is trained last, is trained, each time with another seed.
        test: options of `kvpop eval` for the test problems alone, by name; a size takes the place of ``size``.
        earlier: folder of an earlier comparison's calibrations, with whose shares scorers are trained, or None.
        compressions: those at which the test problems are solved, None for all.

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
        untrained: Iterable[str] = contenders.FREE,
        shares: Iterable[int] = (),
        trainings: int = 1,
        test: dict[str, float] | None = None,
        earlier: Path | None = None,
        compressions: Iterable[int] | None = None,
    ):
        self.folder, self.model, self.protect, self.rows, self.jobs = folder, model, protect, rows, jobs
        self.seed, self.untrained, self.shares = seed, tuple(untrained), tuple(shares)
        self.seconds: dict[str, list[float]] = {}
        self.cells: dict[Path, str] = {}
        self.kinds, self.size, self.trainings, self.test = kinds, size, trainings, test or {}
        self.suffix = suffix_of(self.test)
        self.problems, self.records = folder / "problems.jsonl", folder / f"records{self.suffix}"
        self.validation, self.calibrations = folder / "validation.jsonl", folder / "calibrations"
        self.earlier = earlier
        self.compressions = contenders.all_compressions() if compressions is None else tuple(compressions)
        # windows are chosen once, whatever the test problems are
        self.windows = folder / "records"
        for records in (self.records, self.windows):
            records.mkdir(parents=True, exist_ok=True)

    def _prepare(self) -> None:
        """Write problems to train policies on."""
        self._write(self.problems, problems_text(self.kinds, size=self.size))

    def prepare_calibration(self) -> None:
        """Write problems to measure shares on."""
        count = math.ceil(2 * contenders.CALIBRATION_ROWS / len(self.kinds))
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
        if not self.protect or not contenders.takes_shares(name):
            return
        out = self.calibrations / f"{name}-{compression}"
        length, budget = self._calibrated_sizes(compression)
        fixed = ["--data", self.validation, "--rows", contenders.CALIBRATION_ROWS, "--length", length, "--threads", 1]
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
        report = out / "report.json"
        if report.exists() and json.loads(report.read_text()).get("rounds", plan.rounds) != plan.rounds:
            keys.append("rounds")
        if keys:
            sys.exit(f"{out} was measured with other settings ({', '.join(keys)}): name another folder, or remove it")

    def _calibrated_sizes(self, compression: int) -> tuple[int, int]:
        """Return the tokens of a row and the budget with which shares are measured at a compression."""
        tokenizer = load_tokenizer(self.model)
        problems = [json.loads(line) for line in self.validation.read_text().splitlines()]
        prompts, lengths = (
            [len(tokenizer(text)["input_ids"]) for text in texts]
            for texts in zip(*((row["prompt"], row["prompt"] + row["response"]) for row in problems), strict=True)
        )
        return min(lengths), (min(lengths) - max(prompts)) // compression

    def calibrate_untrained(self) -> None:
        """Find the shares of the training-free policies."""
        for name in self.untrained if self.protect else ():
            self._expect_shares(name)
        self._all(
            self._calibration(name, c, [self.model, "--policy", name, *self._rounds(name)])
            for name in self.untrained
            for c in self._calibrated_at(name)
        )

    @staticmethod
    def _rounds(name: str) -> list:
        """Return the option for as many rounds of improvement as a scorer has. A window has none."""
        return [] if name == PROBE else ["--rounds", ROUNDS]

    def _with_shares(self, name: str, words: list) -> Iterator[list]:
        """Yield the commands that solve the test problems with a policy's shares, where some are better than equal ones.

        Args:
            name: name of the policy here.
            words: model and policy.
        """
        for use in self._uses(name):
            out, shares = self._shared(name, use), self._shares_options(name, use)
            if not shares:
                self.cells.pop(out, None)
            elif not self._has(out, options := [*words, *shares], self.rows):
                options += ["--no-dense"] if out != self._solved(name) or words[1] == self.model else []
                yield self._evaluation(out, [*options, "--rows", self.rows])

    def _uses(self, name: str) -> Iterator[contenders.Use]:
        """Yield where a policy's shares are used, for the compressions at which the test problems are solved."""
        for use in contenders.uses_of(name):
            if compressions := tuple(c for c in use.compressions if c in self.compressions):
                yield use._replace(compressions=compressions)

    def _calibrated_at(self, name: str) -> list[int]:
        """Return the compressions at which shares that are used are measured."""
        return list(dict.fromkeys(use.measured for use in self._uses(name)))

    def _shares_options(self, name: str, use: contenders.Use) -> list:
        """Return the options of `kvpop eval` for a policy with the shares that were found for a use.

        Where none are better than equal ones, what is trained with shares has equal ones. Other policies solve problems
        with these anyway, and have no options here.
        """
        folder, used = self.calibrations / f"{name}-{use.measured}", ["--share", *use.compressions]
        used += ["--equal", use.equal] if use.equal else []
        if self._has_shares(folder):
            return ["--calibration", folder, *used]
        return ["--allocator", "uniform", *used] if contenders.VARIANT.fullmatch(name)["shares"] else []

    @staticmethod
    def _has_shares(folder: Path) -> bool:
        """Return whether a calibration found shares that are better than equal ones."""
        path = folder / NAME
        return path.exists() and json.loads(path.read_text())["unit"] != UNITS[0]

    def _source(self, name: str) -> Path:
        """Return the folder of the shares that a policy of this name is trained with."""
        variant = contenders.VARIANT.fullmatch(name)
        return (self.earlier or self.calibrations) / f"{variant['policy']}-{variant['shares']}"

    def _shared(self, name: str, use: contenders.Use) -> Path:
        """Return the file of the records of a policy with the shares that were found for a use."""
        return self.records / f"{'bytes' if use.equal == 'bytes' else 'shares'}-{use.measured}-{name}.jsonl"

    def _solved(self, name: str) -> Path:
        """Return the first file of records of a trained policy, in which its base model answers without it too."""
        shares = contenders.VARIANT.fullmatch(name)["shares"]
        if not shares:
            return self.records / f"{name}.jsonl"
        uses = [*self._uses(name)]
        return self._shared(name, next((use for use in uses if str(use.measured) == shares), uses[0]))

    def run_trained(self, names: Iterable[str], steps: int) -> None:
        """Train policies on ``steps`` problems each, and solve the test problems under each as soon as it is trained."""
        common = ["--model", self.model, "--data", self.problems, "--threads", 1]
        names = list(names)
        variants = [variant for name in names for variant in self._variants(name)]
        if self.trainings > 1 or not all(self._solved(name).exists() for name in variants):
            self._prepare()
        for name in variants:
            self._expect(name, steps)
        self._all(self._chain(name, common, steps) for name in names)

    def _variants(self, name: str) -> list[str]:
        """Return the names under which a policy is trained with its first seed.

        The first has equal shares, unless an earlier comparison has others.
        """
        if not (self.shares and contenders.is_scorer(name) and self.protect):
            return [name]
        with_shares = [f"{name}-shares-{c}" for c in self.shares]
        return with_shares if self.earlier else [name, *with_shares]

    def _training_words(self, name: str, steps: int) -> list:
        """Return the options of `kvpop distill` for a policy, without those of files, threads and shares."""
        options = contenders.training_options(name)
        protect = ["--protect-prompt"] * (self.protect and "uptrain" not in options)
        return [*contenders.COMMON.split(), *protect, *options, "--steps", steps]

    def check_trained(self, names: Iterable[str], steps: int) -> None:
        """Check what policies are to be trained with against what they have been trained with.

        Raises:
            SystemExit: an earlier comparison has no such shares, or a policy has been trained with others, or with
                another recipe.
        """
        for variant in [variant for name in names for variant in self._variants(name)]:
            shares = None
            if compression := contenders.VARIANT.fullmatch(variant)["shares"]:
                shares = self._shares(variant, int(compression))
            for trained in [self.folder / name for name in (variant, *self._with_other_seeds(variant))]:
                if not (trained / RUN).exists():
                    continue
                # a run from before a field existed has its default
                run = Recipe.defaults() | json.loads((trained / RUN).read_text())
                words = ["distill", "--out", str(trained), *map(str, self._training_words(trained.name, steps))]
                recipe = recipe_of(make_parser().parse_args(words)).to_json()
                recipe["shares"] = shares or run["shares"]
                for option in (option for option in recipe if run[option] != recipe[option]):
                    difference = f"--{option.replace('_', '-')} {run[option]}, not {recipe[option]}"
                    if option == "shares":
                        difference = f"other shares than those of {self._source(variant)}"
                    sys.exit(f"{trained} was trained with {difference}: name another folder")

    def _shares(self, variant: str, compression: int) -> list[list[float]] | None:
        """Return the shares that a policy is trained with, None if they are still to be measured, or equal.

        Raises:
            SystemExit: an earlier comparison has none, or they are of another model or budget.
        """
        source = self._source(variant)
        if not self._has_shares(source):
            if not self.earlier:
                return None
            state = "has no shares that are better than equal ones" if source.exists() else "is not there"
            sys.exit(f"{source} {state}: leave --calibrations out, or train other policies (--only)")
        budget, measured = self._calibrated_sizes(compression)[1], json.loads((source / NAME).read_text())["budget"]
        if measured != budget:
            sys.exit(f"{source} was measured at a budget of {measured}, not {budget}: name another folder")
        try:
            return read_shares(str(source), self.model, 0)
        except ConfigError as error:
            sys.exit(str(error))

    def _with_other_seeds(self, name: str) -> list[str]:
        """Return the names under which a policy is trained with other seeds."""
        return [f"{name}-seed-{seed}" for seed in range(1, self.trainings if contenders.is_scorer(name) else 1)]

    def _expect(self, name: str, steps: int) -> None:
        """Note the commands of a trained policy."""
        if not (record := self._solved(name)).exists():
            self.cells |= {record: "eval"} | ({} if self._is_trained(name, steps) else {self.folder / name: "distill"})
        if self.protect and contenders.takes_shares(name):
            self._expect_shares(name)

    def _expect_shares(self, name: str) -> None:
        """Note the commands about a policy's shares. What is there already is judged before anything runs."""
        for use in self._uses(name):
            solved, folder = self._shared(name, use), self.calibrations / f"{name}-{use.measured}"
            if not (folder / NAME).exists():
                self.cells[folder] = "calibrate"
            elif options := self._shares_options(name, use):
                self._has(solved, options, self.rows)
            if not solved.exists():
                self.cells[solved] = "eval"

    def _chain(self, name: str, common: list, steps: int) -> Iterator[list]:
        """Yield the commands of a trained policy, then those of the same one trained with the shares that were found.

        Where no shares were better than equal ones there is nothing to train with. What was trained last is trained with
        other seeds.
        """
        final, options = name, common
        for variant in self._variants(name):
            if contenders.VARIANT.fullmatch(variant)["shares"]:
                if not self._has_shares(source := self._source(variant)):
                    for out in [out for out in list(self.cells) if variant in out.name]:
                        self.cells.pop(out, None)
                    continue
                options = [*common, "--shares", source]
            final = variant
            yield from self._training_commands(final, options, steps)
        for repeated in self._with_other_seeds(final):
            self._expect(repeated, steps)
            yield from self._training_commands(repeated, options, steps)

    def _training_commands(self, name: str, common: list, steps: int) -> Iterator[list]:
        """Yield the commands of a trained policy: training, and what follows from it."""
        variant = contenders.VARIANT.fullmatch(name)
        out, words, solved = self.folder / name, self._contender(name), self._solved(name)
        equal = [*words, "--allocator", "uniform", "--share", *self.compressions]
        if words[-1] == "--policies":
            equal = words
        if variant["shares"]:
            is_solved = all(self._shared(name, use).exists() for use in self._uses(name))
        else:
            is_solved = self._has(solved, equal, self.rows)
        if not is_solved and not self._is_trained(name, steps):
            yield ["kvpop", "distill", *common, *self._training_words(name, steps), "--out", out]
        decides = ["--policy", "streaming-llm"] if "--scorer" not in words else ["--scorer", out]
        for compression in self._calibrated_at(name):
            yield from self._calibration(name, compression, [words[1], *decides])
        if not is_solved and not variant["shares"]:
            # a base that was trained answers without a policy too
            dense = ["--no-dense"] if words[1] == self.model else []
            yield self._evaluation(solved, [*equal, *dense, "--rows", self.rows])
        yield from self._with_shares(name, words)

    def _is_trained(self, name: str, steps: int) -> bool:
        """Return whether a training has ended.

        It would be exported again, without the shares that were found for it.
        """
        out = self.folder / name
        return (out / CONFIG_NAME).exists() and (out / "run" / f"step-{steps}").exists()

    def solve_dense(self) -> None:
        """Solve the test problems with the dense model."""
        self._solve({self.records / f"{DENSE}.jsonl": ["--model", self.model, "--policies"]}, self.rows)

    def choose_windows(self) -> dict[tuple[str, int], int]:
        """Return the window of each training-free policy and compression with which validation problems go well longest.

        It is one that is possible at equal bytes too.
        """
        outs, calls = {}, {}
        for names, (w, compressions) in product(self._free(), contenders.WINDOWS.items()):
            out = outs[names, w] = self.windows / f"windows-{w}-{names[0]}.jsonl"
            calls[out] = [*self._untrained(names, w), "--share", *compressions, "--no-dense"]
        self._solve(calls, 16, {"split": "validation"})
        shares: dict[tuple[str, int], dict[int, list[float]]] = {}
        for (_, w), out in outs.items():
            for record in read_records(out)[1]:
                if "budget" in record:
                    of_budget = shares.setdefault((record["policy"], record["budget"]), {})
                    of_budget.setdefault(w, []).append(record["before_error"])
        best = {key: max(by_w, key=lambda w: (len(by_w[w]), fmean(by_w[w]))) for key, by_w in shares.items()}
        budgets = sorted({budget for _, budget in best}, reverse=True)
        compression = dict(zip(budgets, sorted(contenders.COMPRESSIONS), strict=bool(outs)))
        return {(name, compression[budget]): w for (name, budget), w in best.items()}

    def run_untrained(self, windows: dict[tuple[str, int], int]) -> None:
        """Solve the test problems under the training-free policies."""
        calls = {}
        for names, c, w in product(self._free(), contenders.COMPRESSIONS, contenders.WINDOWS):
            names = [name for name in names if windows[name, c] == w]
            if (used := [times for times in contenders.COMPRESSIONS[c] if times in self.compressions]) and names:
                out = self.records / f"at-{c}-window-{w}-{'-'.join(names)}.jsonl"
                calls[out] = [*self._untrained(names, w), "--share", *used, "--no-dense"]
        self._solve(calls, self.rows)
        self._all(self._with_shares(name, ["--model", self.model, "--policies", name]) for name in self.untrained)

    def _free(self) -> list[tuple[str, ...]]:
        """Return the training-free policies in groups that share a command."""
        groups = [tuple(name for name in self.untrained if name != contenders.STATISTICS)]
        groups += [(contenders.STATISTICS,)] if contenders.STATISTICS in self.untrained and self.protect else []
        groups += [] if self.protect else [contenders.COMPRESSING]
        return [group for group in groups if group]

    def _untrained(self, names: Iterable[str], window: int) -> list:
        words = ["--model", self.model, "--policies", *names, "--window", window]
        if contenders.STATISTICS not in names:
            return words
        folder = self.calibrations / f"{contenders.STATISTICS}-{min(contenders.CALIBRATED)}"
        return [*words, "--calibration", folder, "--allocator", "uniform"]

    def _has(self, out: Path, words: list, rows: int, problems: dict | None = None) -> bool:
        """Return whether an evaluation's records are there.

        Args:
            out: file of the records.
            words: options of the policies.
            rows: problems of each kind.
            problems: options of the problems, None for those of the test problems.

        Raises:
            SystemExit: they are of other problems or settings.
        """
        if not out.exists():
            return False
        about, records = read_records(out)
        recorded = about.get("options", {})
        settings = {"kinds": self.kinds, "rows": rows, "size": self.size, "seed": self.seed}
        settings |= self.test if problems is None else problems
        settings |= {name: _values(words, f"--{name}") for name in ("share", "calibration", "equal")}
        if recorded.get("protect_prompt") is not None:
            settings["protect_prompt"] = [self.protect]
        first = SEEDS[settings.get("split", "test")][self.seed * DRAW_SIZE]
        if any(record.get("unit", first) not in range(first, first + DRAW_SIZE) for record in records):
            sys.exit(f"{out} has problems of another seed than {self.seed}: name another folder, or remove this file")
        for name, value in settings.items():
            measured = recorded.get(name)
            if name == "calibration" and measured:  # the folder may have been moved
                measured, value = ([Path(folder).name for folder in folders] for folders in (measured, value or ()))
            if measured != value:
                sys.exit(f"{out} has {name} {measured}, not {value}: name another folder, or remove this file")
        return True

    def _contender(self, name: str) -> list:
        """Return the options that name a trained policy and its model, which comes second."""
        out, options = self.folder / name, contenders.training_options(name)
        model = out / "model" if contenders.trains_base(name) else self.model
        if "uptrain" in options:
            return ["--model", model, "--policies"]
        if "streaming-plus" in options:
            window = options[options.index("--window") + 1]
            return ["--model", model, "--policies", "streaming-llm", "--window", window]
        return ["--model", model, "--policies", "--scorer", out]

    def _solve(self, calls: dict[Path, list], rows: int, problems: dict | None = None) -> None:
        """Run evaluations whose records are not there yet. See :meth:`_has`."""
        absent = {out: words for out, words in calls.items() if not self._has(out, words, rows, problems)}
        new = {out: [*words, "--rows", rows] for out, words in absent.items()}
        self.cells |= dict.fromkeys(new, "eval")
        self._all([self._evaluation(out, words, problems)] for out, words in new.items())

    def _evaluation(self, out: Path, words: list, problems: dict | None = None) -> list:
        fixed = "kvpop eval --task reasoning --dtype float32 --requests 64 --threads 1".split()
        protect = [] if set(words) & set(contenders.COMPRESSING) else ["--protect-prompt", "all" if self.protect else 0]
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


def suffix_of(test: dict[str, float]) -> str:
    """Return what ends the names of records and tables of test problems with some options."""
    return "".join(f"-{name}-{value:g}" for name, value in test.items())


def _values(words: list, option: str) -> list | None:
    """Return what follows an option, or None without it."""
    if option not in words:
        return None
    return list(takewhile(lambda word: not str(word).startswith("--"), words[words.index(option) + 1 :]))


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
