"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration is a child process with an engine of its own (vLLM's default compiled mode). All of them
prefill the same prompts. Then they take turns, A B C A B C ..., while the others sleep. Nothing is called
faster unless every policy gave stock's greedy tokens on prompts shorter than its budget. Rows are appended to
benchmarks/results/decode.csv. With --against each policy also runs twice from another checkout, whose steps are
printed and not written: the ratio of the two says what the measurement resolves.

With --speculative each configuration has a twin with drafts of n-grams. Engines read a part of a text and are forced to
write the rest, so that all of them see the same drafts and accept the same ones. A turn is a number of tokens. In
`json` an assistant gives back a JSON file with one field changed, so that drafts are right more often than not. `prose`
is Python's manual, where few are. Rows go to benchmarks/results/speculative.csv.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
from functools import lru_cache
from pathlib import Path

import record
from child import WARM_UP
from harness import DENSE, DRAFTS, PEER_INTERVAL, ask_all, check_budget, compare, parser_of, say, setting

from kvpop_vllm.argument_types import positive

STAGGER = 17
"""Difference between the lengths of consecutive prompts, in tokens."""
POSITIONS = 8192
"""Positions of the demo model."""
STEP_TOKENS = 4096
"""Tokens of a step at most, vLLM's default on a CPU."""

PROSE = record.ROOT / "kvpop_vllm" / "calibrate" / "text.jsonl"
NAMES = "Ada Ben Clara David Emma Felix Grace Henry Iris Jonas Karla Leo Mia Noah Olga Paul".split()
CITIES = "Athens Dublin Lisbon Madrid Oslo Prague Vienna Warsaw".split()
TOKENS_OF_ITEM = 50
"""Tokens of an item in JSON, about."""


def random_items(count: int, seed: int) -> list[dict]:
    """Return the items of a JSON file, at random."""
    draw = random.Random(seed)
    return [
        {
            "id": number,
            "name": f"{draw.choice(NAMES)} {draw.choice(NAMES)}son",
            "city": draw.choice(CITIES),
            "price": round(draw.uniform(1, 999), 2),
            "count": draw.randrange(1000),
            "paid": draw.random() < 0.5,
        }
        for number in range(count)
    ]


