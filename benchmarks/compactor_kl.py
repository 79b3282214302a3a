"""Measures what text behind a window loses when a compactor's slots take the window's place.

Usage: ``python benchmarks/compactor_kl.py MODEL COMPACTOR --data TEXT... [--documents N]``. Each document gives two
windows, of half to all of the tokens that the compactor was trained with. The text goes on behind one, and a passage of
the other is repeated. The KL divergence from the full context is compared with that of as many tokens of the window, the
first four and the last, and with that of the untrained compactor, which keeps tokens that are evenly spaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice

import torch

from kvpop_vllm.compaction.compactor_files import read_compactor
from kvpop_vllm.compaction.compactor_training import StillOptions, example_of, still_losses
from kvpop_vllm.compaction.run import load
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.haystack import rows_in_turn, single_documents, units_of
from kvpop_vllm.evaluation.output import format_table
from kvpop_vllm.evaluation.statistics import LEAST, bootstrap_ratio
from kvpop_vllm.model_shape import vocabulary_of
from kvpop_vllm.progress import progress

SINKS = 4
"""First tokens that the comparison keeps with the last ones."""


def truncated(slots: int):
    """Return a function in a compactor's place that keeps a window's first four tokens and its last ``slots - 4``."""

    def keep(caches):
        return [
            (*(torch.cat([part[:, :SINKS], part[:, SINKS - slots :]], 1) for part in layer), None) for layer in caches
        ]

    return keep


def untrained(compactor: Compactor, config) -> Compactor:
    """Return the compactor that the training of another one began with."""
    start = config.build()
    for initial, trained in zip(start.layers, compactor.layers, strict=True):
        initial.scale.copy_(trained.scale)
    return start


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each way to make the slots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("compactor")
    parser.add_argument("--data", nargs="+", required=True, help="text, JSONL, Parquet or datasets folders")
    parser.add_argument("--documents", type=int, default=16, help="default 16; intervals need 8")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        config, compactor, _ = read_compactor(options.compactor, options.model)
        training, tokenizer = StillOptions(**config.provenance["arguments"]), load_tokenizer(options.model)
        settings = {"split": "all", "seed": 0, "vocab_size": vocabulary_of(options.model)}
        length = training.window + training.own
        rows = list(
            islice(rows_in_turn(single_documents, options.data, tokenizer, length, **settings), options.documents)
        )
        if len(set(units_of(rows))) < LEAST:
            raise ConfigError(
                f"{len(rows)} windows are too few for intervals: raise --documents, or give {LEAST} texts"
            )
    except ConfigError as error:
        parser.error(str(error))
    model = load(options.model, "float32")
    ways = {"truncation": truncated(config.slots), "untrained": untrained(compactor, config), "trained": compactor}
    losses = {name: torch.zeros(len(rows), 2) for name in ways}
    with progress(len(rows), "windows") as tick:
        for number, row in enumerate(rows):
            for repeated in (0, 1):
                tokens, size = example_of(torch.tensor(row.tokens), 2 * number + repeated, training)
                for name, way in ways.items():
                    losses[name][number, repeated] = still_losses(model, way, tokens, size)[0]
            tick(1)
    table = []
    titles, baseline = ("text goes on", "a passage again"), losses["truncation"]
    for name, by_title in losses.items():
        row = {"slots made by": name}
        for title, kl, baseline_kl in zip(titles, by_title.T, baseline.T, strict=True):
            ratio = bootstrap_ratio(kl.tolist(), baseline_kl.tolist(), units=units_of(rows))
            row |= {title: f"{kl.mean():.3f}", f"{title}, ratio": "{:.2f} ({:.2f} to {:.2f})".format(*ratio)}
        table.append(row)
    print(f"{len(rows)} windows of at most {training.window} tokens, {config.slots} slots; nats a token")
    print(format_table(table, tuple(table[0])))


if __name__ == "__main__":
    main()
