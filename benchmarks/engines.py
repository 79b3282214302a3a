"""Engines that take turns: one child process each (engine_child.py), on the same prompts."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import record
from record import ROOT

from kvpop_vllm.argument_types import positive

DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PEERS = ROOT / "build" / "peers" / "bin" / "python"
# tokens between kvpress's compressions; its default of 512 would keep up to 512 above the budget
PEER_INTERVAL = 64
PEER_NAMES = ("transformers", "kvpress, key norm")
PEER = [str(PEERS), str(ROOT / "benchmarks" / "peer.py")]
"""Command of a peer's process."""
CHILD = [sys.executable, str(ROOT / "benchmarks" / "engine_child.py")]
SHIPPED_SCORER = ROOT / "examples" / "scorers" / "smollm2-135m-kvpop"
EAGER = " eager"
"""Suffix of a policy's eager twin."""
NO_HITS = ", no hits"
"""Suffix of a policy's twin without prefix caching."""
DRAFTS = ", drafts"
"""Suffix of a configuration's twin with speculative decoding."""
BEFORE = ", before"
"""Suffix of a policy's twin that another checkout of this repository serves."""
BEFORE_AGAIN = ", before again"
"""Suffix of a second twin of the other checkout: its ratio to the first one shows what the measurement resolves."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number of each dtype."""
NEAR_TIE = 0.5  # nats: four steps of a bfloat16 logit between 16 and 32
SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils when it is heated, and it freezes when",
    "Once upon a time there was a miller who had three sons. When he died, the eldest got the mill,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # several pieces of a prefill
    " ".join(f"Line {i} of the list says that {i} plus {i} is {2 * i}." for i in range(30)),
)


LEAST_BUDGET, LONG_BUDGET = 128, 768
"""Smallest budgets that hold the tokens, prompt and answer, of all short prompts but the last, and of the last."""


def short_prompts(budget: int) -> tuple[str, ...]:
    """Return the short prompts that a budget in slots holds, with their answers."""
    return SHORT_PROMPTS if budget >= LONG_BUDGET else SHORT_PROMPTS[:-1]


@contextmanager
def engines(options, settings_of: dict | None = None):
    """Yield name -> :class:`Engine` for stock, every policy and peers; all are stopped at the end.

    The program exits with a message if one dies.

    Args:
        options: options of the command line.
        settings_of: name -> settings of an engine, by default those of :func:`configurations`.
    """
    check_model(options)
    with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
        started = {}
        try:
            for name, settings in (settings_of or configurations(options, Path(folder))).items():
                started[name] = Engine(name, settings, options, Path(folder))
            yield started
        except EngineError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for engine in started.values():
                engine.stop()


