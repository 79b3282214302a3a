"""Policies, lengths, budgets and rows of a call of `kvpop eval`.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvpop_vllm import policies
from kvpop_vllm.calibration.shares import check_holds_any, has_shares
from kvpop_vllm.calibration.statistics import CONFIG_NAME
from kvpop_vllm.config import DEFAULT_SINKS, ConfigError, ScorerShape
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.tokens import DocumentEncoder
from kvpop_vllm.evaluation.haystack import Row
from kvpop_vllm.evaluation.output import note
from kvpop_vllm.evaluation.policies import PolicySpec, learned, training_free
from kvpop_vllm.evaluation.runner import Setting
from kvpop_vllm.model_shape import positions_of, read_model_config, vocabulary_of

DEFAULT_WINDOW = 64
"""w of all policies if no scorer specifies it."""
DEFAULT_SHARES = (4,)
EQUAL = "k", "bytes"
NO_CALIBRATION = "none"
"""Value of ``--calibration`` for policies without one, among folders and files."""
ANSWERED = "retrieval", "reasoning"
"""Tasks whose rows are prompts with answers. Rows of others are all prompt."""
DRAWS = 5
"""Seeds of a policy that draws, in reasoning."""
REFERENCE = "streaming-llm"
"""Policy that ratios refer to if it is compared and no other is named."""


def first_rows(rows: Iterable[Row], options) -> list[Row]:
    """Return the first ``--rows`` rows of the longest length, and say if there are fewer."""
    chosen = list(itertools.islice(rows, options.rows))
    if not chosen:
        raise ConfigError(
            f"the {options.split} split holds no row of {max(options.length)} tokens: give more text or lower --length"
        )
    if len(chosen) < options.rows:
        note(f"only {len(chosen)} of {options.rows} rows: the {options.split} split holds no more")
    return chosen


def reference_of(options, specs: list[PolicySpec]) -> str | None:
    """Return the name of the policy that ratios refer to, or None."""
    names = [spec.name for spec in specs]
    if options.against is None:
        return REFERENCE if REFERENCE in names else None
    if options.against not in names:
        raise ConfigError(f"--against {options.against} is not compared: choose from {', '.join(names)}, or add it")
    return options.against


def check_teacher(model: str, teacher: str, length: int) -> None:
    """Check that a teacher reads the same tokens as a model, and rows of ``length`` tokens."""
    remedy = "give the model that --model was trained from"
    theirs, ours = vocabulary_of(teacher), vocabulary_of(model)
    if theirs != ours:
        raise ConfigError(f"--teacher {teacher} knows {theirs} tokens, {model} {ours}: {remedy}")
    tokenizers = [load_tokenizer(model), load_tokenizer(teacher)]
    encoders = [DocumentEncoder(tokenizer, None).fingerprint()[:-1] for tokenizer in tokenizers]  # no template
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab() or encoders[0] != encoders[1]:
        raise ConfigError(f"--teacher {teacher} has another tokenizer than {model}: {remedy}")
    positions = positions_of(read_model_config(teacher))
    if positions is not None and length > positions:
        raise ConfigError(f"--teacher {teacher} has {positions} positions: lower --length {length}, or {remedy}")


def contenders_of(options, default: tuple[str, ...]) -> tuple[list[PolicySpec], dict[str, ScorerShape]]:
    """Return the specs of the command line, and the shape that each scorer was trained with.

    Contenders come from ``--policies`` (or ``default``), ``--scorer``, ``--allocator``, ``--calibration``,
    ``--protect-prompt`` and ``--correction``.
    """
    names, shapes = options.policies, {}
    if names is None:
        # rows of other tasks are not prompts with answers, and nothing protects a prompt that is compressed
        takes_any = options.task in ANSWERED and options.protect_prompt is None
        names = [name for name in default if takes_any or not policies.get(name).compresses]
        if options.task in ANSWERED and (left_out := [name for name in default if name not in names]):
            note(f"left out with --protect-prompt: {', '.join(left_out)}, which compress prompts")
    folders = [folder for folder in options.calibration or () if folder != NO_CALIBRATION]
    for folder in folders:
        check_holds_any(folder, CONFIG_NAME)
    statistics = next((folder for folder in folders if (Path(folder) / CONFIG_NAME).is_file()), None)
    specs = [training_free(name).measured(statistics or next(iter(folders), None)) for name in names]
    for folder in options.scorer:
        spec, shapes[folder] = learned(folder, options.model)
        specs.append(spec)
    if not specs:
        _check_dense_alone(options)
    plain = NO_CALIBRATION in (options.calibration or ())
    as_they_are = [spec for spec in specs if policies.get(spec.policy).compresses]  # take no calibration
    uncalibrated = [spec for spec in specs if spec.calibration is None and spec not in as_they_are]
    if options.allocator is not None:
        specs = [spec.allocated(name) for spec in specs for name in dict.fromkeys(options.allocator)]
    elif any(map(has_shares, folders)) and not plain:
        specs = [spec for spec in specs if spec.calibration is not None or spec in as_they_are]
    specs += [spec.calibrated(folder) for folder in filter(has_shares, folders) for spec in uncalibrated]
    if options.protect_prompt is not None:
        specs = with_protection(specs, options.protect_prompt, options.task)
    elif options.task not in ANSWERED:
        check_evicting(specs)
        specs = [replace(c, protect=0) for c in specs]
    if options.correction is not None:
        specs = with_correction(specs, options.correction)
    specs, names = [replace(spec, seed=options.seed) for spec in specs], [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice!r} is to be compared twice: give it once")
    return specs, shapes


def _check_dense_alone(options) -> None:
    """Check that the dense model can be evaluated without policies, and that no option is about these."""
    if options.no_dense or options.task not in ANSWERED:
        raise ConfigError("nothing to evaluate: give --policies or --scorer")
    of_policies = "share", "budget", "sinks", "window", "equal", "allocator", "calibration", "correction", "against"
    if ignored := [name for name in of_policies if getattr(options, name) not in (None, [])]:
        raise ConfigError(f"--{ignored[0]} says nothing to the dense model alone: leave it out, or give --policies")


def check_evicting(specs: list[PolicySpec]) -> None:
    """Check that no spec compresses prompts, for tasks whose rows are not prompts with answers."""
    for spec in specs:
        if policies.get(spec.policy).compresses:
            raise ConfigError(
                f"{spec.name} compresses a prompt at its end, and these rows have no end before the last: give --task retrieval"
            )


def with_protection(specs: list[PolicySpec], protections: list[bool | int], task: str) -> list[PolicySpec]:
    """Return each spec with each of these protections."""
    for spec in specs:
        if policies.get(spec.policy).compresses:
            raise ConfigError(
                f"{spec.name} holds prompts until their end anyway: leave --protect-prompt out, or {spec.name}"
            )
    protections = list(
        {(type(protection), protection): protection for protection in protections}.values()
    )  # True is not 1
    if any(protection is True for protection in protections) and task not in ANSWERED:
        raise ConfigError(
            f"--protect-prompt all keeps all of a row in --task {task}: give a number, or --task retrieval"
        )
    if len(protections) == 1:  # the same for all, so that names need not say it
        return [replace(spec, protect=protections[0]) for spec in specs]
    unasked = [policies.get(c.policy).default_protect if task in ANSWERED else 0 for c in specs]
    return [
        c.protecting(protection, default)
        for c, default in zip(specs, unasked, strict=True)
        for protection in protections
    ]


def with_correction(specs: list[PolicySpec], correction: str) -> list[PolicySpec]:
    """Return each spec without correction and, with ``moment``, a corrected copy of each."""
    plain = [replace(c, correction="none") for c in specs]
    return plain + [spec.corrected() for spec in plain] if correction == "moment" else plain


def _agreed(values: dict[str, int], name: str, default: int, condition: str = "") -> int:
    """Return the value that all scorer folders agree on, or ``default`` if there are none."""
    first = next(iter(values), None)
    for folder, value in values.items():
        if value != values[first]:
            raise ConfigError(
                f"{folder} was trained with {name} {value}{condition}, {first} with {values[first]}: give --{name}, or"
                " evaluate them apart"
            )
    return values[first] if values else default


def budgets(options, length: int) -> list[tuple[int, str]]:
    """Return the budgets for rows of ``length`` tokens, each with its derivation as text."""
    if options.budget:
        return [(budget, str(budget)) for budget in dict.fromkeys(options.budget)]
    if 1 in (options.share or ()):
        raise ConfigError("--share 1 keeps everything, and there is nothing to compare: give at least 2")
    shares = dict.fromkeys(options.share or DEFAULT_SHARES)
    return [(length // share, f"{length} / {share} = {length // share}") for share in shares]


def _shared_roles(options, shapes: dict[str, ScorerShape], budget: int) -> tuple[int, int]:
    """Return sinks and window of all policies at a budget: those given, those of the scorers, or defaults."""
    sinks, window = options.sinks, options.window
    if sinks is None:
        sinks = _agreed({folder: shape.sinks for folder, shape in shapes.items()}, "sinks", DEFAULT_SINKS)
    if window is None:
        windows = {folder: shape.window_for(budget - sinks) for folder, shape in shapes.items()}
        return sinks, _agreed(windows, "window", DEFAULT_WINDOW, f" at a budget of {budget}")
    for shape in shapes.values():
        shape.check_window(window, "--window")
    return sinks, window


def with_draws(specs: list[PolicySpec]) -> list[PolicySpec]:
    """Return the specs, those that draw once for each of :data:`DRAWS` seeds."""
    return [
        replace(spec, seed=spec.seed + i)
        for spec in specs
        for i in range(DRAWS if policies.get(spec.policy).draws else 1)
    ]


def settings_of(
    options, shapes: dict[str, ScorerShape] | None, *, prompt: int | None = None, written: int | None = None
) -> list[Setting]:
    """Return all lengths and budgets of the command line.

    Args:
        options: options of the command line.
        shapes: of scorers that determine the sinks and window of all policies, None leaves each its own.
        prompt: tokens of a request's prompt, None if all are.
        written: tokens that ``--share`` is about, None for a row's.
    """
    # recall of text needs a query after B that is not the last, see recall_of()
    settings, after_budget = [], 1 if shapes is None else 2
    for length in dict.fromkeys(options.length):
        for (budget, derivation), equal in itertools.product(
            budgets(options, written or length), dict.fromkeys(options.equal or EQUAL)
        ):
            if budget > length - after_budget:
                raise ConfigError(
                    f"a budget of {budget} keeps all of {length} tokens: lower --budget or raise --length"
                )
            sinks, window = options.sinks, options.window
            if shapes is not None:
                sinks, window = _shared_roles(options, shapes, budget)
                if budget <= sinks + window:
                    raise ConfigError(
                        f"a budget of {derivation} leaves nothing beside {sinks} sinks and a window of {window}"
                    )
            settings.append(Setting(length, budget, sinks, window, equal, prompt))
    return settings
