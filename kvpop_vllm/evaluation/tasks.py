"""`kvpop eval`: runs a task under policies, prints a table, and writes records and a report.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import itertools
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from typing import NamedTuple

import torch

from kvpop_vllm import __version__, policies
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.distill.sources import find_sources
from kvpop_vllm.evaluation import options as asked
from kvpop_vllm.evaluation import reasoning, replay, retrieval, summaries
from kvpop_vllm.evaluation.backends import Backend, Run, Sampling, TransformersBackend
from kvpop_vllm.evaluation.haystack import Row, replay_rows, rows_in_turn, sentences, units_of
from kvpop_vllm.evaluation.output import format_table, note, note_kernels, records_file
from kvpop_vllm.evaluation.policies import PolicySpec, known_training_free
from kvpop_vllm.evaluation.report import Report
from kvpop_vllm.evaluation.runner import DENSE, OWN, Runs, Setting, dense_bytes, described, evaluate, resolve_all
from kvpop_vllm.evaluation.statistics import LEAST
from kvpop_vllm.model_shape import ModelShape, check_length, vocabulary_of
from kvpop_vllm.progress import progress

DEFAULT_POLICIES = "streaming-llm", "l2norm", "random"
"""Policies of ``--task text`` if none are named."""
BUCKETS = 16
"""Number of buckets of a row's positions, unless ``--bucket`` gives their size."""
CHARACTERS = 16
"""Characters of text per token of haystack, an upper bound."""


class Models(NamedTuple):
    """Models of an evaluation.

    Attributes:
        backend: runs the evaluated model.
        dense: runs models without a policy, by the name of each: the evaluated one, a teacher before it, or none.
    """

    backend: Backend
    dense: dict[str, Backend]

    @property
    def teacher(self) -> torch.nn.Module | None:
        """Model whose predictions are the dense ones, None for the evaluated one."""
        return self.dense[DENSE].model if OWN in self.dense else None


class Task(NamedTuple):
    """Task that is done under each policy.

    Attributes:
        records: yields the records of all runs, and calls its last argument with the number of passes done.
        example: ``[S]`` tokens of the first row or example of the greatest length, for maps of retained tokens.
        summarise: makes a table of records.
        columns: columns of the table.
        units: unit of each item (row or example). Items of one unit are not independent.
        passes: passes of each run for an item and a length. A dense model makes one.
        about: what the first line of the records says next to options and versions.
    """

    records: Callable[[Models, Runs, Callable[[float], object]], Iterable[dict]]
    example: torch.Tensor
    summarise: Callable[[list[dict]], list[dict]]
    columns: tuple[str, ...]
    units: list[int]
    passes: int = 1
    about: dict = {}

    def total(self, runs: Runs, lengths: list[int], dense: int) -> int:
        """Return the passes of all runs and of a number of dense models at all lengths."""
        of_runs = sum(len({setting.length for setting in run_settings}) for _, run_settings in runs)
        return len(self.units) * (len(set(lengths)) * dense + self.passes * of_runs)


