"""Engines that take turns: one child process each (child.py), on the same prompts."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import record
from child import BYTES, LEAST_BUDGET, short_prompts
from record import ROOT

from kvpop_vllm.argument_types import positive

MEASURES = "decode", "prefill", "capacity", "load", "chat", "plain", "cartridge"
DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PEERS = ROOT / "build" / "peers" / "bin" / "python"
# tokens between kvpress's compressions; its default of 512 would keep up to 512 above the budget
PEER_INTERVAL = 64
PEER_NAMES = ("transformers", "kvpress, key norm")
PEER = [str(PEERS), str(ROOT / "benchmarks" / "peer.py")]
"""Command of a peer's process."""
CHILD = [sys.executable, str(ROOT / "benchmarks" / "child.py")]
SHIPPED_SCORER = ROOT / "examples" / "scorers" / "smollm2-135m-kvpop"
EAGER, NO_HITS, DRAFTS, BEFORE, BEFORE_AGAIN = "eager", "no hits", "drafts", "before", "before again"
"""Twins of a configuration: without compilation, without prefix caching, with speculative decoding, and two that another
checkout of this repository serves. The ratio of these two to one another shows what the measurement resolves."""
NEAR_TIE = 0.5  # nats: four steps of a bfloat16 logit between 16 and 32


@dataclass(frozen=True)
class Configuration:
    """Engine that takes part in a measurement.

    Attributes:
        policy: name of a policy, of a peer, or of stock vLLM's configuration.
        scorer: name of kvpop's scorer, or nothing.
        twin: EAGER, NO_HITS, DRAFTS, BEFORE or BEFORE_AGAIN if it is a twin of another configuration, or nothing.
        settings: settings of its child process that go before the options of the command line: ``policy``, its
            ``kv_policy`` or None for stock; the ``command`` of a peer; options of a twin.
    """

    policy: str
    scorer: str = ""
    twin: str = ""
    settings: dict = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.policy, self.scorer, self.twin)))

    def with_twin(self, twin: str, **changes) -> Configuration:
        """Return a twin whose settings differ by ``changes``."""
        return replace(self, twin=twin, settings=self.settings | changes)

    @property
    def elsewhere(self) -> bool:
        """Whether another checkout serves it."""
        return self.twin in (BEFORE, BEFORE_AGAIN)

    def rivals(self) -> dict[str, Configuration]:
        """Return the configurations that its values are compared with, by their names in a table."""
        rivals = {"stock": DENSE}
        if self.twin == EAGER:
            rivals["compiled"] = self.with_twin("")
        if self.twin == DRAFTS:
            rivals |= {"no drafts": self.with_twin(""), "stock with drafts": DENSE.with_twin(DRAFTS)}
        if not self.twin:
            rivals["no hits"] = self.with_twin(NO_HITS)
        if self.twin in ("", BEFORE_AGAIN):
            rivals["before"] = self.with_twin(BEFORE)
        return {label: rival for label, rival in rivals.items() if rival != self}


DENSE = Configuration("dense", settings={"policy": None})


@contextmanager
def engines(options, chosen: list[Configuration] | None = None) -> Iterator[dict[Configuration, Engine]]:
    """Yield the engines of configurations; all are stopped at the end.

    The program exits with a message if one dies.

    Args:
        options: options of the command line.
        chosen: configurations, by default those of :func:`configurations`.
    """
    check_model(options)
    with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
        started: dict[Configuration, Engine] = {}
        try:
            for configuration in chosen or configurations(options, Path(folder)):
                started[configuration] = Engine(configuration, options, Path(folder))
            yield started
        except EngineError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for engine in started.values():
                engine.stop()


