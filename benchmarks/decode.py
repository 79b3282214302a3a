"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration is a child process with an engine of its own (vLLM's default compiled mode). All of them
prefill the same prompts. Then they take turns, A B C A B C ..., while the others sleep. Nothing is called
faster unless every policy gave stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/decode.csv. With --against each policy also runs from another checkout, whose steps are
printed and not written.
"""

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import record
from engines import (
    BEFORE,
    EAGER,
    PEER_INTERVAL,
    PEER_NAMES,
    STAGGER,
    WARM_UP,
    add_options,
    ask_all,
    check_budget,
    compare,
    say,
)

from kvpop_vllm.argument_types import positive

RESULTS = record.ROOT / "benchmarks" / "results" / "decode.csv"


@dataclass(frozen=True)
class Turn:
    """Mean step of one configuration in one round, which includes work done every few steps.

    Attributes:
        context: tokens of each prompt, about.
        requests: requests decoded together.
        name: name of the configuration.
        round: number of the round, from 1.
        ms: milliseconds of a step.
        ratio: stock's milliseconds divided by these.
        held: bytes of KV cache that the requests hold.
    """

    context: int
    requests: int
    name: str
    round: int
    ms: float
    ratio: float
    held: int


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    return compare(options, lambda started: measure(started, options), report, lambda rows: append(rows, options))


def parse_arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=2048, rounds=5)
    parser.add_argument(
        "--context", nargs="+", type=int, default=[7500], help="tokens of each prompt, about (default 7500)"
    )
    parser.add_argument("--requests", nargs="+", type=int, default=[8], help="requests decoded together (default 8)")
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
    if min(options.context) <= STAGGER * options.most_requests or min(options.requests) < 1:
        parser.error(
            f"prompts differ by {STAGGER} tokens each and must not be empty: raise --context or lower --requests"
        )
    if options.peers and options.steps % PEER_INTERVAL:
        parser.error(f"a turn must hold as many compressions as any other: make --steps a multiple of {PEER_INTERVAL}")
    # what stock needs for all requests, and a little more
    options.pool_tokens = 1.15 * options.most_requests * 8192
    return options


def measure(engines: dict, options) -> list[Turn]:
    """Return the turns of all contexts and numbers of requests."""
    turns = []
    for context in options.context:
        say(f"prefill of {options.most_requests} x about {context} tokens in every engine: this may take minutes")
        for name, reply in ask_all(engines, "prefill", context=context, requests=options.most_requests):
            say(f"{name}: {reply['tokens'] / reply['seconds']:.0f} tokens/s, engines side by side")
        for requests in sorted(options.requests, reverse=True):
            turns += cell(engines, context, requests, options)
        for _ in ask_all(engines, "keep", requests=0):
            pass
    return turns


def cell(engines: dict, context: int, requests: int, options) -> list[Turn]:
    """Return the turns of all rounds of one context and number of requests."""
    held = {name: reply["held_bytes"] for name, reply in ask_all(engines, "keep", requests=requests)}
    turns = []
    for turn in range(1, options.rounds + 1):
        told = {"requests": requests, "steps": options.steps}
        beside = sorted(engines, key=lambda name: list(engines).index(name.removesuffix(BEFORE)))
        order = beside[:: 1 if turn % 2 else -1]  # twins follow each other, and neither is always first
        means = {name: statistics.mean(engines[name].ask("steps", **told)["ms"]) for name in order}
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in means.items())
        say(f"{requests} at {context}, round {turn}: {shown}")
        turns += [
            Turn(context, requests, name, turn, ms, means["dense"] / ms, held[name]) for name, ms in means.items()
        ]
    return turns


def report(turns: list[Turn]) -> str:
    """Return the results as a table, with ratios to stock, to the compiled twin and to the other checkout."""
    lines = [
        f"{'context':>7} {'requests':>8} {'':30} {'ms/step':>8} {'KV MiB':>7} {'dense / it: median':>19} {'min':>6} {'max':>6}"
    ]
    for context, requests, name in dict.fromkeys((t.context, t.requests, t.name) for t in turns):
        mine = [t for t in turns if (t.context, t.requests, t.name) == (context, requests, name)]
        ratios, step = [t.ratio for t in mine], statistics.median(t.ms for t in mine)
        lines.append(
            f"{context:7} {requests:8} {name:30} {step:8.1f} {mine[0].held / 2**20:7.0f} "
            f"{statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
        )
        if name.endswith(EAGER):
            twin = (context, requests, name.removesuffix(EAGER))
            compiled = {t.round: t.ms for t in turns if (t.context, t.requests, t.name) == twin}
            over = [t.ms / compiled[t.round] for t in mine]
            lines.append(f"  / compiled: median {statistics.median(over):.2f}, {min(over):.2f} to {max(over):.2f}")
        before = [t.ms for t in turns if (t.context, t.requests, t.name) == (context, requests, name + BEFORE)]
        if before:
            over = [t.ms / ms for t, ms in zip(mine, before, strict=True)]
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


def append(turns: list[Turn], options) -> None:
    """Append the turns of this checkout to the CSV file."""
    from importlib.metadata import version

    setting = {"threads": options.threads, "vllm": version("vllm"), "budget": options.budget}
    record.append(
        RESULTS,
        [
            setting
            | {
                "mode": "eager" if options.eager or t.name.endswith(EAGER) or t.name in PEER_NAMES else "compiled",
                "requests": t.requests,
                "context": t.context,
                "configuration": t.name.removesuffix(EAGER),
                "round": t.round,
                "step_ms": f"{t.ms:.2f}",
                "dense_over_it": f"{t.ratio:.3f}",
                "kv_bytes": t.held,
            }
            for t in turns
            if not t.name.endswith(BEFORE)  # rows are of this commit
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
