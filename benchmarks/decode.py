"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration is a child process with an engine of its own (vLLM's default compiled mode). All of them
prefill the same prompts. Then they take turns, A B C A B C ..., while the others sleep. Nothing is called
faster unless every policy gave stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/decode.csv. With --against each policy also runs twice from another checkout, whose steps are
printed and not written: the ratio of the two says what the measurement resolves.

With --speculative each configuration has a twin with drafts of n-grams. Engines read texts of drafts.py, and are forced to
write what follows; a turn is a number of tokens. Rows go to benchmarks/results/speculative.csv.
"""

import itertools
import statistics
import sys
from pathlib import Path

import drafts
import record
from child import WARM_UP
from engines import DRAFTS, PEER_INTERVAL, ask_all, check_budget, compare, parser_of, policy_of, say, setting

from kvpop_vllm.argument_types import positive

RESULTS = record.RESULTS / "decode.csv"
SPECULATIVE = record.RESULTS / "speculative.csv"
STAGGER = 17
"""Difference between the lengths of consecutive prompts, in tokens."""


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    if options.speculative:
        keys, shown = ("text", "context", "requests"), ("tokens_per_step",)
        return compare(options, measure_texts, SPECULATIVE, keys, "token_ms", starts=options.starts, shown=shown)
    return compare(options, measure, RESULTS, ("context", "requests"), "step_ms", starts=options.starts)


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=2048, rounds=5)
    parser.add_argument("--context", nargs="+", type=int, default=[7500], help="tokens of each prompt, about")
    parser.add_argument("--requests", nargs="+", type=positive, default=[8], help="requests decoded together")
    parser.add_argument("--steps", type=positive, default=24, help="counted steps of a turn, tokens with --speculative")
    parser.add_argument("--speculative", metavar="M", type=positive, default=0, help="a twin with M drafts of n-grams")
    parser.add_argument("--texts", nargs="+", choices=[*drafts.TEXTS], default=["json"], help="of --speculative")
    parser.add_argument("--peers", action="store_true", help="transformers and kvpress too (`make peers` first)")
    parser.add_argument("--against", metavar="DIR", help="each policy twice more, from this checkout")
    parser.add_argument("--starts", type=positive, default=1, help="starts of all engines, with --rounds each")
    parser.add_argument("--eager-too", action="store_true", help="each policy a second time, eager")
    options = parser.parse_args()
    if options.eager and options.eager_too:
        parser.error("--eager leaves nothing to compare: leave it out, or --eager-too")
    check_budget(parser, options)
    if options.peers and options.requests != [1]:
        parser.error("the peers decode one request: give --requests 1")
    if options.against and not (Path(options.against) / "kvpop_vllm" / "__init__.py").is_file():
        parser.error(f"there is no kvpop_vllm in {options.against}: give --against a checkout of this repository")
    if options.speculative and (options.against or options.eager_too or options.peers):
        parser.error("--speculative compares with and without drafts: leave out --against, --eager-too and --peers")
    overrun = options.speculative * (WARM_UP + 1)  # tokens of drafts in warm-up steps and the last one
    options.written = options.rounds * len(options.requests) * (options.steps + WARM_UP + overrun)
    longest = max(options.context) + options.written
    if longest > 8000:
        parser.error("context and generated tokens exceed the demo model's 8192 positions: lower --context")
    options.most_requests = max(options.requests)
    if min(options.context) <= STAGGER * options.most_requests:
        parser.error(
            f"prompts differ by {STAGGER} tokens each and must not be empty: raise --context or lower --requests"
        )
    if options.peers and options.steps % PEER_INTERVAL:
        parser.error(f"a turn must hold as many compressions as any other: make --steps a multiple of {PEER_INTERVAL}")
    # what stock needs for all requests, and a little more
    options.pool_tokens = 1.15 * options.most_requests * (longest + 192)
    return options


def measure(engines: dict, options) -> list[dict]:
    """Return the rows of all contexts and numbers of requests."""
    rows = []
    for context in options.context:
        say(f"prefill of {options.most_requests} x about {context} tokens in every engine: this may take minutes")
        lengths = [context - STAGGER * i for i in range(options.most_requests)]
        for name, reply in ask_all(engines, "prefill", lengths=lengths, new=8192 - context):
            say(f"{name}: {reply['tokens'] / reply['seconds']:.0f} tokens/s, engines side by side")
        for requests in sorted(options.requests, reverse=True):
            rows += cell(engines, context, requests, options)
        for _ in ask_all(engines, "keep", requests=0):
            pass
    return rows


def measure_texts(engines: dict, options) -> list[dict]:
    """Return the rows of all kinds of texts, contexts and numbers of requests, with drafts and without."""
    rows = []
    for kind, context in itertools.product(options.texts, options.context):
        say(f"prefill of {options.most_requests} x about {context} tokens of {kind}: this may take minutes")
        lengths = [context - STAGGER * i for i in range(options.most_requests)]
        texts = drafts.texts_of(kind, options.model, lengths, context + options.written + 64)
        for name, reply in ask_all(engines, "prefill", lengths=lengths, new=options.written, texts=texts):
            say(f"{name}: {reply['tokens'] / reply['seconds']:.0f} tokens/s, engines side by side")
        for requests in sorted(options.requests, reverse=True):
            rows += [{"text": kind} | row for row in cell(engines, context, requests, options)]
        for _ in ask_all(engines, "keep", requests=0):
            pass
    return rows


def cell(engines: dict, context: int, requests: int, options) -> list[dict]:
    """Return the rows of all rounds of one context and number of requests.

    A row has the mean time of a step in one round, which includes work done every few steps.
    """
    held_bytes = {name: reply["held_bytes"] for name, reply in ask_all(engines, "keep", requests=requests)}
    ordered = sorted(engines, key=lambda name: list(engines).index(policy_of(name)))
    rows = []
    for turn in range(1, options.rounds + 1):
        order = ordered[:: 1 if turn % 2 else -1]  # twins follow each other, and neither is always first
        value, measured = ("token_ms", answer) if options.speculative else ("step_ms", mean_step)
        turns = {name: measured(engines[name], name, requests, options) for name in order}
        means = {name: numbers[value] for name, numbers in turns.items()}
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in means.items())
        say(f"{requests} at {context}, round {turn}: {shown}")
        for name, numbers in turns.items():
            row = {"requests": requests, "context": context, "round": turn}
            row |= {
                column: number if isinstance(number, int) else f"{number:.2f}" for column, number in numbers.items()
            }
            row |= {"dense_over_it": f"{means['dense'] / means[name]:.3f}", "kv_bytes": held_bytes[name]}
            rows.append(setting(options, name) | row)
    return rows


def mean_step(engine, name: str, requests: int, options) -> dict[str, float]:
    """Return the mean milliseconds of a step."""
    return {"step_ms": statistics.mean(engine.ask("steps", requests=requests, steps=options.steps)["ms"])}


def answer(engine, name: str, requests: int, options) -> dict[str, float]:
    """Return the milliseconds that a token of each request takes, most drafts, and tokens of a request in a step."""
    reply = engine.ask("answer", requests=requests, tokens=options.steps)
    return {
        "token_ms": reply["ms"] * requests / reply["tokens"],
        "drafts": options.speculative if name.endswith(DRAFTS) else 0,
        "tokens_per_step": reply["tokens"] / reply["steps"] / requests,
    }


if __name__ == "__main__":
    sys.exit(main())
