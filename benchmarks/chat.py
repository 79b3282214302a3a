"""Chat turns and a shared system prompt with vLLM's prefix cache: stock and policies, prompts protected or not.

It uses the same children as decode.py. A conversation of some turns grows by a fixed number of tokens each.
The time from the last turn's request to its second token is measured with prefix caching on and, for the
policies, off as well. Then many requests read one system prompt, and steps in which all of them decode are
timed. The engines take turns, and nothing is compared unless every policy gave stock's greedy tokens on short
prompts. Rows are appended to benchmarks/results/chat.csv.

    python benchmarks/chat.py --budget 512 --policies streaming-llm kvpop
"""

import statistics
import sys

import record
from child import WARM_UP
from engines import NO_HITS, ask_all, check_budget, compare, parser_of, say, setting

RESULTS = record.RESULTS / "chat.csv"


def main() -> int:
    """Run the benchmark and return its exit code."""
    return compare(parse_arguments(), measure, RESULTS, ("what",), "ms")


def measure(started: dict, options) -> list[dict]:
    """Return the rows of the conversations and of the requests that share a prompt."""
    hitting = {name: engine for name, engine in started.items() if NO_HITS not in name}
    return chats(started, options) + (crowds(hitting, options) if options.requests else [])


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=512, rounds=7)
    parser.add_argument("--turns", type=int, default=8, help="of a conversation")
    parser.add_argument("--turn", type=int, default=500, help="tokens of a turn, its answer among them")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=32, help="that read one system prompt; 0: none")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round of these")
    parser.add_argument("--unprotected", action="store_true", help="evict from prompts; turns go on from snapshots")
    options = parser.parse_args()
    if not 2 <= options.answer < options.turn:
        parser.error("a turn has a question and an answer of at least 2 tokens: lower --answer or raise --turn")
    options.prefix_caching, options.protect_prompt = True, not options.unprotected
    if options.unprotected:
        check_budget(parser, options)
    options.most_requests = max(1, options.requests)
    decoded = 64 + options.rounds * (options.steps + WARM_UP)
    options.pool_tokens = 1.3 * (
        options.turns * options.turn + options.system + options.most_requests * (decoded + options.budget + 256)
    )
    return options


def chats(started: dict, options) -> list[dict]:
    """Return the rows of the conversations."""
    rows, talk = [], {"turns": options.turns, "tokens": options.turn, "answer": options.answer}
    for turn in range(options.rounds + 1):
        replies = {name: engine.ask("chat", **talk, seed=turn + 1) for name, engine in started.items()}
        if turn:  # the first round is not counted
            say(f"round {turn}: " + ", ".join(f"{n} {r['second']:.3f} s ({r['hit']} hit)" for n, r in replies.items()))
            measured = "second token" + ", unprotected" * options.unprotected
            rows += [row(measured, name, turn, r["second"], r["hit"], options) for name, r in replies.items()]
    return rows


def crowds(started: dict, options) -> list[dict]:
    """Return the rows of the decode steps behind a shared system prompt."""
    new = 1 + options.rounds * (options.steps + WARM_UP) + options.requests
    for name, reply in ask_all(started, "prefill", lengths=[50] * options.requests, new=new, shared=options.system):
        say(f"{name}: {options.requests} requests decode after {reply['seconds']:.1f} s, engines side by side")
    rows = []
    for turn in range(1, options.rounds + 1):
        for name, engine in started.items():
            times = engine.ask("steps", requests=options.requests, steps=options.steps)["ms"]
            rows.append(row("step", name, turn, statistics.mean(times) / 1e3, options.system, options))
    return rows


def row(what: str, name: str, turn: int, seconds: float, hit: int, options) -> dict:
    """Return one row of the CSV file."""
    size = {"turns": options.turns, "turn": options.turn, "requests": options.requests, "what": what}
    return setting(options, name) | size | {"round": turn, "ms": f"{1e3 * seconds:.2f}", "hit": hit}


if __name__ == "__main__":
    sys.exit(main())
