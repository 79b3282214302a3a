"""Times of whole requests: one prompt after another, or a batch in little memory. They are measures of engines.py."""

import json
import shutil
import tempfile
from pathlib import Path

import record
from harness import DENSE, add_pool, check_budget, compare, parser_of, say, setting

POSITIONS = 8192
"""Positions of the demo model."""


def prefill(arguments: list[str] | None = None) -> int:
    """Prefill of stock vLLM against fixed budgets, paired: one prompt at a time, the engines in turn.

    If a prompt exceeds the demo model's 8,192 positions, all prompts are read by a model of its shape with longer
    rotary tables and random weights, whose outputs mean nothing. This shows how time grows with the prompt and is not
    compared with stock.
    """
    parser = parser_of("prefill", prefill.__doc__, budget=1024, rounds=5)
    parser.add_argument("--context", nargs="+", type=int, default=[7500], help="tokens of each prompt")
    options = parser.parse_args(arguments)
    check_budget(parser, options)
    longest = max(options.context) + 1
    options.most_requests, options.pool_tokens = 1, 1.15 * max(POSITIONS, longest)
    with tempfile.TemporaryDirectory(prefix="kvpop-long-") as folder:
        if longest > POSITIONS:
            lengthen(Path(options.model), Path(folder), longest)
            options.model, options.load_format = folder, "dummy"
        judged = options.load_format != "dummy"  # random weights make flat logits with meaningless near ties
        if not judged:
            print("random weights: outputs and times are not compared with stock's")
        file = record.RESULTS / "prefill.csv"
        return compare(options, prompts, file, ("context",), "tokens_per_s", judged=judged)


def lengthen(model: Path, folder: Path, positions: int) -> None:
    """Write a folder with the model's configuration and tokenizer for ``positions`` positions."""
    for file in model.iterdir():
        if file.suffix in (".json", ".txt", ".model"):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))


def prompts(started: dict, options) -> list[dict]:
    """Return the rows of all rounds of prompts."""
    for engine in started.values():
        engine.ask("drain", requests=1, prompt=min(options.context), new=1)  # the first long prompt is not counted
    rounds = range(1, options.rounds + 1)
    return [row for turn in rounds for context in options.context for row in one_turn(started, turn, context, options)]


def one_turn(started: dict, turn: int, context: int, options) -> list[dict]:
    """Return one row per configuration for one prompt."""
    batch = {"requests": 1, "prompt": context, "new": 1}
    rates = {name: context / engine.ask("drain", **batch)["seconds"] for name, engine in started.items()}
    say(f"{context} tokens, round {turn}: " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items()))
    dummy = options.load_format == "dummy"
    common = {"weights": "random" if dummy else "demo", "context": context, "round": turn}
    return [
        setting(options, name)
        | common
        | {"tokens_per_s": f"{rate:.1f}", "over_dense": "" if dummy else f"{rate / rates[DENSE]:.3f}"}
        for name, rate in rates.items()
    ]


def capacity(arguments: list[str] | None = None) -> int:
    """Wall time of a batch of long requests, stock vLLM and fixed budgets with little KV memory.

    The memory holds few of the requests densely. Each configuration has an engine of its own with the same pool and
    runs the whole batch alone, one configuration after the other, as often as --rounds says. Stock queues or preempts
    requests that do not fit. This takes up to an hour.
    """
    parser = parser_of("capacity", capacity.__doc__, budget=1024, rounds=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=2000, help="tokens generated for each")
    add_pool(parser)
    options = parser.parse_args(arguments)
    check_budget(parser, options)
    if options.prompt + options.new > POSITIONS:
        parser.error("prompt and generated tokens exceed the demo model's 8192 positions: lower --prompt or --new")
    options.most_requests, options.pool_tokens = options.requests, options.dense_requests * POSITIONS
    return compare(options, whole_batches, record.RESULTS / "capacity.csv", (), "seconds")


def whole_batches(started: dict, options) -> list[dict]:
    """Return the rows of all rounds of batches."""
    batch = {"requests": options.requests, "prompt": options.prompt, "new": options.new}
    common = batch | {"pool_tokens": int(options.pool_tokens)}
    rows = []
    for turn in range(1, options.rounds + 1):
        replies = {}
        for name, engine in started.items():  # stock comes first
            reply = replies[name] = engine.ask("drain", **batch)
            counts = f"at most {reply['most_running']} running, {reply['preemptions']} preemptions"
            say(f"round {turn}, {name}: {reply['seconds']:.0f} s, {counts}")
            over_dense = reply["seconds"] / replies[DENSE]["seconds"]
            rounded = {"seconds": f"{reply['seconds']:.1f}", "it_over_dense": f"{over_dense:.3f}"}
            counted = {key: reply[key] for key in ("most_running", "preemptions")}
            rows.append(setting(options, name) | common | {"round": turn} | counted | rounded)
    return rows