def json_text(tokenizer, context: int, seed: int) -> list[int]:
    """Return the tokens of a chat in which a JSON file of 4/5 of ``context`` tokens is given back with one field changed.

    The field lies within 300 tokens after ``context``, and the answer ends later.
    """
    items = random_items(context * 4 // 5 // TOKENS_OF_ITEM, seed)
    begin = len(tokenizer(_chat(items, 0, "")).input_ids)
    changed = (context + 150 - begin) // TOKENS_OF_ITEM
    answer = [item | ({"count": 1000} if item["id"] == changed else {}) for item in items]
    return tokenizer(_chat(items, changed, json.dumps(answer, indent=2))).input_ids


def _chat(items: list[dict], changed: int, answer: str) -> str:
    """Return a chat in the demo model's form."""
    question = f"Give back this file with the count of record {changed} set to 1000.\n{json.dumps(items, indent=2)}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


@lru_cache(maxsize=1)
def _prose(tokenizer) -> list[int]:
    """Return the tokens of all prose of the text for calibration."""
    lines = map(json.loads, PROSE.read_text(encoding="utf-8").splitlines())
    return tokenizer("\n\n".join(line["text"] for line in lines if line["group"].startswith("prose"))).input_ids


def prose_text(tokenizer, context: int, seed: int) -> list[int]:
    """Return the tokens of the prose from another place for each seed on; after its end it begins again."""
    prose = _prose(tokenizer)
    first = seed * 2311 % len(prose)
    return [*prose[first:], *prose[:first]]


TEXTS = {"json": json_text, "prose": prose_text}


def texts_of(kind: str, model: str, lengths: list[int], end: int) -> list[list[int]]:
    """Return the first ``end`` tokens of texts of a kind, of which ``lengths`` are prompts.

    Raises:
        SystemExit: a text ends before.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=10**9)
    texts = [TEXTS[kind](tokenizer, length, seed)[:end] for seed, length in enumerate(lengths)]
    if short := [len(text) for text in texts if len(text) < end]:
        raise SystemExit(f"a text of the kind {kind} ends after {short[0]} tokens: raise --context")
    return texts


def main(arguments: list[str] | None = None) -> int:
    """Measure and return the exit code."""
    options = parse_arguments(arguments)
    if options.speculative:
        file, value, keys, shown = "speculative.csv", "token_ms", ("text", "context", "requests"), ("tokens_per_step",)
    else:
        file, value, keys, shown = "decode.csv", "step_ms", ("context", "requests"), ()
    return compare(options, measure, record.RESULTS / file, keys, value, starts=options.starts, shown=shown)


def parse_arguments(arguments: list[str] | None):
    """Return the options of the command line."""
    parser = parser_of("decode", __doc__, budget=2048, rounds=5)
    parser.add_argument("--context", nargs="+", type=int, default=[7500], help="tokens of each prompt, about")
    parser.add_argument("--requests", nargs="+", type=positive, default=[8], help="requests decoded together")
    parser.add_argument("--steps", type=positive, help="counted steps of a turn, 24; tokens with --speculative, 15")
    parser.add_argument("--speculative", metavar="M", type=positive, default=0, help="a twin with M drafts of n-grams")
    parser.add_argument("--texts", nargs="+", choices=[*TEXTS], default=["json"], help="of --speculative")
    parser.add_argument("--peers", action="store_true", help="transformers and kvpress too (`make peers` first)")
    parser.add_argument("--against", metavar="DIR", help="each policy twice more, from this checkout")
    parser.add_argument("--starts", type=positive, default=1, help="starts of all engines, with --rounds each")
    parser.add_argument("--eager-too", action="store_true", help="each policy a second time, eager")
    options = parser.parse_args(arguments)
    if options.eager and options.eager_too:
        parser.error("--eager leaves nothing to compare: leave it out, or --eager-too")
    check_budget(parser, options)
    if options.peers and options.requests != [1]:
        parser.error("the peers decode one request: give --requests 1")
    if options.against and not (Path(options.against) / "kvpop_vllm" / "__init__.py").is_file():
        parser.error(f"there is no kvpop_vllm in {options.against}: give --against a checkout of this repository")
    if options.speculative and (options.against or options.eager_too or options.peers):
        parser.error("--speculative compares with and without drafts: leave out --against, --eager-too and --peers")
    options.steps = options.steps or (15 if options.speculative else 24)
    options.most_requests = max(options.requests)
    # while the last prompt is read, the first request may decode already; a step writes all drafts at most
    steps = options.rounds * (options.steps + WARM_UP) + options.most_requests * max(options.context) // STEP_TOKENS + 1
    options.written = steps * (1 + options.speculative)
    longest = max(options.context) + options.written
    if longest > POSITIONS:
        parser.error(
            f"context and up to {options.written} generated tokens exceed the demo model's {POSITIONS} positions: lower"
            " --context, --steps or --rounds"
        )
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
    """Return the rows of all kinds of texts, contexts and numbers of requests."""
    rows = []
    kinds = options.texts if options.speculative else [None]
    for kind, context, requests in itertools.product(kinds, options.context, options.requests):
        prompts = f"{requests} x about {context} tokens" + (f" of {kind}" if kind else "")
        say(f"prefill of {prompts} in every engine: this may take minutes")
        lengths = [context - STAGGER * i for i in range(requests)]
        batch = {"lengths": lengths, "new": POSITIONS - context}
        if kind:
            end = context + options.written + options.speculative
            batch |= {"new": options.written, "texts": texts_of(kind, options.model, lengths, end)}
        for name, reply in ask_all(engines, "prefill", **batch):
            say(f"{name}: {reply['tokens'] / reply['seconds']:.0f} tokens/s, engines side by side")
        rows += [({"text": kind} if kind else {}) | row for row in cell(engines, context, requests, options)]
        for _ in ask_all(engines, "keep", requests=0):
            pass
    return rows


def cell(engines: dict, context: int, requests: int, options) -> list[dict]:
    """Return the rows of all rounds of one context and number of requests.

    A row has the mean time of a step in one round, which includes work done every few steps.
    """
    held_bytes = {name: reply["held_bytes"] for name, reply in ask_all(engines, "keep", requests=requests)}
    places = {name: place for place, name in enumerate(engines)}
    ordered = sorted(engines, key=lambda name: places[name.with_twin("") if name.elsewhere else name])
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
            row |= {"dense_over_it": f"{means[DENSE] / means[name]:.3f}", "kv_bytes": held_bytes[name]}
            rows.append(setting(options, name) | row)
    return rows


def mean_step(engine, name, requests: int, options) -> dict[str, float]:
    """Return the mean milliseconds of a step."""
    return {"step_ms": statistics.mean(engine.ask("steps", requests=requests, steps=options.steps)["ms"])}


def answer(engine, name, requests: int, options) -> dict[str, float]:
    """Return the milliseconds that a token of each request takes, most drafts, and tokens of a request in a step."""
    reply = engine.ask("answer", requests=requests, tokens=options.steps)
    return {
        "token_ms": reply["ms"] * requests / reply["tokens"],
        "drafts": options.speculative if name.twin == DRAFTS else 0,
        "tokens_per_step": reply["tokens"] / reply["steps"] / requests,
    }


if __name__ == "__main__":
    from engines import main as measure_any

    sys.exit(measure_any(sys.argv[1:], "decode"))