def evaluate_task(options, backend_class: type[Backend]) -> list[dict]:
    """Run the task of the command line, print its table, and write records and report.

    In ``text`` all policies have the same sinks and window, in other tasks their defaults of serving.

    Args:
        options: options of the command line.
        backend_class: makes a backend from model folder, dtype and maximum tokens of a request.

    Returns:
        The table.
    """
    is_text = options.task == "text"
    names = DEFAULT_POLICIES if is_text else tuple(known_training_free())
    specs, shapes = asked.contenders_of(options, names)
    tasks, sizes = {"text": _text, "retrieval": _retrieval, "replay": _replay}, {}
    if options.task == "reasoning":
        specs, (questions, sizes) = asked.with_draws(specs), _questions(options)
        tasks["reasoning"] = functools.partial(_reasoning, questions=questions)
    settings = asked.settings_of(options, shapes if is_text else None, **sizes)
    longest, dtype = max(options.length), getattr(torch, options.dtype)
    # everything that can be refused is refused before a model loads
    check_length(options.model, longest)
    if options.teacher is not None:
        asked.check_teacher(options.model, options.teacher, longest)
    runs = _runs(options, specs, settings, ModelShape.in_context(options.model, longest), dtype)
    against = asked.reference_of(options, [resolved.spec for resolved, _ in runs])
    task = tasks[options.task](options, against)
    if runs and options.backend == "transformers":
        note_kernels()
    report = Report(options.report) if options.report else None
    # the file is opened before a model loads, which takes long
    with records_file(options.out) if options.out else nullcontext() as file:
        teachers = [TransformersBackend(options.teacher, dtype, longest, options.requests)] if options.teacher else []
        backend = backend_class(options.model, dtype, longest, options.requests)
        dense = {} if options.no_dense else dict(zip((DENSE, OWN), [*teachers, backend], strict=False))
        models = Models(backend, dense)
        first = {"task": options.task, "backend": options.backend}
        total = task.total(runs, options.length, len(dense))
        records = collected(
            file, options, task.about, total, lambda tick: (first | row for row in task.records(models, runs, tick))
        )
    table = task.summarise(records)
    print(format_table(table, task.columns), flush=True)
    note_few(task.units)
    if report:
        maps = [(resolved, [s for s in run_settings if s.length == longest]) for resolved, run_settings in runs]
        maps = [(resolved, run_settings) for resolved, run_settings in maps if run_settings]
        with progress(len(maps), "maps") as tick:
            for resolved, run_settings in maps:
                report.add_maps(models.backend, run_settings, resolved, task.example)
                tick(1)
        report.write(options.task, table, task.columns, " ".join(options.data))
    return table


def note_few(units: list[int]) -> None:
    """Say if there are too few units for intervals."""
    if len(set(units)) < LEAST:
        few = f"intervals need at least {LEAST} documents or examples, got {len(set(units))}"
        note(f"{few}: raise --rows or give more text")


def collected(
    file, options, about: dict, total: float, records: Callable[[Callable[[float], object]], Iterable[dict]]
) -> list[dict]:
    """Return the records of a run, each of which is written at once.

    Args:
        file: file of records, or None.
        options: options of the command line.
        about: further entries of the file's first line.
        total: passes of the run.
        records: yields the records, and calls its argument with the number of passes done.
    """

    def write(line: dict) -> dict:
        if file:
            file.write(json.dumps(line) + "\n")
            # a run that is stopped keeps what it has measured
            file.flush()
        return line

    write({"run": about_run(options) | about})
    with progress(total, options.task) as tick:
        return [write(record) for record in records(tick)]


def about_run(options) -> dict:
    """Return what is needed to repeat a run: options, versions, and names, sizes and hashes of the text."""
    values = {name: value for name, value in vars(options).items() if not callable(value)}
    libraries = ["torch", "transformers"] + ["vllm"] * (options.backend == "vllm")
    versions = {"kvpop_vllm": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in libraries}
    data = [source.fingerprint() for source in find_sources(options.data)] if options.data else []
    return {"options": values, "versions": versions, "data": data}


def _runs(options, specs: list[PolicySpec], settings: list[Setting], shape: ModelShape, dtype: torch.dtype) -> Runs:
    """Return the runs of the command line. Print what is left out, and why.

    What was not asked for is left out if it cannot be used: policies, if ``--policies`` names none, and equal
    bytes without ``--equal``.
    """
    # settings that the user names raise, and the others are tried below
    certain = [s for s in settings if s.equal == "k" or options.equal]
    if options.policies is None and options.task != "text":
        specs = _deployable(specs, certain, shape, dtype)
    pairs, uncertain = list(itertools.product(specs, certain)), [s for s in settings if s not in certain]
    for spec, setting in itertools.product(specs, uncertain):
        try:
            setting.resolve(spec, shape, dtype)
            pairs.append((spec, setting))
        except ConfigError as error:
            note(f"left out at equal bytes: {error}")
    return resolve_all(pairs, shape, dtype)


