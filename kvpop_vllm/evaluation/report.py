"""`kvpop eval`: evaluates policies on files and prints a table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from kvpop_vllm import policies
from kvpop_vllm.config import DEFAULT_SINKS, ConfigError, ScorerShape
from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.hook import check_length, vocabulary_of
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.backends import Backend, TransformersBackend
from kvpop_vllm.evaluation.output import format_table, records_file
from kvpop_vllm.evaluation.pictures import Report
from kvpop_vllm.evaluation.policies import PolicySpec, learned, training_free
from kvpop_vllm.evaluation.runner import KEYS, Setting, evaluate, summarise

DEFAULT_WINDOW = 64
"""w of all policies if no scorer specifies it."""

COLUMNS = (*KEYS, "teacher", "hindsight", "mass", "error", "kl", "perplexity", "accuracy")
DEFAULT_POLICIES = "streaming-llm", "l2norm", "random"
DEFAULT_SHARES = (4,)
LEAST_AT_EQUAL_BYTES = 512


def evaluate_text(options) -> list[dict]:
    """Evaluate the policies of the command line on text, print the table and write the records.

    Returns:
        The table.

    Raises:
        ConfigError: the options do not fit each other, the model or the data.
    """
    specs, shapes = contenders_of(options, DEFAULT_POLICIES)
    settings = _settings(options, shapes)
    check_length(options.model, max(options.length))
    packed = PackedTokens(
        options.data,
        load_tokenizer(options.model),
        max(options.length),
        split=options.split,
        seed=options.seed,
        vocab_size=vocabulary_of(options.model),
    )
    rows: list[torch.Tensor] = []

    def records(backend: Backend) -> Iterator[dict]:
        rows.extend(first_rows(packed.one_pass(), options))
        return evaluate(backend.model, rows, specs, settings)

    maps = [(setting, spec) for setting in longest_of(settings) for spec in specs]
    return run_and_report(options, TransformersBackend, records, summarise, COLUMNS, maps, lambda: rows[0])


def first_rows(rows: Iterable[torch.Tensor], options) -> list[torch.Tensor]:
    """Return the first ``--rows`` rows of the longest length, and say if there are fewer.

    Raises:
        ConfigError: there are none.
    """
    found = list(itertools.islice(rows, options.rows))
    if not found:
        raise ConfigError(
            f"the {options.split} split holds no row of {max(options.length)} tokens: give more text or lower --length"
        )
    if len(found) < options.rows:
        print(f"only {len(found)} of {options.rows} rows: the {options.split} split holds no more")
    return found


def run_and_report(
    options,
    backend_class: type[Backend],
    records: Callable[[Backend], Iterable[dict]],
    summarise: Callable[[list[dict]], list[dict]],
    columns: tuple[str, ...],
    maps: list[tuple[Setting, PolicySpec]],
    example: Callable[[], torch.Tensor],
) -> list[dict]:
    """Measure, print the table, and write records and report.

    Args:
        options: options of the command line.
        backend_class: makes a backend from model folder, dtype and maximum tokens of a request.
        records: yields the records; each is written when it comes.
        summarise: makes a table of records.
        columns: columns of the table.
        maps: settings and policies of the report's maps.
        example: returns the tokens ``[S]`` of the maps.

    Returns:
        The table.
    """
    report, found = Report(options.report) if options.report else None, []
    # opened before the work is done
    with records_file(options.out) if options.out else nullcontext() as file:
        backend = backend_class(options.model, getattr(torch, options.dtype), max(options.length))
        for record in records(backend):
            found.append(record)
            if file:
                file.write(json.dumps(record) + "\n")
                file.flush()
    table = summarise(found)
    print(format_table(table, columns))
    if report:
        for setting, spec in maps:
            report.add_map(backend, setting, spec, example())
        report.write(options.task, table, columns, " ".join(options.data))
    return table


def contenders_of(options, default: tuple[str, ...]) -> tuple[list[PolicySpec], dict[str, ScorerShape]]:
    """Return the specs of the command line, and the shape that each scorer was trained with.

    Contenders come from ``--policies`` (or ``default``), ``--scorer``, ``--allocator``, ``--protect-prompt``
    and ``--correction``.

    Raises:
        ConfigError: there is no spec, one is given twice, or one cannot be used.
    """
    names, shapes = options.policies, {}
    if names is None:  # rows of other tasks are not prompts with answers
        names = [name for name in default if options.task == "retrieval" or not policies.get(name).compresses]
    specs = [training_free(name) for name in names]
    for folder in options.scorer:
        spec, shapes[folder] = learned(folder, options.model)
        specs.append(spec)
    if not specs:
        raise ConfigError("nothing to evaluate: give --policies or --scorer")
    if options.allocator is not None:
        specs = [spec.allocated(name) for spec in specs for name in dict.fromkeys(options.allocator)]
    if options.protect_prompt is not None:
        specs = with_protection(specs, options.protect_prompt, options.task)
    elif options.task != "retrieval":  # rows are all prompt
        check_evicting(specs)
        specs = [replace(c, protect=0) for c in specs]
    if "bytes" in options.equal:
        check_tails(specs)
    if options.correction is not None:
        specs = with_correction(specs, options.correction)
    specs, names = [replace(spec, seed=options.seed) for spec in specs], [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice!r} is to be compared twice: give it once")
    return specs, shapes


def check_evicting(specs: list[PolicySpec]) -> None:
    """Check that no spec compresses prompts, for tasks whose rows are not prompts with answers.

    Raises:
        ConfigError: one does.
    """
    for spec in specs:
        if policies.get(spec.policy).compresses:
            raise ConfigError(
                f"{spec.name} compresses a prompt at its end, and these rows have no end before the last: give --task retrieval"
            )


def check_tails(specs: list[PolicySpec]) -> None:
    """Check that no spec protects prompts: at equal bytes a prefix would be taken from the tail.

    Raises:
        ConfigError: one does.
    """
    for spec in specs:
        own = policies.get(spec.policy).default_protect if spec.protect is None else spec.protect
        if own:
            raise ConfigError(
                f"--equal bytes compares tails only, {spec.name} protects prompts: give --protect-prompt 0"
            )


def longest_of(settings: list[Setting]) -> list[Setting]:
    """Return the settings of the greatest length."""
    return [setting for setting in settings if setting.length == max(s.length for s in settings)]


def with_protection(specs: list[PolicySpec], asked: list[bool | int], task: str) -> list[PolicySpec]:
    """Return each spec with each of these protections, on the kernels of serving.

    Raises:
        ConfigError: whole prompts are to be protected in a task whose rows are all prompt, or a spec compresses prompts.
    """
    for spec in specs:
        if policies.get(spec.policy).compresses:
            raise ConfigError(
                f"{spec.name} holds prompts until their end anyway: leave --protect-prompt out, or {spec.name}"
            )
    asked = list({(type(each), each): each for each in asked}.values())  # True is not 1
    if any(each is True for each in asked) and task != "retrieval":
        raise ConfigError(
            f"--protect-prompt all keeps all of a row in --task {task}: give a number, or --task retrieval"
        )
    unasked = [policies.get(c.policy).default_protect if task == "retrieval" else 0 for c in specs]
    return [c.protecting(each, own) for c, own in zip(specs, unasked, strict=True) for each in asked]


def with_correction(specs: list[PolicySpec], correction: str) -> list[PolicySpec]:
    """Return each spec on the kernels of serving, so that they differ in nothing else.

    With ``moment`` a corrected copy of each is added; with ``none`` no spec is corrected.
    """
    found = [replace(c, serve=True, correction="none") for c in specs]
    return found + [spec.corrected() for spec in found] if correction == "moment" else found


def _agreed(values: dict[str, int], name: str, default: int, where: str = "") -> int:
    """Return the value that all scorer folders agree on, or ``default`` if there are none.

    Raises:
        ConfigError: they do not agree.
    """
    first = next(iter(values), None)
    for folder, value in values.items():
        if value != values[first]:
            raise ConfigError(
                f"{folder} was trained with {name} {value}{where}, {first} with {values[first]}: give --{name}, or"
                " evaluate them apart"
            )
    return values[first] if values else default


def budgets(options, length: int) -> list[tuple[int, str]]:
    """Return the budgets for rows of ``length`` tokens, each with its derivation as text.

    Raises:
        ConfigError: ``--share 1`` is asked for.
    """
    if options.budget:
        return [(budget, str(budget)) for budget in options.budget]
    if 1 in (options.share or ()):
        raise ConfigError("--share 1 keeps everything, and there is nothing to compare: give at least 2")
    return [(length // share, f"{length} / {share} = {length // share}") for share in options.share or DEFAULT_SHARES]


def check_equal_bytes(budget: int, said: str) -> None:
    """Check that a budget is large enough to be compared at equal bytes.

    Args:
        budget: B in tokens.
        said: the budget's derivation from :func:`budgets`.

    Raises:
        ConfigError: it is not.
    """
    if budget < LEAST_AT_EQUAL_BYTES:
        raise ConfigError(
            f"--equal bytes compares budgets of at least {LEAST_AT_EQUAL_BYTES} tokens, where a scorer's state is a small part,"
            f" and {said} is less: raise --length or --budget, or lower --share"
        )


def _settings(options, shapes: dict[str, ScorerShape]) -> list[Setting]:
    settings, sinks = [], options.sinks
    if sinks is None:
        sinks = _agreed({folder: shape.sinks for folder, shape in shapes.items()}, "sinks", DEFAULT_SINKS)
    for shape in shapes.values():
        if options.window is not None:
            shape.check_window(options.window, "--window")
    for length in options.length:
        for (budget, said), equal in itertools.product(budgets(options, length), options.equal):
            if budget > length - 2:
                raise ConfigError(
                    f"a budget of {budget} keeps all of {length} tokens: lower --budget or raise --length"
                )
            window = options.window
            if window is None:
                own = {folder: shape.window_for(budget - sinks) for folder, shape in shapes.items()}
                window = _agreed(own, "window", DEFAULT_WINDOW, f" at a budget of {budget}")
            if budget <= sinks + window:
                raise ConfigError(f"a budget of {said} leaves nothing beside {sinks} sinks and a window of {window}")
            if equal == "bytes":
                check_equal_bytes(budget, said)
            settings.append(Setting(length, budget, sinks, window, equal))
    return settings
