"""Prefill of stock vLLM against fixed budgets, paired: one prompt at a time, the engines in turn.

The same children as in decode.py. Nothing is called faster unless every policy gave stock's greedy tokens on prompts
shorter than its budget. Rows go to benchmarks/results/prefill.csv.
"""

import argparse
import statistics
import sys

import record
from engines import add_options, check_budget, engines, output_problems, say, start

RESULTS = record.ROOT / "benchmarks" / "results" / "prefill.csv"


def main() -> int:
    options = parse_arguments()
    with engines(options) as started:
        start(started)
        problems = output_problems(started)
        for engine in started.values():
            engine.ask("prompt", context=options.context)  # the first long one is not counted
        rows = [row for turn in range(options.rounds) for row in one_round(started, turn + 1, options)]
    for problem in problems:
        print(f"prefill: output check failed, no ratio is given: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(report(rows))
    if not options.no_csv:
        record.append(RESULTS, rows)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=1024, rounds=5)
    parser.add_argument("--context", type=int, default=7500, help="tokens of each prompt (default 7500)")
    parser.set_defaults(most_requests=1, pool_tokens=1.15 * 8192)
    options = parser.parse_args()
    check_budget(parser, options)
    if options.context > 8000:
        parser.error("the prompt exceeds the demo model's 8192 positions: lower --context")
    return options


def one_round(started: dict, turn: int, options) -> list[dict]:
    from importlib.metadata import version

    took = {name: engine.ask("prompt", context=options.context)["seconds"] for name, engine in started.items()}
    rate = {name: options.context / seconds for name, seconds in took.items()}
    say(f"round {turn}: " + ", ".join(f"{name} {r:.0f} tokens/s" for name, r in rate.items()))
    setting = {
        "threads": options.threads,
        "vllm": version("vllm"),
        "mode": "eager" if options.eager else "compiled",
        "context": options.context,
        "budget": options.budget,
    }
    return [
        setting
        | {
            "configuration": name,
            "round": turn,
            "tokens_per_s": f"{r:.1f}",
            "over_dense": f"{r / rate['dense']:.3f}",
        }
        for name, r in rate.items()
    ]


def report(rows: list[dict]) -> str:
    lines = [f"{'':19} {'tokens/s':>8} {'it / dense: median':>19} {'min':>6} {'max':>6}"]
    for name in dict.fromkeys(row["configuration"] for row in rows):
        mine = [row for row in rows if row["configuration"] == name]
        ratios = [float(row["over_dense"]) for row in mine]
        rate = statistics.median(float(row["tokens_per_s"]) for row in mine)
        lines.append(f"{name:19} {rate:8.0f} {statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
