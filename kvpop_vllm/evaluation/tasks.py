"""`kvpop eval`: runs a task under policies, prints a table, and writes records and a report."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.hook import check_length, vocabulary_of
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation import replay, retrieval
from kvpop_vllm.evaluation.backends import Backend, Run
from kvpop_vllm.evaluation.haystack import replay_rows, sentences
from kvpop_vllm.evaluation.options import contenders_of, first_rows, settings_of
from kvpop_vllm.evaluation.output import format_table, records_file
from kvpop_vllm.evaluation.pictures import Report
from kvpop_vllm.evaluation.policies import PolicySpec, ResolvedPolicy, known_training_free
from kvpop_vllm.evaluation.runner import KEYS, Setting, described, evaluate, grouped, summarise
from kvpop_vllm.policies.base import ModelShape

DEFAULT_POLICIES = "streaming-llm", "l2norm", "random"
"""Policies of ``--task text`` if none are named."""
TEXT_COLUMNS = (*KEYS, "teacher", "hindsight", "mass", "error", "kl", "perplexity", "accuracy")
RETRIEVAL_COLUMNS = (*KEYS, "kind", "examples", *retrieval.MEASURES)
REPLAY_COLUMNS = (*KEYS, "rows", "perplexity", "kl", "kl, all held", "kl, last quarter", "agreement")
BUCKETS = 16
"""Number of buckets of a row's positions, unless ``--bucket`` gives their size."""
CHARACTERS = 16
"""Characters of text per token of haystack, an upper bound."""


class Task(NamedTuple):
    """Task that is done under each policy.

    Attributes:
        records: yields the records of all policies with all budgets on a backend.
        example: ``[S]`` tokens of the first row or example of the greatest length, for maps of retained tokens.
        summarise: makes a table of records.
        columns: columns of the table.
    """

    records: Callable[[Backend, list[PolicySpec], list[Setting]], Iterable[dict]]
    example: torch.Tensor
    summarise: Callable[[list[dict]], list[dict]]
    columns: tuple[str, ...]


def evaluate_task(options, backend_class: type[Backend]) -> list[dict]:
    """Run the task of the command line, print its table, and write records and report.

    In ``text`` all policies have the same sinks and window, in other tasks their defaults of serving.

    Args:
        options: options of the command line.
        backend_class: makes a backend from model folder, dtype and maximum tokens of a request.

    Returns:
        The table.

    Raises:
        ConfigError: the options do not fit each other, the model or the data.
    """
    is_text = options.task == "text"
    specs, shapes = contenders_of(options, DEFAULT_POLICIES if is_text else tuple(known_training_free()))
    settings = settings_of(options, shapes if is_text else None)
    longest, dtype = max(options.length), getattr(torch, options.dtype)
    check_length(options.model, longest)
    shape = ModelShape.of(options.model, longest)
    if options.policies is None and not is_text:
        specs = _deployable(specs, settings, shape, dtype)
    deploy_all(specs, settings, shape, dtype)
    task = {"text": _text, "retrieval": _retrieval, "replay": _replay}[options.task](options)
    report, found = Report(options.report) if options.report else None, []
    with records_file(options.out) if options.out else nullcontext() as file:
        backend = backend_class(options.model, dtype, longest)
        for record in task.records(backend, specs, settings):
            found.append(record)
            if file:
                file.write(json.dumps(record) + "\n")
                file.flush()
    table = task.summarise(found)
    print(format_table(table, task.columns))
    if report:
        for setting, spec in itertools.product([s for s in settings if s.length == longest], specs):
            report.add_map(backend, setting, spec, task.example)
        report.write(options.task, table, task.columns, " ".join(options.data))
    return table


def deploy_all(
    specs: list[PolicySpec], settings: list[Setting], shape: ModelShape, dtype: torch.dtype
) -> list[tuple[ResolvedPolicy, list[Setting]]]:
    """Return every spec with every budget, and the settings (lengths) that it runs with; no model is loaded.

    Raises:
        ConfigError: a spec cannot be used with a setting.
    """
    found: dict[tuple, tuple[ResolvedPolicy, list[Setting]]] = {}
    for spec, setting in itertools.product(specs, settings):
        resolved, key = setting.resolve(spec, shape, dtype), (spec.name, setting.budget, setting.equal)
        found.setdefault(key, (resolved, []))[1].append(setting)
    return list(found.values())


def _deployable(specs: list[PolicySpec], settings: list[Setting], shape: ModelShape, dtype) -> list[PolicySpec]:
    """Return the specs that can be used with all settings; print why others are left out.

    Raises:
        ConfigError: none can, or one with a scorer cannot.
    """
    found, why = [], list(policies.loadable()[1])
    for spec in specs:
        try:
            deploy_all([spec], settings, shape, dtype)
            found.append(spec)
        except ConfigError as error:
            if spec.scorer is not None:
                raise
            why.append(str(error))
    if not found:
        raise ConfigError(why[-1])
    for line in why:
        print(f"left out: {line}")
    return found


