"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration is a child process with an engine of its own (vLLM's default compiled mode). All of them
prefill the same prompts. Then they take turns, A B C A B C ..., while the others sleep. Nothing is called
faster unless every policy gave stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/decode.csv. With --against each policy also runs from another checkout, whose steps are
printed and not written.
"""

import math
import statistics
import sys
from pathlib import Path

import record
from engines import (
    BEFORE,
    EAGER,
    PEER_INTERVAL,
    PEER_NAMES,
    STAGGER,
    WARM_UP,
    ask_all,
    check_budget,
    compare,
    grouped,
    parser_of,
    ratios,
    say,
    setting,
    spread,
)

from kvpop_vllm.argument_types import positive

RESULTS = record.RESULTS / "decode.csv"


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    return compare(options, measure, report, RESULTS, lambda rows: written(rows, options))


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=2048, rounds=5)
    parser.add_argument(
        "--context", nargs="+", type=int, default=[7500], help="tokens of each prompt, about (default 7500)"
    )
    parser.add_argument(
        "--requests", nargs="+", type=positive, default=[8], help="requests decoded together (default 8)"
    )
    parser.add_argument("--steps", type=positive, default=24, help="counted steps of a turn (default 24)")
    parser.add_argument(
        "--peers", action="store_true", help="transformers and kvpress too, with --requests 1 (`make peers` first)"
    )
    parser.add_argument(
        "--against", metavar="DIR", help="each policy a second time from this checkout, whose extension is built"
    )
    parser.add_argument("--eager-too", action="store_true", help="each policy a second time, eager")
    options = parser.parse_args()
    if options.eager and options.eager_too:
        parser.error("--eager leaves nothing to compare: leave it out, or --eager-too")
    check_budget(parser, options)
    if options.peers and options.requests != [1]:
        parser.error("the peers decode one request: give --requests 1")
    if options.against and not (Path(options.against) / "kvpop_vllm" / "__init__.py").is_file():
        parser.error(f"there is no kvpop_vllm in {options.against}: give --against a checkout of this repository")
    turns = options.rounds * len(options.requests)
    if max(options.context) + turns * (options.steps + WARM_UP) > 8000:
        parser.error("context and generated tokens exceed the demo model's 8192 positions: lower --context")
    options.most_requests = max(options.requests)
    if min(options.context) <= STAGGER * options.most_requests:
        parser.error(
            f"prompts differ by {STAGGER} tokens each and must not be empty: raise --context or lower --requests"
        )
    if options.peers and options.steps % PEER_INTERVAL:
        parser.error(f"a turn must hold as many compressions as any other: make --steps a multiple of {PEER_INTERVAL}")
    # what stock needs for all requests, and a little more
    options.pool_tokens = 1.15 * options.most_requests * 8192
    return options


def measure(engines: dict, options) -> list[dict]:
    """Return the rows of all contexts and numbers of requests."""
    rows = []
    for context in options.context:
        say(f"prefill of {options.most_requests} x about {context} tokens in every engine: this may take minutes")
        for name, reply in ask_all(engines, "prefill", context=context, requests=options.most_requests):
            say(f"{name}: {reply['tokens'] / reply['seconds']:.0f} tokens/s, engines side by side")
        for requests in sorted(options.requests, reverse=True):
            rows += cell(engines, context, requests, options)
        for _ in ask_all(engines, "keep", requests=0):
            pass
    return rows


def cell(engines: dict, context: int, requests: int, options) -> list[dict]:
    """Return the rows of all rounds of one context and number of requests.

    A row has the mean time of a step in one round, which includes work done every few steps.
    """
    held = {name: reply["held_bytes"] for name, reply in ask_all(engines, "keep", requests=requests)}
    beside = sorted(engines, key=lambda name: list(engines).index(name.removesuffix(BEFORE)))
    rows = []
    for turn in range(1, options.rounds + 1):
        order = beside[:: 1 if turn % 2 else -1]  # twins follow each other, and neither is always first
        steps = {"requests": requests, "steps": options.steps}
        means = {name: statistics.mean(engines[name].ask("steps", **steps)["ms"]) for name in order}
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in means.items())
        say(f"{requests} at {context}, round {turn}: {shown}")
        for name, ms in means.items():
            row = {"requests": requests, "context": context, "configuration": name, "round": turn}
            rows.append(row | {"step_ms": ms, "dense_over_it": means["dense"] / ms, "kv_bytes": held[name]})
    return rows


def report(rows: list[dict]) -> str:
    """Return the results as a table, with ratios to stock, to the compiled twin and to the other checkout."""
    lines = [
        f"{'context':>7} {'requests':>8} {'':30} {'ms/step':>8} {'KV MiB':>7} {'dense / it: median':>19} {'min':>6} {'max':>6}"
    ]
    groups = grouped(rows, "context", "requests", "configuration")
    times = {key: [row["step_ms"] for row in mine] for key, mine in groups.items()}
    for key, mine in groups.items():
        context, requests, name = key
        dense_over_it = spread([row["dense_over_it"] for row in mine])
        lines.append(
            f"{context:7} {requests:8} {name:30} {statistics.median(times[key]):8.1f} "
            f"{mine[0]['kv_bytes'] / 2**20:7.0f} {dense_over_it}"
        )
        if name.endswith(EAGER):
            over = ratios(times[key], times[context, requests, name.removesuffix(EAGER)])
            lines.append(f"  / compiled: median {statistics.median(over):.2f}, {min(over):.2f} to {max(over):.2f}")
        if before := times.get((context, requests, name + BEFORE)):
            over = ratios(times[key], before)
            low, high = median_interval(over)
            lines.append(f"  / before: median {statistics.median(over):.3f}, 95% interval {low:.3f} to {high:.3f}")
    return "\n".join(lines)


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


def written(rows: list[dict], options) -> list[dict]:
    """Return the rows of the CSV file: rounded, and of this checkout only."""
    lines = []
    for row in rows:
        name = row["configuration"]
        if name.endswith(BEFORE):
            continue
        eager = {"mode": "eager"} if name.endswith(EAGER) or name in PEER_NAMES else {}
        rounded = {"step_ms": f"{row['step_ms']:.2f}", "dense_over_it": f"{row['dense_over_it']:.3f}"}
        lines.append(setting(options) | eager | row | rounded | {"configuration": name.removesuffix(EAGER)})
    return lines


if __name__ == "__main__":
    sys.exit(main())