def _deployable(specs: list[PolicySpec], settings: list[Setting], shape: ModelShape, dtype) -> list[PolicySpec]:
    """Return the specs that can be used with all settings. Print why others are left out."""
    names, refusals = [], []
    for spec in specs:
        try:
            resolve_all(itertools.product([spec], settings), shape, dtype)
            names.append(spec)
        except ConfigError as error:
            # the user has named a scorer, so it is not left out silently
            if spec.scorer is not None:
                raise
            refusals.append(str(error))
    if not names:
        raise ConfigError(refusals[0])
    for line in (*policies.loadable()[1], *refusals):
        note(f"left out: {line}")
    return names


def run_task(
    lengths: Iterable[int],
    ask: Callable[[Run, int], Iterator[dict]],
    models: Models,
    runs: Runs,
    tick: Callable[[float], object],
) -> Iterator[dict]:
    """Yield records of the dense models, then of every run.

    Args:
        lengths: lengths to ask at.
        ask: yields the records of a run on the material of one length. The first run is the dense one.
        models: what runs the models.
        runs: policies to compare.
        tick: called with the number of passes that are done.
    """
    backend, dtype = models.backend, models.backend.dtype
    for name, model in models.dense.items():
        with model.start(None) as run:
            for length in lengths:
                about = {"length": length, "policy": name, "allocated": dense_bytes(model.shape, dtype, length)}
                for record in ask(run, length):
                    tick(1)
                    yield about | record
    for resolved, run_settings in runs:
        with backend.start(resolved) as run:
            for length in dict.fromkeys(setting.length for setting in run_settings):
                about = [described(s, resolved, dtype) for s in run_settings if s.length == length]
                for record in ask(run, length):
                    tick(1)
                    yield from ({"length": length} | description | record for description in about)


def rows_of(options, rows: Callable[..., Iterator[Row]] = replay_rows) -> tuple[list[Row], list[int], dict]:
    """Return rows of text, their units, and what the records say of both. See :func:`rows_in_turn`."""
    places = {"split": options.split, "seed": options.seed, "vocab_size": vocabulary_of(options.model)}
    rows_found = rows_in_turn(rows, options.data, load_tokenizer(options.model), max(options.length), **places)
    rows = asked.first_rows(rows_found, options)
    units = units_of(rows)
    lines = enumerate(zip(units, rows, strict=True))
    return rows, units, {"rows": [{"row": i, "unit": unit, "documents": row.documents} for i, (unit, row) in lines]}


def _text(options, against: str | None) -> Task:
    rows, units, about = rows_of(options)
    tokens = [row.tokens for row in rows]

    def records(models: Models, runs: Runs, tick) -> Iterator[dict]:
        for record in evaluate(models.backend.model, tokens, options.length, runs, teacher=models.teacher, tick=tick):
            yield {"unit": units[record["row"]]} | record

    summarise = functools.partial(summaries.summarise_text, against=against)
    return Task(records, tokens[0], summarise, summaries.TEXT_COLUMNS, units, 2, about)


def _retrieval(options, against: str | None) -> Task:
    tokenizer = load_tokenizer(options.model)
    text = sentences(options.data, options.split, CHARACTERS * max(options.length))
    example_options = {"count": options.rows, "seed": options.seed, "digits": options.digits}
    material = {
        n: retrieval.make_examples(options.kinds, tokenizer, text, n, **example_options) for n in options.length
    }
    if not tokenizer.chat_template:
        note(f"{options.model} has no chat template: prompts are plain text")

    def ask(run: Run, length: int) -> Iterator[dict]:
        return retrieval.answers(run, tokenizer, material[length])

    example = torch.tensor(material[max(options.length)][0].prompt)
    units = list(range(options.rows)) * len(options.kinds)
    records = functools.partial(run_task, material, ask)
    return Task(records, example, summaries.summarise_retrieval, summaries.RETRIEVAL_COLUMNS, units)


