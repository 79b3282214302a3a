"""Wall time of a batch of long requests, stock vLLM and fixed budgets with little KV memory.

The memory holds few of the requests densely. Each configuration has an engine of its own with the same pool
and runs the whole batch alone, one configuration after the other, as often as --rounds says. Stock queues or
preempts requests that do not fit. This takes up to an hour. Nothing is called faster unless every policy gave
stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/capacity.csv.
"""

import argparse
import statistics
import sys

import record
from engines import add_options, add_pool, check_budget, compare, say

RESULTS = record.ROOT / "benchmarks" / "results" / "capacity.csv"


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()

    def rounds(started: dict) -> list[dict]:
        return [row for turn in range(options.rounds) for row in one_round(started, turn + 1, options)]

    return compare(options, rounds, report, lambda rows: record.append(RESULTS, rows))


def parse_arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=1024, rounds=1)
    parser.add_argument("--requests", type=int, default=16, help="default 16")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of each prompt (default 6000)")
    parser.add_argument("--new", type=int, default=2000, help="tokens generated for each (default 2000)")
    add_pool(parser)
    options = parser.parse_args()
    check_budget(parser, options)
    if options.prompt + options.new > 8192:
        parser.error("prompt and generated tokens exceed the demo model's 8192 positions: lower --prompt or --new")
    options.most_requests, options.pool_tokens = options.requests, options.dense_requests * 8192
    return options


def one_round(started: dict, turn: int, options) -> list[dict]:
    """Return one row per configuration of one round."""
    from importlib.metadata import version

    told = {"requests": options.requests, "prompt": options.prompt, "new": options.new}
    replies = {}
    for name, engine in started.items():
        replies[name] = reply = engine.ask("drain", **told)
        say(
            f"round {turn}, {name}: {reply['seconds']:.0f} s, at most {reply['most_running']} running, "
            f"{reply['preemptions']} preemptions"
        )
    setting = {
        "threads": options.threads,
        "vllm": version("vllm"),
        "mode": "eager" if options.eager else "compiled",
        "pool_tokens": int(options.pool_tokens),
        "budget": options.budget,
    }
    dense = replies["dense"]["seconds"]
    return [
        setting
        | told
        | {
            "configuration": name,
            "round": turn,
            "seconds": f"{reply['seconds']:.1f}",
            "most_running": reply["most_running"],
            "preemptions": reply["preemptions"],
            "it_over_dense": f"{reply['seconds'] / dense:.3f}",
        }
        for name, reply in replies.items()
    ]


def report(rows: list[dict]) -> str:
    """Return the results as a table, with medians and ranges of the ratios to stock."""
    lines = [f"{'':30} {'seconds':>8} {'running':>8} {'preempted':>9} {'it / dense: median':>19} {'min':>6} {'max':>6}"]
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        ratios = [float(row["it_over_dense"]) for row in mine]
        seconds = statistics.median(float(row["seconds"]) for row in mine)
        lines.append(
            f"{name:30} {seconds:8.0f} {mine[0]['most_running']:8} {mine[0]['preemptions']:9} "
            f"{statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
