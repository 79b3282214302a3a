"""Table of all registered policies, cost and quality: `make policies`.

On held-out text, at each budget B, it gives perplexity and divergence from dense under the policy, and needles
found (RULER's wording), by a model in float32. Bytes are those of a cache in bfloat16. Then, in minutes
that need a quiet machine, it gives the time of a decode step of the serving kernel alone (attention, scorer
and cache of all layers, without the model's matrix products and without gates), in turn with the same kernel
keeping everything. Each policy has its defaults of serving. It is measured at equal k and, for B >= 512, also
at equal allocated bytes if it takes more pages than a plain policy.

With --calibration DIR... each policy is measured with the shares and the window of a calibration too, in paired rows:
of the last that the policy decided about, else of the first. Equal shares have the policy's default window. --best N
measures only the window and the N other policies that need no scorer and diverged least in a shorter table of this
commit. With --equal bytes there are rows at equal k only where these are also at equal bytes.
`make default-policy` runs calibrations, the table at 2,048 tokens, those at 4,096 and 8,192, and the reasoner's
comparison; stopped at any time, it goes on.

With --prompt N the first N tokens of each text are a prompt. It is protected or, under policies that do so,
compressed at its end. The prompts with needles are prompts as a whole. Without --prompt nothing is protected,
and policies that compress are left out.

Each (policy, B) is appended to benchmarks/results/policies.csv, its times to policy-steps.csv, as soon as it
is done. Another run of the same commit continues after these rows. Nothing is compared or timed unless the
policy gives the dense model's predictions, in float32, where nothing has been evicted.
"""

import argparse
import csv
import hashlib
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import record
from harness import DEMO_MODEL, SHIPPED_SCORER, check_model, say
from policy_cells import EQUAL_BYTES_FROM, Cells

from kvpop_vllm import policies
from kvpop_vllm.argument_types import positive
from kvpop_vllm.calibration.shares import NAME, check_holds_any, has_shares, read_calibration
from kvpop_vllm.calibration.statistics import CONFIG_NAME as STATISTICS_NAME
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.statistics import INTERVAL, estimate
from kvpop_vllm.policies.base import Order

RESULTS = record.RESULTS
HELD_OUT = record.ROOT / "data" / "held-out"
TEXTS = [str(HELD_OUT / f"{name}.jsonl") for name in ("transcripts", "champ", "shakespeare")]
HAYSTACK = str(HELD_OUT / "bible.jsonl")
FILES = {"quality": "policies.csv", "steps": "policy-steps.csv"}
"""Parts of a table and their files, in the order of their measurement."""
ASKED = {
    "quality": "threads model text haystack_text length rows needles seed prompt".split(),
    "steps": "threads model length context requests rounds".split(),
}
SHARED, WINDOW = ", calibrated", "streaming-llm"
"""End of the names of policies with a calibration; the policy that is in every table."""
CALIBRATION = NAME, "queries.*"
"""Files of a calibration that a measurement depends on."""
EQUAL = ("k", "bytes")
CELL = ("scorer", "calibration", "equal", "budget", "policy")
"""Columns that identify a row.

Measurements of the same row differ by commit, settings and, for times, machine.
"""


