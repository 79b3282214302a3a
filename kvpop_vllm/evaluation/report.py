"""`kvpop eval`: files in, a table out."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from kvpop_vllm.config import DEFAULT_SINKS, ConfigError, ScorerShape
from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.hook import check_length, load_model, vocabulary_of
from kvpop_vllm.distill.run import default_device, load_tokenizer
from kvpop_vllm.evaluation.contenders import DEFAULT_WINDOW, Contender, learned, training_free
from kvpop_vllm.evaluation.runner import KEYS, Setting, evaluate, summarise

COLUMNS = (*KEYS, "teacher", "hindsight", "mass", "error", "kl", "perplexity", "accuracy")


def evaluate_text(options) -> list[dict]:
    """Evaluates what the command line names, prints the table and writes the records; returns the table."""
    if options.threads:
        torch.set_num_threads(options.threads)
    contenders = [training_free(name) for name in options.policies]
    shapes = {}
    for folder in options.scorer:
        contender, shapes[folder] = learned(folder, options.model)
        contenders.append(contender)
    if not contenders:
        raise ConfigError("nothing to evaluate: give --policies or --scorer")
    if options.correction is not None:
        contenders = with_correction(contenders, options.correction)
    names = [contender.name for contender in contenders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice!r} is to be compared twice: give it once")
    settings = _settings(options, shapes)
    check_length(options.model, max(options.length))
    rows = PackedTokens(
        options.data,
        load_tokenizer(options.model),
        max(options.length),
        split=options.split,
        seed=options.seed,
        repeat=False,
        vocab_size=vocabulary_of(options.model),
    )
    records = []
    with _records(options.out) if options.out else nullcontext() as file:  # here, before the work is done
        model = load_model(options.model, getattr(torch, options.dtype)).eval().to(default_device())
        for record in evaluate(model, itertools.islice(rows, options.rows), contenders, settings):
            records.append(record)
            if file:
                file.write(json.dumps(record) + "\n")
                file.flush()
        if not records:
            raise ConfigError(f"the {options.split} split holds no row of {max(options.length)} tokens: give more text")
    if (found := 1 + records[-1]["row"]) < options.rows:
        print(f"only {found} of {options.rows} rows: the {options.split} split holds no more")
    table = summarise(records)
    print(format_table(table))
    return table


def with_correction(contenders: list[Contender], correction: str) -> list[Contender]:
    """All that can be served on the kernels of serving, so that nothing else differs; with ``moment`` each of them also
    corrected, with ``none`` none of them."""
    found = [replace(c, serve=True, correction="none") if c.policy else c for c in contenders]
    if correction == "moment":
        for contender in contenders:
            if contender.policy is None:
                print(f"{contender.name} cannot be served, so it is not corrected")
        found += [contender.corrected() for contender in found if contender.policy]
    return found


@contextmanager
def _records(path: str) -> Iterator:
    """A file that becomes ``path`` when all is written. Until then, and for good if that never comes, what stood there
    stays, and what was written is in ``path.draft``. Devices and pipes are written to as they are."""
    if os.path.isdir(path):
        raise ConfigError(f"--out {path} is a folder: name a file")
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            yield file
        return
    path = os.path.realpath(path)
    draft = f"{path}.draft"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        if os.path.exists(draft) and os.path.getsize(draft) == 0:
            os.remove(draft)
        raise
    os.replace(draft, path)


def _agreed(values: dict[str, int], name: str, default: int, where: str = "") -> int:
    """What all scorer folders say alike."""
    first = next(iter(values), None)
    for folder, value in values.items():
        if value != values[first]:
            raise ConfigError(
                f"{folder} was trained with {name} {value}{where}, {first} with {values[first]}: give --{name}, or"
                " evaluate them apart"
            )
    return values[first] if values else default


def _settings(options, shapes: dict[str, ScorerShape]) -> list[Setting]:
    settings, sinks = [], options.sinks
    if sinks is None:
        sinks = _agreed({folder: shape.sinks for folder, shape in shapes.items()}, "sinks", DEFAULT_SINKS)
    for shape in shapes.values():
        if options.window is not None:
            shape.check_window(options.window, "--window")
    for length, share, equal in itertools.product(options.length, options.share, options.equal):
        budget = length // share
        if share < 2:
            raise ConfigError(f"--share {share} keeps everything, and recall is undefined then: give at least 2")
        window = options.window
        if window is None:
            own = {folder: shape.window_for(budget - sinks) for folder, shape in shapes.items()}
            window = _agreed(own, "window", DEFAULT_WINDOW, f" at a budget of {budget}")
        waiting = options.decide_every - 1
        if budget <= sinks + window + waiting:
            more = f" and {waiting} tokens between decisions" if waiting else ""
            raise ConfigError(
                f"a budget of {length} / {share} = {budget} leaves nothing beside {sinks} sinks and a window of {window}{more}"
            )
        if equal == "bytes" and budget < 512:
            raise ConfigError(
                f"--equal bytes compares budgets of at least 512 tokens, where a scorer's state is a small part, and"
                f" {length} / {share} is {budget}: raise --length or lower --share"
            )
        settings.append(Setting(length, budget, sinks, window, equal, options.decide_every))
    return settings


def format_table(table: list[dict]) -> str:
    """Right-aligned columns; numbers with four digits after the point."""
    rows = [list(COLUMNS)]
    for line in table:
        values = (line.get(name) for name in COLUMNS)
        rows.append(["" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
