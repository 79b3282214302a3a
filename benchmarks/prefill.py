"""Prefill of stock vLLM against fixed budgets, paired: one prompt at a time, the engines in turn.

It uses the same children as decode.py. Nothing is called faster unless every policy gave stock's greedy
tokens on prompts shorter than its budget. If a prompt exceeds the demo model's 8,192 positions, all prompts
are read by a model of its shape with longer rotary tables and random weights, whose outputs mean nothing.
This shows how time grows with the prompt and is not compared with stock. Rows are appended to
benchmarks/results/prefill.csv.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import record
from engines import check_budget, compare, parser_of, say, setting

RESULTS = record.RESULTS / "prefill.csv"
POSITIONS = 8192


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="kvpop-long-") as folder:
        if max(options.context) + 1 > POSITIONS:
            lengthen(Path(options.model), Path(folder), max(options.context) + 1)
            options.model, options.load_format = folder, "dummy"
        judged = options.load_format != "dummy"  # random weights make flat logits with meaningless near ties
        if not judged:
            print("random weights: outputs and times are not compared with stock's")
        return compare(options, measure, RESULTS, ("context",), "tokens_per_s", judged=judged)


def measure(started: dict, options) -> list[dict]:
    """Return the rows of all rounds."""
    for engine in started.values():
        engine.ask("drain", requests=1, prompt=min(options.context), new=1)  # the first long prompt is not counted
    rounds = range(1, options.rounds + 1)
    return [row for turn in rounds for context in options.context for row in one_turn(started, turn, context, options)]


def lengthen(model: Path, folder: Path, positions: int) -> None:
    """Write a folder with the model's configuration and tokenizer for ``positions`` positions."""
    for file in model.iterdir():
        if file.suffix in (".json", ".txt", ".model"):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=1024, rounds=5)
    parser.add_argument("--context", nargs="+", type=int, default=[7500], help="tokens of each prompt")
    options = parser.parse_args()
    check_budget(parser, options)
    options.most_requests, options.pool_tokens = 1, 1.15 * max(POSITIONS, max(options.context) + 1)
    return options


def one_turn(started: dict, turn: int, context: int, options) -> list[dict]:
    """Return one row per configuration for one prompt."""
    asked = {"requests": 1, "prompt": context, "new": 1}
    rate = {name: context / engine.ask("drain", **asked)["seconds"] for name, engine in started.items()}
    say(f"{context} tokens, round {turn}: " + ", ".join(f"{name} {r:.0f} tokens/s" for name, r in rate.items()))
    dummy = options.load_format == "dummy"
    rows = []
    for name, r in rate.items():
        row = {"weights": "random" if dummy else "demo", "context": context, "round": turn, "tokens_per_s": f"{r:.1f}"}
        rows.append(setting(options, name) | row | {"over_dense": "" if dummy else f"{r / rate['dense']:.3f}"})
    return rows


if __name__ == "__main__":
    sys.exit(main())