def parser_of_measure(measure: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all measures: which one, of which model.

    Args:
        measure: one of :data:`MEASURES`.
        description: docstring whose first line is shown.
    """
    parser = record.parser_of(description)
    parser.add_argument("--measure", choices=MEASURES, default=measure, help="each has options of its own")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="folder")
    return parser


def parser_of_any(measure: str, description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all measures of engines, with a policy or without.

    Args:
        measure: one of :data:`MEASURES`.
        description: docstring whose first line is shown.
        rounds: default of ``--rounds``.
    """
    parser = parser_of_measure(measure, description)
    parser.add_argument("--rounds", type=positive, default=rounds, help="turns of each configuration")
    threads = max(1, record.KEY["cores"] - 1)
    parser.add_argument("--threads", type=positive, default=threads, help="as vllm serve, all cores but 1")
    parser.add_argument("--eager", action="store_true", help="instead of the default compiled mode")
    parser.add_argument(
        "--dtype", choices=BYTES, default="bfloat16", help="a CPU without AVX-512 multiplies float32 only"
    )
    parser.add_argument("--no-csv", action="store_true", help="do not append to benchmarks/results")
    defaults = {"load_format": "auto", "prefix_caching": False, "without_hits": False, "drafts": 0}
    parser.set_defaults(**defaults, checkout=str(ROOT))
    return parser


def parser_of(measure: str, description: str, *, budget: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all measures of policies.

    Args:
        measure: one of :data:`MEASURES`.
        description: docstring whose first line is shown.
        budget: default of ``--budget``.
        rounds: default of ``--rounds``.
    """
    parser = parser_of_any(measure, description, rounds=rounds)
    parser.add_argument("--budget", type=int, default=budget, help="B of the policies")
    parser.add_argument("--policies", nargs="+", default=["streaming-llm", "kvpop"], help="compared with stock")
    parser.add_argument("--scorer", default=str(SHIPPED_SCORER), help="of kvpop")
    parser.add_argument("--calibration", metavar="DIR", help="of triattention, which needs one")
    parser.set_defaults(protect_prompt=False, eager_too=False, against=None, peers=False, speculative=0)
    return parser


def configurations(options, folder: Path) -> list[Configuration]:
    """Return stock, each policy, then twins and peers as the options say. Files of scorers may be written into a folder."""
    policies = [configuration_of(name, options, folder) for name in dict.fromkeys(options.policies)]
    chosen = [DENSE, *policies]
    twins = {
        EAGER: options.eager_too and {"eager": True},
        NO_HITS: options.without_hits and {"prefix_caching": False},
    }
    if options.against:
        twins |= dict.fromkeys((BEFORE, BEFORE_AGAIN), {"checkout": str(Path(options.against).resolve())})
    for twin, changes in twins.items():
        if changes:
            chosen += [configuration.with_twin(twin, **changes) for configuration in policies]
    if options.speculative:
        chosen += [configuration.with_twin(DRAFTS, drafts=options.speculative) for configuration in chosen]
    if options.peers:
        check_peers()
        common = {
            "command": PEER,
            "short_prompts": short_prompts(options.budget),
            "interval": PEER_INTERVAL,
            "dtype": options.dtype,
        }
        for name, budget in zip(PEER_NAMES, (None, options.budget), strict=True):
            chosen.append(Configuration(name, settings=common | {"kvpress_budget": budget}))
    return chosen


def configuration_of(name: str, options, folder: Path) -> Configuration:
    """Return the configuration of a policy."""
    policy, scorer = {"policy": name, "budget": options.budget}, ""
    if options.protect_prompt:
        policy["protect_prompt"] = True
    if name == "triattention":
        policy["calibration"] = options.calibration
    elif name == "kvpop":
        # heads of unequal budgets may not hold the short prompts whose outputs are compared
        policy |= {"scorer": str(Path(options.scorer)), "allocator": "uniform"}
        scorer = Path(options.scorer).name
    elif name in ("kvpop-mlp", "kvpop-linear"):
        # none is shipped; an untrained one takes as long
        from kvpop_vllm.scorers.untrained import init_scorer

        policy["scorer"] = str(folder / name)
        init_scorer(options.model, policy["scorer"], scorer=name.removeprefix("kvpop-"))
    return Configuration(name, scorer, settings={"policy": policy})


def check_peers() -> None:
    """Exit with a message if the peers have no environment."""
    if not PEERS.is_file():
        sys.exit("the peers have no environment: run `make peers`")


def check_model(options) -> None:
    """Exit with a message if the model does not exist."""
    if not (Path(options.model) / "config.json").is_file():
        sys.exit(f"no model in {options.model}: run `make model`")


def check_budget(parser, options) -> None:
    """Exit with a message if no outputs could be compared."""
    if options.budget < LEAST_BUDGET:
        parser.error(f"a budget of {options.budget} does not hold the short prompts: raise --budget to {LEAST_BUDGET}")


def start(started: dict) -> None:
    """Load and compile all engines at once."""
    say("starting (each engine compiles for about a minute when it is new to this machine)")
    for name, reply in ask_all(started, "start"):
        say(f"{name}: ready after {reply['seconds']:.0f} s, KV pool {reply['pool_bytes'] >> 20} MiB")


def output_problems(started: dict) -> list[str]:
    """Return one line per configuration whose greedy tokens on short prompts differ from stock's."""
    short = dict(ask_all(started, "short"))
    return [problem for name in started if name != DENSE and (problem := differs(str(name), short[DENSE], short[name]))]


def differs(name: str, dense: list, measured: list) -> str | None:
    """Return the first difference between two lists of greedy tokens, or None.

    Tokens and log-probabilities must be stock's up to the first near tie.
    """
    compared = 0
    for prompt, (dense_tokens, other_tokens) in enumerate(zip(dense, measured, strict=True)):
        for step, (expected, actual) in enumerate(zip(dense_tokens, other_tokens, strict=True)):
            compared += 1
            place = f"{name}, prompt {prompt}, token {step}"
            if expected["token"] != actual["token"]:
                if expected["gap"] > NEAR_TIE:
                    return f"{place}: {actual['token']} instead of {expected['token']}, gap {expected['gap']:.2f}"
                break  # after this the texts differ
            if abs(expected["logprob"] - actual["logprob"]) > NEAR_TIE:
                return f"{place}: log-probability {actual['logprob']:.2f}, stock {expected['logprob']:.2f}"
    total = sum(map(len, dense))
    say(f"{name}: {compared} of {total} greedy tokens compared with stock before a near tie")
    return None if compared >= total / 2 else f"{name}: near ties left only {compared} of {total} tokens to compare"


def compare(
    options,
    measure,
    file: Path,
    keys: tuple[str, ...],
    value: str,
    *,
    judged: bool = True,
    starts: int = 1,
    shown: tuple[str, ...] = (),
) -> int:
    """Start the engines, check their outputs, measure, print and append.

    Args:
        options: options of the command line.
        measure: ``(started, options) -> rows``, called once outputs are found to be stock's, if they are ``judged``.
        file: CSV file.
        keys: columns other than ``configuration`` whose values are compared separately.
        value: column that is compared.
        judged: True to compare outputs and values with stock's.
        starts: times that all engines are started and measured.
        shown: further columns whose medians are in the table.

    Returns:
        The exit code.
    """
    rows, problems = [], []
    for _ in range(starts):
        with engines(options) as started:
            start(started)
            problems = output_problems(started) if judged else []
            rows += [] if problems else measure(started, options)
        if problems:
            break
    return conclude(problems, report(rows, keys, value, judged, shown), rows, file, options)


def conclude(problems: list[str], table: str, rows: list[dict], file: Path, options) -> int:
    """Print a table of the rows and append them to a file, or print the problems; return the exit code.

    Rows of another checkout are left out of the file, and eager ones have the name of their compiled twin.
    """
    for problem in problems:
        print(f"output check failed, no ratio is given: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(table)
    if not options.no_csv:
        record.append(
            file, [row | {"configuration": file_name(row)} for row in rows if not row["configuration"].elsewhere]
        )
    return 0


def file_name(row: dict) -> str:
    """Return the name of a row's configuration in a file, where the column ``mode`` says that it is eager."""
    configuration = row["configuration"]
    return str(configuration.with_twin("") if configuration.twin == EAGER else configuration)


def report(
    rows: list[dict], keys: tuple[str, ...], value: str, judged: bool = True, shown: tuple[str, ...] = ()
) -> str:
    """Return a table of medians over rounds, with the ratios of the rounds to stock and to each twin.

    A ratio is given as its median, least and largest, to another checkout with a 95% interval of the median. The
    arguments are those of :func:`compare`.
    """
    groups: dict[tuple, dict[Configuration, list[dict]]] = {}
    for row in rows:
        place = groups.setdefault(tuple(row[key] for key in keys), {})
        place.setdefault(row["configuration"], []).append(row)
    lines = ["  ".join([*keys, "configuration", value, *shown, "it / another: median (least to largest)"])]
    for place, rows_of in groups.items():
        values = {name: [float(row[value]) for row in rows] for name, rows in rows_of.items()}
        for name, numbers in values.items():
            line = [*map(str, place), f"{name!s:32}", f"{statistics.median(numbers):10.1f}"]
            line += [f"{statistics.median(float(row[column]) for row in rows_of[name]):.2f}" for column in shown]
            for label, rival in name.rivals().items() if judged else ():
                if rival in values:
                    ratios = [number / theirs for number, theirs in zip(numbers, values[rival], strict=True)]
                    text = f"/ {label} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                    if rival.elsewhere:
                        text += ", 95% interval {:.3f} to {:.3f}".format(*median_interval(ratios))
                    line.append(text)
            lines.append("  ".join(line))
    return "\n".join(lines)


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return an interval that holds the distribution's median with a probability of at least 0.95.

    Its ends are order statistics of ``values``, by the binomial distribution of the number of values below
    the median. No distribution is assumed. Fewer than six values give the least and the largest, which hold
    the median less often.
    """
    n, rank, lower_tail = len(values), 0, 0.0
    while (lower_tail := lower_tail + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    ordered = sorted(values)
    return ordered[max(0, rank - 1)], ordered[min(n - 1, n - rank)]


def setting(options, configuration: Configuration) -> dict:
    """Return the columns that the rows of all benchmarks of engines have."""
    from importlib.metadata import version

    eager = options.eager or configuration.twin == EAGER or configuration.policy in PEER_NAMES
    return {
        "threads": options.threads,
        "vllm": version("vllm"),
        "budget": options.budget,
        "mode": ("eager" if eager else "compiled") + f", {options.dtype}" * (options.dtype != "bfloat16"),
        "configuration": configuration,
    }


def add_pool(parser) -> None:
    """Add the option for the size of the KV pool, for benchmarks in which stock is short of memory."""
    parser.add_argument(
        "--dense-requests", type=float, default=4.0, help="dense requests of 8192 tokens that fit the pool"
    )


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"[bench] {line}", flush=True)


class EngineError(Exception):
    """Error of a child; the message gives its cause."""


class Engine:
    """Parent's end of one child process."""

    def __init__(self, configuration: Configuration, options, folder: Path):
        self.name, settings = str(configuration), configuration.settings
        self.log = folder / f"{self.name}.log"
        # numba, by which vLLM looks for n-grams, would give OpenMP as many threads as there are cores
        threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(options.threads))
        env = os.environ | threads | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if "checkout" in settings:
            env["PYTHONPATH"] = settings["checkout"]
        env |= settings.get("env", {})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*settings.get("command", CHILD), json.dumps(vars(options) | settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )

    def send(self, command: str, **arguments) -> None:
        """Send a command.

        Raises:
            EngineError: the child has died.
        """
        try:
            self.process.stdin.write(json.dumps([command, arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self):
        """Return the reply to a command; lines of progress are printed.

        Raises:
            EngineError: the child has died.
        """
        while line := self.process.stdout.readline():
            reply = json.loads(line)
            if "progress" not in reply:
                return reply
            say(f"{self.name}: {reply['progress']}")
        raise self._died()

    def ask(self, command: str, **arguments):
        """Send a command and return its reply."""
        self.send(command, **arguments)
        return self.receive()

    def _died(self) -> EngineError:
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        return EngineError(f"the {self.name} engine died: {lines[-1] if lines else 'without a word'}")

    def stop(self) -> None:
        """Kill the child."""
        self.process.kill()
        self.process.wait()


def ask_all(engines: dict, command: str, **arguments):
    """Send a command to all engines at once; yield each name with its reply."""
    for engine in engines.values():
        engine.send(command, **arguments)
    for name, engine in engines.items():
        yield name, engine.receive()
