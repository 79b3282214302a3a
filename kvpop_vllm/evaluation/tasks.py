"""`kvpop eval --task retrieval` and `--task replay`, on any backend.

Every policy has its defaults of serving.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import check_length, vocabulary_of
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation import replay, retrieval
from kvpop_vllm.evaluation.backends import Backend, Run
from kvpop_vllm.evaluation.haystack import replay_rows, sentences
from kvpop_vllm.evaluation.policies import PolicySpec, ResolvedPolicy, known_training_free
from kvpop_vllm.evaluation.report import (
    budgets,
    check_equal_bytes,
    contenders_of,
    first_rows,
    longest_of,
    run_and_report,
)
from kvpop_vllm.evaluation.runner import KEYS, Setting, described, grouped
from kvpop_vllm.policies.base import ModelShape

RETRIEVAL_COLUMNS = (*KEYS, "kind", "examples", *retrieval.MEASURES)
REPLAY_COLUMNS = (*KEYS, "rows", "perplexity", "kl", "kl, all held", "kl, last quarter", "agreement")
BUCKETS = 16
"""Number of buckets of a row's positions, unless ``--bucket`` gives their size."""
CHARACTERS = 16
"""Characters of text per token of haystack, an upper bound."""


class Task(NamedTuple):
    """Task that is done under each policy.

    Attributes:
        material: length -> rows or examples.
        ask: yields the records of a run on the material of one length.
        example: returns ``[S]`` tokens of the first row or example, for the map of retained tokens.
        summarise: makes a table of records.
        columns: columns of the table.
    """

    material: dict[int, list]
    ask: Callable[[Run, int], Iterator[dict]]
    example: Callable[[int], torch.Tensor]
    summarise: Callable[[list[dict]], list[dict]]
    columns: tuple[str, ...]


def evaluate_task(options, backend_class: type[Backend]) -> list[dict]:
    """Run the task of the command line, print its table, and write records and report.

    Args:
        options: options of the command line.
        backend_class: makes a backend from model folder, dtype and maximum tokens of a request.

    Returns:
        The table.

    Raises:
        ConfigError: the options do not fit each other, the model or the data.
    """
    specs, _ = contenders_of(options, tuple(known_training_free()))
    settings = _settings(options)
    longest, dtype = max(options.length), getattr(torch, options.dtype)
    check_length(options.model, longest)
    shape = ModelShape.of(options.model, longest)
    if options.policies is None:
        specs = _deployable(specs, settings, shape, dtype)
    deployments = deploy_all(specs, settings, shape, dtype)
    task = {"retrieval": _retrieval, "replay": _replay}[options.task](options)
    names = {"task": options.task, "backend": options.backend}

    def records(backend: Backend) -> Iterator[dict]:
        return (names | record for record in run_task(task, backend, deployments))

    maps = [(setting, spec) for setting in longest_of(settings) for spec in specs]
    example = functools.partial(task.example, longest)
    return run_and_report(options, backend_class, records, task.summarise, task.columns, maps, example)


class Deployment(NamedTuple):
    """PolicySpec with one budget, and the settings (lengths) that it runs with."""

    resolved: ResolvedPolicy
    settings: list[Setting]


def deploy_all(
    specs: list[PolicySpec], settings: list[Setting], shape: ModelShape, dtype: torch.dtype
) -> list[Deployment]:
    """Return every spec with every budget; no model is loaded.

    Raises:
        ConfigError: a spec cannot be used with a setting.
    """
    found: dict[tuple, Deployment] = {}
    for spec, setting in itertools.product(specs, settings):
        resolved, key = setting.resolve(spec, shape, dtype), (spec.name, setting.budget, setting.equal)
        found.setdefault(key, Deployment(resolved, [])).settings.append(setting)
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


def run_task(task: Task, backend: Backend, deployments: list[Deployment]) -> Iterator[dict]:
    """Yield records of the dense model, then of every policy with every budget."""
    with backend.start(None) as run:
        for length in task.material:
            for record in task.ask(run, length):
                yield {"length": length, "policy": "dense"} | record
    for resolved, settings in deployments:
        with backend.start(resolved) as run:
            for setting in settings:
                for record in task.ask(run, setting.length):
                    yield {"length": setting.length} | described(setting, resolved) | record


def _settings(options) -> list[Setting]:
    settings = []
    for length in dict.fromkeys(options.length):
        for (budget, said), equal in itertools.product(budgets(options, length), options.equal):
            if budget >= length:
                raise ConfigError(
                    f"a budget of {budget} keeps all of {length} tokens: lower --budget or raise --length"
                )
            if equal == "bytes":
                check_equal_bytes(budget, said)
            settings.append(Setting(length, budget, options.sinks, options.window, equal))
    return settings


def _retrieval(options) -> Task:
    tokenizer = load_tokenizer(options.model)
    text = sentences(options.data, options.split, CHARACTERS * max(options.length))
    made = {"count": options.rows, "seed": options.seed, "digits": options.digits}
    material = {n: retrieval.make_examples(options.kinds, tokenizer, text, n, **made) for n in options.length}
    if not tokenizer.chat_template:
        print(f"{options.model} has no chat template: prompts are plain text")
    return Task(
        material,
        lambda run, length: retrieval.answers(run, tokenizer, material[length]),
        lambda length: torch.tensor(material[length][0].prompt),
        summarise_retrieval,
        RETRIEVAL_COLUMNS,
    )


def summarise_retrieval(records: list[dict]) -> list[dict]:
    """Return means over examples: a line for each length, budget, policy and kind."""
    table = []
    for line, members in grouped(records, (*KEYS, "kind")):
        means = {name: sum(m[name] for m in members) / len(members) for name in retrieval.MEASURES}
        table.append(line | {"examples": len(members)} | means)
    return table


def _replay(options) -> Task:
    rows_of = {
        "split": options.split, "seed": options.seed, "vocab_size": vocabulary_of(options.model)
    }  # fmt: skip
    rows = first_rows(replay_rows(options.data, load_tokenizer(options.model), max(options.length), **rows_of), options)
    material = {length: [row[:length] for row in rows] for length in options.length}
    return Task(
        material,
        Replay(material, options.bucket),
        lambda length: material[length][0],
        summarise_replay,
        REPLAY_COLUMNS,
    )


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