def main() -> int:
    """Print or measure the table and return the exit code."""
    try:
        options = parse_arguments()
        if options.table:
            print(table(**{part: stored_rows(options, part) for part in FILES}))
            return 0
        return measure(options)
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def parse_arguments():
    """Return the options of the command line."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--scorer", nargs="*", default=[str(SHIPPED_SCORER)], help="of learned policies")
    parser.add_argument("--calibration", nargs="*", default=[], metavar="DIR", help="of this model")
    parser.add_argument("--policies", nargs="+", help="only these, and dense")
    parser.add_argument("--best", type=positive, metavar="N", help="the N best of the table of --from, and the window")
    parser.add_argument(
        "--from", nargs=2, type=positive, default=[2048, 512], metavar=("S", "B"), dest="shorter", help="for --best"
    )
    parser.add_argument("--equal", nargs="+", choices=EQUAL, default=EQUAL, help="equal k, equal bytes, or both")
    parser.add_argument("--budget", nargs="+", type=positive, default=[256, 512, 1024])
    parser.add_argument("--data", nargs="+", default=TEXTS, help="texts that are predicted")
    parser.add_argument("--haystack", default=HAYSTACK, help="text that needles are hidden in")
    parser.add_argument("--length", type=positive, default=2048, help="tokens of a row, and of a prompt")
    parser.add_argument("--prompt", type=positive, default=0, help="tokens of each text that are a prompt")
    parser.add_argument("--rows", type=positive, default=1, help="of each text")
    parser.add_argument("--needles", type=positive, default=10, help="prompts with a needle")
    parser.add_argument("--context", type=positive, default=4096, help="tokens before a timed step")
    parser.add_argument("--requests", type=positive, default=4, help="decoded together when timed")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of policy and dense")
    parser.add_argument("--parts", nargs="+", choices=list(FILES), help="default: all; with --prompt quality alone")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only print the table of this commit's rows")
    parser.add_argument("--commit", nargs="+", help="with --table: of these, the first that has a row")
    parser.add_argument("--no-csv", action="store_true", help="do not append to benchmarks/results")
    options = parser.parse_args()
    check_model(options)
    if options.commit and not options.table:
        parser.error("--commit chooses rows that are there: give --table with it")
    for path in (*options.data, options.haystack):
        if not options.table and not Path(path).exists():
            parser.error(
                f"there is no {path}: `kvpop distill texts --out data` brings the held-out texts, or give others"
            )
    if max(options.budget) >= options.length or max(options.budget) >= options.context:
        parser.error("a budget must be below --length and --context: lower --budget")
    if options.equal == ["bytes"] and (options.prompt or min(options.budget) < EQUAL_BYTES_FROM):
        parser.error(f"--equal bytes is measured from B = {EQUAL_BYTES_FROM} on and without --prompt: add k to --equal")
    for calibration in options.calibration:
        check_holds_any(calibration, STATISTICS_NAME)
    if options.prompt and "steps" in (options.parts or ()):
        parser.error("a step after a prompt is timed as one without: leave --prompt or steps out")
    if options.best and options.policies:
        parser.error("--best chooses policies: leave --policies out")
    options.parts = options.parts or (["quality"] if options.prompt else list(FILES))
    options.text = " ".join(Path(path).stem for path in options.data)
    options.haystack_text = Path(options.haystack).stem
    options.model_folder, options.model = options.model, Path(options.model).resolve().name
    return options


def measure(options) -> int:
    """Measure all rows, print the table and return the exit code, 1 if a row is missing."""
    import torch

    torch.set_num_threads(options.threads)
    if record.KEY["commit"].endswith("+"):
        say("tracked files differ from the commit: no row can be taken over, all is measured")
    cells, problems = Cells(options), 0
    settings = [(None, cells.setting(None, None, "k"))]
    for budget, spec in itertools.product(options.budget, chosen(options)):
        for equal in options.equal:
            try:
                setting = cells.setting(spec, budget, equal)
                if setting is None and "k" not in options.equal:  # its equal bytes are those of equal k
                    setting = cells.setting(spec, budget, "k")
            except ConfigError as error:
                say(f"left out: {error}")
                problems += options.policies is not None
                continue
            settings += [(spec, setting)] if setting else []
    tables = {part: stored_rows(options, part) for part in FILES}
    for part in options.parts:
        done, tables[part] = tables[part], {}
        for spec, setting in [*settings]:
            if part == "steps" and spec and policies.get(spec.policy).order is Order.ROUNDS:
                say(f"not timed: {spec.name} makes its scores every so many steps, more than are timed")
            elif row := cell(options, cells, part, done, spec, setting):
                tables[part][key_of(row)] = row
            else:
                settings.remove((spec, setting))
                problems += 1
    print(table(**tables))
    return int(problems > 0)


def chosen(options) -> list:
    """Return the policies that are compared; those that compress prompts need one.

    Raises:
        ConfigError: a policy that was asked for cannot be compared.
    """
    specs, left_out = in_registry(options.scorer, options.model_folder, options.calibration)
    for line in left_out:
        say(f"left out: {line}")
    names = [spec.name for spec in specs]
    if options.best:
        options.policies = best(options)
    if unknown := set(options.policies or ()) - {*names}:
        raise ConfigError(f"{sorted(unknown)[0]!r} cannot be compared: choose from {', '.join(names)}")
    compared = []
    for spec in specs:
        compresses = policies.get(spec.policy).compresses
        if compresses and not options.prompt:
            say(f"left out: {spec.name} compresses a prompt at its end, and these texts have none: give --prompt")
        elif spec.name in (options.policies or names):
            prompt = {"prompt" if compresses else "protect": options.prompt}
            compared.append(replace(spec, **prompt))
            folder = calibration_of(spec.policy, options.calibration)
            if not compresses and is_calibrated(spec.policy, folder):
                compared[-1] = replace(compared[-1], allocator="uniform") if spec.calibration else compared[-1]
                named = replace(spec.calibrated(folder), name=f"{spec.name}{SHARED}")
                compared.append(replace(named, **prompt))
    return compared


def calibration_of(policy: str, folders: Sequence[str]) -> str | None:
    """Return the calibration that a policy is measured with: the last that it decided about, else the first."""
    with_shares = filter(has_shares, folders)
    of_policy = [folder for folder in with_shares if read_calibration(folder).decided_by == policy]
    return of_policy[-1] if of_policy else next(iter(folders), None)


def is_calibrated(policy: str, folder: str | None) -> bool:
    """Return whether a calibration has shares or a window for a policy."""
    if not has_shares(folder):
        return False
    calibration = read_calibration(folder).of_policy(policy)
    return calibration.shares is not None or policy in calibration.windows


def best(options) -> list[str]:
    """Return the policies without a scorer that diverge least at equal bytes in the shorter table, and the window.

    Raises:
        ConfigError: this commit has no such table.
    """
    length, budget = map(str, options.shorter)
    shorter = argparse.Namespace(**(vars(options) | {"length": length}))
    rows = [row for row in stored_rows(shorter, "quality").values() if row["budget"] == budget and not row["scorer"]]
    kl: dict[str, float] = {}
    for row in rows:  # rows at equal bytes come after those at equal k, and take their place where there are any
        kl[row["policy"]] = float(row["kl"])
    if not kl:
        raise ConfigError(f"--best needs the table of {length} tokens at B = {budget} of this commit: measure it first")
    lowest: dict[str, float] = {}
    for name, value in kl.items():
        plain = name.removesuffix(SHARED)
        lowest[plain] = min(value, lowest.get(plain, value))
    lowest.pop(WINDOW, None)
    return [*sorted(lowest, key=lowest.get)[: options.best], WINDOW]


def in_registry(scorers: Iterable[str], model: str | Path, calibrations: Sequence[str] = ()) -> tuple[list, list[str]]:
    """Return a spec for every registered policy that evicts.

    Policies that need a scorer appear once for each scorer of their kind.

    Args:
        scorers: scorer folders.
        model: folder of the model.
        calibrations: folders of ``kvpop calibrate``.

    Returns:
        The specs, named after their policies (and folders, if a policy has several), and for each policy
        that is left out a line with the reason.
    """
    from kvpop_vllm.evaluation.policies import learned, training_free

    classes, broken = policies.loadable()
    folders: dict[str, list] = {}
    for folder in scorers:
        spec, _ = learned(folder, model)
        folders.setdefault(spec.policy, []).append(spec)
    specs = []
    for cls in classes:
        if cls.keeps_all:
            continue
        if cls.calibrated and not calibrations:
            broken.append(f"{cls.name} needs statistics of the model's queries: give --calibration DIR")
            continue
        if cls.scorer_kind is None:
            specs.append(training_free(cls.name).measured(calibration_of(cls.name, calibrations)))
            continue
        mine = folders.get(cls.name, [])
        if not mine:
            broken.append(f"{cls.name} needs a scorer of kind {cls.scorer_kind!r}: give --scorer DIR")
        single = len(mine) == 1
        specs += [replace(c, name=cls.name if single else f"{cls.name}, {c.scorer}") for c in mine]
    return specs, broken


def cell(options, cells, part: str, done: dict[tuple, dict], spec, setting) -> dict | None:
    """Return a row that exists, or measure and append it. None is returned if it cannot be measured."""
    scorer = fingerprint(Path(spec.scorer)) if spec and spec.scorer else ""
    calibration = fingerprint(Path(spec.calibration), *CALIBRATION) if spec and spec.calibration else ""
    key = scorer, calibration, setting.equal, str(setting.budget if spec else ""), spec.name if spec else "dense"
    if key in done:
        return done[key]
    cells.load()
    try:
        row = getattr(cells, part)(spec, setting, asked_of(options, part) | dict(zip(CELL, key, strict=True)))
    except ConfigError as error:
        say(f"left out: {error}")
        return None
    if row is not None and not options.no_csv:
        record.append(RESULTS / FILES[part], [row])
    return row and record.KEY | row


def key_of(row: dict) -> tuple[str, ...]:
    """Return the values that identify a row; older rows lack a column."""
    return tuple(row.get(column) or "" for column in CELL)


def asked_of(options, part: str) -> dict[str, str]:
    """Return the settings that identify a measurement."""
    return {column: str(vars(options)[column]) for column in ASKED[part]}


def fingerprint(source: Path, *patterns: str) -> str:
    """Return the name of a folder or file with a hash of its contents; in a folder by default of the files of a scorer."""
    digest = hashlib.sha256()
    inside = sorted(path for pattern in patterns or ("kvpop_*",) for path in source.glob(pattern) if path.is_file())
    for path in [source] if source.is_file() else inside:
        digest.update(path.read_bytes())
    return f"{source.name}@{digest.hexdigest()[:8]}"


def stored_rows(options, part: str) -> dict[tuple, dict]:
    """Return the rows of a commit with the same settings, by what identifies them.

    Times must be of this machine, unless the table is of given commits. Commits with changed files have no
    rows.
    """
    path, rows = RESULTS / FILES[part], {}
    if not path.exists():
        return rows
    settings = asked_of(options, part)
    if part == "steps" and not options.commit:
        settings |= {name: str(record.KEY[name]) for name in ("machine", "cores")}
    with path.open(newline="") as file:
        alike = [row for row in csv.DictReader(file) if settings.items() <= row.items()]
    for commit in options.commit or [record.KEY["commit"]]:
        for row in alike:
            if row["commit"] == commit and not commit.endswith("+"):
                rows.setdefault(key_of(row), row)
    return rows


def table(quality: dict[tuple, dict], steps: dict[tuple, dict]) -> str:
    """Return a Markdown table with a line for each row of quality, by budget and divergence.

    A line that holds for equal bytes too says so. Commits are those of the row and, if different, of its
    times.
    """
    head = "B | policy | equal | k | KiB | perplexity | KL | KL over equal shares"
    head += " | needles, exact (partial) | commit"
    lines = [f"| {head} | ms per step | dense / it |", "|---" * 12 + "|"]
    stateless = [row for row in quality.values() if (row["equal"], row["state"]) == ("k", "0")]
    for key, row in sorted(quality.items(), key=lambda item: order(item[1])):
        alike = [int(plain_row["allocated_bytes"]) for plain_row in stateless if plain_row["budget"] == row["budget"]]
        size, plain = int(row["allocated_bytes"]), statistics.mode(alike) if alike else 0
        same_bytes = int(row["budget"] or 0) >= EQUAL_BYTES_FROM and size <= plain
        equal = "k, bytes" if same_bytes and row["equal"] == "k" else row["equal"] if row["budget"] else ""
        perplexity, kl, exact, partial = (float(row[name]) for name in ("perplexity", "kl", "exact", "partial"))
        commits, times, losses = row["commit"], "| |", losses_of(row)
        interval = span(estimate("kl", *losses[:1], units=losses[1]), "kl") if losses[0] else ""
        over = ""
        if row["policy"].endswith(SHARED):
            plain_row = with_equal_shares(row, quality.values())
            if plain_row and losses_of(plain_row)[1] == losses[1]:
                ratio = estimate("ratio", losses[0], losses_of(plain_row)[0], units=losses[1])
                over = f"{ratio['ratio']:.2f}{span(ratio, 'ratio')}"
        if time := steps.get(key):
            ms, *ratios = (float(time[name]) for name in ("step_ms", "dense_over_it", "least", "largest"))
            times = "{:.2f} | {:.2f} ({:.2f} to {:.2f}) |".format(ms, *ratios)
            commits = ", ".join(dict.fromkeys((commits, time["commit"])))
        lines.append(
            f"| {row['budget'] or 'all'} | {row['policy']} | {equal} | {row['topk']} | {size / 1024:,.0f} "
            f"| {perplexity:.2f} | {kl:.4f}{interval} | {over} | {exact:.2f} ({partial:.2f}) | {commits} | {times}"
        )
    machines = {f"Times on {row['machine']}, {row['cores']} cores." for row in steps.values()}
    return "\n".join([*lines, *sorted(machines)])


def losses_of(row: dict) -> tuple[list[float], list[int]]:
    """Return the divergence of each row of text, and the documents that these are of, empty in old rows."""
    return [float(kl) for kl in (row["kls"] or "").split()], [int(unit) for unit in (row["units"] or "").split()]


def span(line: dict, name: str) -> str:
    """Return the interval of a value as text, or nothing if it has none."""
    interval = line.get(name + INTERVAL)
    return " ({:.4f} to {:.4f})".format(*interval) if interval else ""


def with_equal_shares(row: dict, rows: Iterable[dict]) -> dict | None:
    """Return the row of the same policy and settings without a calibration, None if there is none.

    A policy without a state has one row for equal k and equal bytes, which takes no more bytes than one with shares.
    """
    same = {"policy": row["policy"].removesuffix(SHARED), "budget": row["budget"], "scorer": row["scorer"]}
    plain_rows = {plain["equal"]: plain for plain in rows if same.items() <= plain.items()}
    if row["equal"] in plain_rows:
        return plain_rows[row["equal"]]
    plain = plain_rows.get("k")
    return plain if plain and int(plain["allocated_bytes"]) <= int(row["allocated_bytes"]) else None


def order(row: dict) -> tuple:
    """Return the sort key of a line."""
    return int(row["budget"] or 0), row["equal"] == "bytes", float(row["kl"])


if __name__ == "__main__":
    sys.exit(main())