def parser_of_any(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks of engines, with a policy or without.

    Args:
        description: docstring of the script, whose first line is shown.
        rounds: default of ``--rounds``.
    """
    parser = record.parser_of(description)
    parser.add_argument("--model", default=str(DEMO_MODEL))
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


def parser_of(description: str, *, budget: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks of policies.

    Args:
        description: docstring of the script, whose first line is shown.
        budget: default of ``--budget``.
        rounds: default of ``--rounds``.
    """
    parser = parser_of_any(description, rounds=rounds)
    parser.add_argument("--budget", type=int, default=budget, help="B of the policies")
    parser.add_argument("--policies", nargs="+", default=["streaming-llm", "kvpop"], help="compared with stock")
    parser.add_argument("--scorer", default=str(SHIPPED_SCORER), help="of kvpop")
    parser.add_argument("--calibration", metavar="DIR", help="of triattention, which needs one")
    parser.set_defaults(protect_prompt=False, eager_too=False, against=None, peers=False, speculative=0)
    return parser


def configurations(options, folder: Path) -> dict:
    """Return name -> settings of an engine.

    Settings are ``policy``, its ``kv_policy`` or None for stock, ``eager``, options of twins, and the ``command`` of a
    peer.
    """
    policies = {name: {"policy": name, "budget": options.budget} for name in options.policies}
    for name in set(policies) & {"triattention"}:
        policies[name]["calibration"] = options.calibration
    # none is shipped; an untrained one takes as long
    for name in set(policies) & {"kvpop-mlp", "kvpop-linear"}:
        from kvpop_vllm.scorers.untrained import init_scorer

        init_scorer(options.model, str(folder / name), scorer=name.removeprefix("kvpop-"))
        policies[name]["scorer"] = str(folder / name)
    if "kvpop" in policies:
        scorer = Path(options.scorer)
        # heads of unequal budgets may not hold the short prompts whose outputs are compared
        policies[f"kvpop, {scorer.name}"] = policies.pop("kvpop") | {"scorer": str(scorer), "allocator": "uniform"}
    if options.protect_prompt:
        policies = {name: policy | {"protect_prompt": True} for name, policy in policies.items()}
    settings = {
        name: {"policy": policy, "eager": options.eager} for name, policy in {"dense": None, **policies}.items()
    }
    twins = {
        EAGER: options.eager_too and {"eager": True},
        NO_HITS: options.without_hits and {"prefix_caching": False},
    }
    if options.against:
        twins |= dict.fromkeys((BEFORE, BEFORE_AGAIN), {"checkout": str(Path(options.against).resolve())})
    for suffix, changes in twins.items():
        if changes:
            settings |= {name + suffix: settings[name] | changes for name in policies}
    if options.speculative:
        settings |= {name + DRAFTS: changed | {"drafts": options.speculative} for name, changed in settings.items()}
    if options.peers:
        check_peers()
        common = {
            "command": PEER,
            "short_prompts": short_prompts(options.budget),
            "interval": PEER_INTERVAL,
            "dtype": options.dtype,
        }
        for name, budget in zip(PEER_NAMES, (None, options.budget), strict=True):
            settings[name] = common | {"kvpress_budget": budget}
    return settings


def check_peers() -> None:
    """Exit with a message if the peers have no environment."""
    if not PEERS.is_file():
        sys.exit("the peers have no environment: run `make peers`")


def check_model(options) -> None:
    """Exit with a message if the model does not exist."""
    if not (Path(options.model) / "config.json").is_file():
        sys.exit(f"no model in {options.model}: run `make model`")


def token_bytes(model: str | Path, dtype: str) -> int:
    """Return the bytes of a token's keys and values in stock's cache of a dtype."""
    config = json.loads((Path(model) / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return BYTES[dtype] * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width


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
    """Return one line per policy whose greedy tokens on short prompts differ from stock's."""
    short = dict(ask_all(started, "short"))
    others = [name for name in started if name != "dense"]
    return [problem for name in others if (problem := differs(name, short["dense"], short[name]))]


def differs(name: str, dense: list, other: list) -> str | None:
    """Return the first difference between two lists of greedy tokens, or None.

    Tokens and log-probabilities must be stock's up to the first near tie.
    """
    compared = 0
    for prompt, (expected, got) in enumerate(zip(dense, other, strict=True)):
        for step, (e, g) in enumerate(zip(expected, got, strict=True)):
            compared += 1
            if e["token"] != g["token"]:
                if e["gap"] > NEAR_TIE:
                    return f"{name}, prompt {prompt}, token {step}: {g['token']} instead of {e['token']}, gap {e['gap']:.2f}"
                break  # after this the texts differ
            if abs(e["logprob"] - g["logprob"]) > NEAR_TIE:
                return f"{name}, prompt {prompt}, token {step}: log-probability {g['logprob']:.2f}, stock {e['logprob']:.2f}"
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
        keys: columns beside ``configuration`` whose values are compared separately.
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
        here = [row for row in rows if not row["configuration"].endswith((BEFORE, BEFORE_AGAIN))]
        record.append(file, [row | {"configuration": row["configuration"].removesuffix(EAGER)} for row in here])
    return 0


def report(
    rows: list[dict], keys: tuple[str, ...], value: str, judged: bool = True, shown: tuple[str, ...] = ()
) -> str:
    """Return a table of medians over rounds, with the ratios of the rounds to stock and to each twin.

    A ratio is given as its median, least and largest, to another checkout with a 95% interval of the median. The
    arguments are those of :func:`compare`.
    """
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        place = groups.setdefault(tuple(row[key] for key in keys), {})
        place.setdefault(row["configuration"], []).append(row)
    lines = ["  ".join([*keys, "configuration", value, *shown, "it / another: median (least to largest)"])]
    for place, rows_of in groups.items():
        values = {name: [float(row[value]) for row in rows] for name, rows in rows_of.items()}
        for name, mine in values.items():
            line = [*map(str, place), f"{name:32}", f"{statistics.median(mine):10.1f}"]
            line += [f"{statistics.median(float(row[column]) for row in rows_of[name]):.2f}" for column in shown]
            rivals = {"stock": "dense", "compiled": name.removesuffix(EAGER), "no hits": name + NO_HITS}
            if name.endswith(DRAFTS):
                rivals |= {"no drafts": name.removesuffix(DRAFTS), "stock with drafts": "dense" + DRAFTS}
            for label, rival in (rivals | {"before": policy_of(name) + BEFORE}).items() if judged else ():
                if rival != name and rival in values:
                    over = [a / b for a, b in zip(mine, values[rival], strict=True)]
                    ratio = f"/ {label} {statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f})"
                    if rival.endswith(BEFORE):
                        ratio += ", 95% interval {:.3f} to {:.3f}".format(*median_interval(over))
                    line.append(ratio)
            lines.append("  ".join(line))
    return "\n".join(lines)


def policy_of(name: str) -> str:
    """Return the name of a configuration without the suffix of another checkout."""
    return name.removesuffix(BEFORE).removesuffix(BEFORE_AGAIN)


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return an interval that holds the distribution's median with a probability of at least 0.95.

    Its ends are order statistics of ``values``, by the binomial distribution of the number of values below
    the median. No distribution is assumed. Fewer than six values give the least and the largest, which hold
    the median less often.
    """
    n, rank, below = len(values), 0, 0.0
    while (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    ordered = sorted(values)
    return ordered[max(0, rank - 1)], ordered[min(n - 1, n - rank)]


def setting(options, name: str = "") -> dict:
    """Return the columns that the rows of all benchmarks of engines have."""
    from importlib.metadata import version

    eager = options.eager or name.endswith(EAGER) or name in PEER_NAMES
    mode = ("eager" if eager else "compiled") + f", {options.dtype}" * (options.dtype != "bfloat16")
    return {
        "threads": options.threads,
        "vllm": version("vllm"),
        "budget": options.budget,
        "mode": mode,
        "configuration": name,
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

    def __init__(self, name: str, settings: dict, options, folder: Path):
        self.name, self.log = name, folder / f"{name}.log"
        env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
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
