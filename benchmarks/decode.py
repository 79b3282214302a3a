"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration lives in a child process with an engine of its own (vLLM's default compiled mode). All of them prefill
the same prompts; then they take turns, A B C A B C ..., while the others sleep. Nothing is called faster unless every
policy gave stock's greedy tokens on prompts shorter than its budget. Rows go to benchmarks/results/decode.csv.
"""

import argparse
import statistics
import sys

import record
from engines import EAGER, WARM_UP, add_options, ask_all, engines, output_problems, say, start

RESULTS = record.ROOT / "benchmarks" / "results" / "decode.csv"


def main() -> int:
    options = parse_arguments()
    with engines(options) as started:
        return measure(started, options)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=2048, rounds=3)
    parser.add_argument("--requests", type=int, default=8, help="requests decoded together (default 8)")
    parser.add_argument("--steps", type=int, default=24, help="counted steps of a turn (default 24)")
    parser.add_argument("--eager-too", action="store_true", help="each policy a second time, eager")
    options = parser.parse_args()
    if options.eager and options.eager_too:
        parser.error("--eager leaves nothing to compare: leave it out, or --eager-too")
    if options.context + (options.rounds * (options.steps + WARM_UP)) > 8000:
        parser.error("context and generated tokens exceed the demo model's 8192 positions: lower --context")
    return options


def measure(engines: dict, options) -> int:
    start(engines)
    problems = output_problems(engines)
    say(f"prefill of {options.requests} x about {options.context} tokens in every engine: this takes minutes")
    held = {}
    for name, reply in ask_all(engines, "prefill"):
        held[name] = reply["held_bytes"]
        rate = reply["tokens"] / reply["seconds"]
        say(f"{name}: {rate:.0f} tokens/s, engines side by side; holds {reply['held_bytes'] / 2**20:.0f} MiB of KV")
    rows = []
    for turn in range(options.rounds):
        medians = {name: statistics.median(engine.ask("steps")["ms"]) for name, engine in engines.items()}
        say(f"round {turn + 1}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()))
        rows += [(name, turn + 1, ms, medians["dense"] / ms, held[name]) for name, ms in medians.items()]
    for problem in problems:
        print(f"decode: output check failed, no ratio is given: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(report(rows, options))
    if not options.no_csv:
        append(rows, options)
    return 0


def report(rows: list, options) -> str:
    lines = [f"{'':19} {'ms/step':>8} {'KV MiB':>7} {'dense / it: median':>19} {'min':>6} {'max':>6}"]
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        ratios = [row[3] for row in mine]
        step = statistics.median(row[2] for row in mine)
        lines.append(
            f"{name:19} {step:8.1f} {mine[0][4] / 2**20:7.0f} {statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
        )
    for name in (row[0] for row in rows if row[0].endswith(EAGER) and row[1] == 1):
        compiled = {row[1]: row[2] for row in rows if row[0] == name.removesuffix(EAGER)}
        ratios = [row[2] / compiled[row[1]] for row in rows if row[0] == name]
        lines.append(
            f"{name} / compiled: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )
    return "\n".join(lines)


def append(rows: list, options) -> None:
    from importlib.metadata import version

    setting = {
        "threads": options.threads,
        "vllm": version("vllm"),
        "requests": options.requests,
        "context": options.context,
        "budget": options.budget,
    }
    record.append(
        RESULTS,
        [
            setting
            | {
                "mode": "eager" if options.eager or name.endswith(EAGER) else "compiled",
                "configuration": name.removesuffix(EAGER),
                "round": turn,
                "step_ms": f"{ms:.2f}",
                "dense_over_it": f"{ratio:.3f}",
                "kv_bytes": held,
            }
            for name, turn, ms, ratio, held in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