def run_task(
    options, material: dict[int, list], ask: Callable[[Run, int], Iterator[dict]],
    backend: Backend, specs: list[PolicySpec], settings: list[Setting],
) -> Iterator[dict]:  # fmt: skip
    """Yield records of the dense model, then of every policy with every budget.

    Args:
        options: options of the command line.
        material: length -> rows or examples.
        ask: yields the records of a run on the material of one length.
        backend: what runs the model.
        specs: policies to compare.
        settings: lengths and budgets to compare them at.
    """
    names = {"task": options.task, "backend": options.backend}
    with backend.start(None) as run:
        for length in material:
            for record in ask(run, length):
                yield names | {"length": length, "policy": "dense"} | record
    for resolved, own in deploy_all(specs, settings, backend.shape, backend.dtype):
        with backend.start(resolved) as run:
            for setting in own:
                for record in ask(run, setting.length):
                    yield names | {"length": setting.length} | described(setting, resolved) | record


def _text(options) -> Task:
    places = {"split": options.split, "seed": options.seed, "vocab_size": vocabulary_of(options.model)}
    packed = PackedTokens(options.data, load_tokenizer(options.model), max(options.length), **places)
    rows = first_rows(packed.one_pass(), options)
    return Task(lambda backend, *compared: evaluate(backend.model, rows, *compared), rows[0], summarise, TEXT_COLUMNS)


def _retrieval(options) -> Task:
    tokenizer = load_tokenizer(options.model)
    text = sentences(options.data, options.split, CHARACTERS * max(options.length))
    made = {"count": options.rows, "seed": options.seed, "digits": options.digits}
    material = {n: retrieval.make_examples(options.kinds, tokenizer, text, n, **made) for n in options.length}
    if not tokenizer.chat_template:
        print(f"{options.model} has no chat template: prompts are plain text")

    def ask(run: Run, length: int) -> Iterator[dict]:
        return retrieval.answers(run, tokenizer, material[length])

    example = torch.tensor(material[max(options.length)][0].prompt)
    records = functools.partial(run_task, options, material, ask)
    return Task(records, example, summarise_retrieval, RETRIEVAL_COLUMNS)


def summarise_retrieval(records: list[dict]) -> list[dict]:
    """Return means over examples: a line for each length, budget, policy and kind."""
    table = []
    for line, members in grouped(records, (*KEYS, "kind")):
        means = {name: sum(m[name] for m in members) / len(members) for name in retrieval.MEASURES}
        table.append(line | {"examples": len(members)} | means)
    return table


def _replay(options) -> Task:
    places = {"split": options.split, "seed": options.seed, "vocab_size": vocabulary_of(options.model)}
    rows = first_rows(replay_rows(options.data, load_tokenizer(options.model), max(options.length), **places), options)
    material = {length: [row[:length] for row in rows] for length in options.length}
    records = functools.partial(run_task, options, material, Replay(material, options.bucket))
    return Task(records, rows[0], summarise_replay, REPLAY_COLUMNS)


class Replay:
    """Replay of rows under a run; the first run is the dense one.

    Args:
        material: length -> rows ``[length]``.
        bucket: positions of a bucket; None for a sixteenth of the row.
    """

    def __init__(self, material: dict[int, list[torch.Tensor]], bucket: int | None):
        self.material, self.bucket = material, bucket
        self.dense: dict[int, list[torch.Tensor]] = {}

    def __call__(self, run: Run, length: int) -> Iterator[dict]:
        """Yield one record for each row under ``run``."""
        bucket = self.bucket or max(1, length // BUCKETS)
        rows = self.material[length]
        if length not in self.dense:
            self.dense[length] = [replay.predictions(run, row) for row in rows]
        for number, (row, dense) in enumerate(zip(rows, self.dense[length], strict=True)):
            yield {"row": number} | replay.compare(run, row, dense, bucket)


def summarise_replay(records: list[dict]) -> list[dict]:
    """Return means over rows.

    ``kl, all held`` is the mean of the buckets that end before anything is evicted, ``kl, last quarter`` that
    of the buckets that begin in the last quarter of the row.
    """
    table = []
    for line, members in grouped(records, KEYS):
        means = {name: sum(m[name] for m in members) / len(members) for name in replay.MEASURES}
        curves = {
            f"{name}_by_position": [sum(part) / len(members) for part in zip(*(m[f"{name}_by_position"] for m in members), strict=True)]
            for name in replay.MEASURES
        }  # fmt: skip
        bucket, kl = members[0]["bucket"], curves["kl_by_position"]
        early = [x for i, x in enumerate(kl) if (i + 1) * bucket <= members[0].get("whole", 0)]
        late = [x for i, x in enumerate(kl) if i * bucket >= 0.75 * (line["length"] - 1)]
        found = {"rows": len(members), "perplexity": math.exp(means["nll"]), "bucket": bucket}
        if line["budget"]:
            found |= {"kl, all held": sum(early) / len(early) if early else None}
            found |= {"kl, last quarter": sum(late) / len(late) if late else None}
        table.append(line | found | means | curves)
    return table
