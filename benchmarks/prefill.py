"""Prefill of stock vLLM against fixed budgets, paired: one prompt at a time, the engines in turn.

It uses the same children as decode.py. Nothing is called faster unless every policy gave stock's greedy
tokens on prompts shorter than its budget. If a prompt exceeds the demo model's 8,192 positions, all prompts
are read by a model of its shape with longer rotary tables and random weights, whose outputs mean nothing.
This shows how time grows with the prompt and is not compared with stock. Rows are appended to
benchmarks/results/prefill.csv.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import record
from engines import add_options, check_budget, compare, say

RESULTS = record.ROOT / "benchmarks" / "results" / "prefill.csv"
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
        return compare(
            options,
            lambda started: measure(started, options),
            report,
            lambda rows: record.append(RESULTS, rows),
            judged=judged,
        )


def measure(started: dict, options) -> list[dict]:
    """Return the rows of all rounds."""
    for engine in started.values():
        engine.ask("prompt", context=min(options.context))  # the first long prompt is not counted
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, budget=1024, rounds=5)
    parser.add_argument("--context", nargs="+", type=int, default=[7500], help="tokens of each prompt (default 7500)")
    options = parser.parse_args()
    check_budget(parser, options)
    options.most_requests, options.pool_tokens = 1, 1.15 * max(POSITIONS, max(options.context) + 1)
    return options


def one_turn(started: dict, turn: int, context: int, options) -> list[dict]:
    """Return one row per configuration for one prompt."""
    from importlib.metadata import version

    took = {name: engine.ask("prompt", context=context)["seconds"] for name, engine in started.items()}
    rate = {name: context / seconds for name, seconds in took.items()}
    say(f"{context} tokens, round {turn}: " + ", ".join(f"{name} {r:.0f} tokens/s" for name, r in rate.items()))
    setting = {
        "threads": options.threads,
        "vllm": version("vllm"),
        "mode": "eager" if options.eager else "compiled",
        "weights": "random" if options.load_format == "dummy" else "demo",
        "context": context,
        "budget": options.budget,
    }
    return [
        setting
        | {
            "configuration": name,
            "round": turn,
            "tokens_per_s": f"{r:.1f}",
            "over_dense": "" if options.load_format == "dummy" else f"{r / rate['dense']:.3f}",
        }
        for name, r in rate.items()
    ]


def report(rows: list[dict]) -> str:
    """Return the results as a table, with ratios to stock and the growth of time per token."""
    lines = [f"{'context':>7} {'':30} {'tokens/s':>8} {'it / dense: median':>19} {'min':>6} {'max':>6}"]
    contexts = sorted({row["context"] for row in rows})
    for name in dict.fromkeys(row["configuration"] for row in rows):
        rate = {}
        for context in contexts:
            mine = [row for row in rows if (row["configuration"], row["context"]) == (name, context)]
            ratios = [float(row["over_dense"]) for row in mine if row["over_dense"]]
            rate[context] = statistics.median(float(row["tokens_per_s"]) for row in mine)
            line = f"{context:7} {name:30} {rate[context]:8.0f}"
            if ratios:
                line += f" {statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
            lines.append(line)
        if len(contexts) > 1:
            over = max(rate.values()) / min(rate.values())
            lines.append(
                f"        {name}: longest / shortest time per token, {contexts[0]} to {contexts[-1]}: {over:.2f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
