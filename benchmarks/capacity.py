"""Wall time of a batch of long requests, stock vLLM and fixed budgets with little KV memory.

The memory holds few of the requests densely. Each configuration has an engine of its own with the same pool
and runs the whole batch alone, one configuration after the other, as often as --rounds says. Stock queues or
preempts requests that do not fit. This takes up to an hour. Nothing is called faster unless every policy gave
stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/capacity.csv.
"""

import sys

import record
from engines import add_pool, check_budget, compare, parser_of, say, setting

RESULTS = record.RESULTS / "capacity.csv"


def main() -> int:
    """Run the benchmark and return its exit code."""
    return compare(parse_arguments(), measure, RESULTS, (), "seconds")


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=1024, rounds=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=2000, help="tokens generated for each")
    add_pool(parser)
    options = parser.parse_args()
    check_budget(parser, options)
    if options.prompt + options.new > 8192:
        parser.error("prompt and generated tokens exceed the demo model's 8192 positions: lower --prompt or --new")
    options.most_requests, options.pool_tokens = options.requests, options.dense_requests * 8192
    return options


def measure(started: dict, options) -> list[dict]:
    """Return the rows of all rounds."""
    batch = {"requests": options.requests, "prompt": options.prompt, "new": options.new}
    common = batch | {"pool_tokens": int(options.pool_tokens)}
    rows = []
    for turn in range(1, options.rounds + 1):
        replies = {}
        for name, engine in started.items():  # stock comes first
            reply = replies[name] = engine.ask("drain", **batch)
            say(
                f"round {turn}, {name}: {reply['seconds']:.0f} s, at most {reply['most_running']} running, "
                f"{reply['preemptions']} preemptions"
            )
            over_dense = reply["seconds"] / replies["dense"]["seconds"]
            rounded = {"seconds": f"{reply['seconds']:.1f}", "it_over_dense": f"{over_dense:.3f}"}
            rows.append(setting(options, name) | common | {"round": turn} | reply | rounded)
    return rows


if __name__ == "__main__":
    sys.exit(main())