def _replay(options, against: str | None) -> Task:
    rows, units, about = rows_of(options)
    material = {length: [row.tokens[:length] for row in rows] for length in options.length}
    ask = Replay(material, units, options.bucket, options.teacher is not None)
    summarise = functools.partial(summaries.summarise_replay, against=against)
    columns = summaries.REPLAY_COLUMNS
    return Task(functools.partial(run_task, material, ask), rows[0].tokens, summarise, columns, units, about=about)


def _questions(options) -> tuple[list[reasoning.Question], dict]:
    """Return the problems, and the tokens of a prompt and of a solution that budgets are derived from.

    Sets ``options.length`` if it is not given.
    """
    tokenizer = load_tokenizer(options.model)
    questions = reasoning.make_questions(
        tokenizer, options.kinds, options.rows, options.split, options.size, options.seed
    )
    prompt, worked = max(len(q.prompt) for q in questions), max(q.worked for q in questions)
    options.length = options.length or [prompt + int(reasoning.ROOM * worked)]
    if len(options.length) > 1:
        raise ConfigError("--task reasoning has one length for all problems: give one --length, or none")
    if options.length[0] < prompt + worked:
        raise ConfigError(
            f"--length {options.length[0]} is too short for {prompt + worked} tokens: raise it, or lower --size"
        )
    return questions, {"prompt": prompt, "written": round(sum(q.worked for q in questions) / len(questions))}


def _reasoning(options, against: str | None, questions: list[reasoning.Question]) -> Task:
    tokenizer, samples = load_tokenizer(options.model), options.samples or 1
    sampling = Sampling(options.temperature or 0.0, options.top_p or 1.0)

    def ask(run: Run, length: int) -> Iterator[dict]:
        new = length - max(len(question.prompt) for question in questions)
        sampling_options = {"samples": samples, "sampling": sampling, "batch": options.requests}
        return reasoning.solve(run, tokenizer, questions, new=new, seed=options.seed, **sampling_options)

    longest = max(questions, key=lambda question: len(question.prompt) + question.worked)
    worked = tokenizer(longest.problem.solution, add_special_tokens=False)["input_ids"]
    example = torch.tensor([*longest.prompt, *worked])
    units = list(range(options.rows)) * len(options.kinds) * samples
    summarise = functools.partial(summaries.summarise_reasoning, against=against)
    records = functools.partial(run_task, options.length, ask)
    return Task(records, example, summarise, summaries.REASONING_COLUMNS, units)


class Replay:
    """Replay of rows under a run. The first run is the dense one.

    Args:
        material: length -> rows ``[length]``.
        units: unit of each row.
        bucket: positions of a bucket, None for a sixteenth of the row.
        teacher: True if the dense model is another one, whose output layer outlives its run.
    """

    def __init__(
        self, material: dict[int, list[torch.Tensor]], units: list[int], bucket: int | None, teacher: bool = False
    ):
        self.material, self.units, self.bucket, self.teacher = material, units, bucket, teacher
        self.dense: dict[int, list[replay.Predictions]] = {}

    def __call__(self, run: Run, length: int) -> Iterator[dict]:
        """Yield one record for each row under ``run``."""
        bucket = self.bucket or max(1, length // BUCKETS)
        dense = self.dense.setdefault(length, [])
        for number, row in enumerate(self.material[length]):
            predictions = replay.predictions(run, row)
            if number == len(dense):
                # the first run is the dense one, and later ones are compared with it
                dense.append(predictions)
            # without a teacher the dense run has ended, and its output layer with it
            exact = dense[number] if self.teacher else dense[number]._replace(logits=run.logits)
            yield {"row": number, "unit": self.units[number]} | replay.compare(predictions, row, exact, bucket)
