"""Options of `kvpop eval`. Nothing heavy is imported before it runs.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import os
from collections.abc import Callable

from kvpop_vllm.argument_types import add_setting, positive, share, temperature
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation import examples, problems
from kvpop_vllm.hub import model_folder
from kvpop_vllm.supported import DTYPES

TASKS = "text", "retrieval", "replay", "reasoning", "corpus"
KINDS = {"retrieval": list(examples.KINDS), "reasoning": list(problems.KINDS)}
"""Kinds of questions of a task."""
OF_POLICIES = (
    "policies scorer teacher correction allocator calibration protect_prompt sinks window equal report".split()
)
"""Options of every task but corpus, whose caches are made before a question is known."""
TASKS_OF = {
    "kinds": tuple(KINDS),
    "data": ("text", "retrieval", "replay", "corpus"),
    **dict.fromkeys(("size", "requests", "samples", "temperature", "top_p"), ("reasoning",)),
    "no_dense": ("retrieval", "reasoning"),
    "digits": ("retrieval",),
    "bucket": ("replay",),
    "against": ("text", "replay", "reasoning", "corpus"),
    **dict.fromkeys(("methods", "compactor", "questions", "steps"), ("corpus",)),
    **dict.fromkeys(OF_POLICIES, TASKS[:-1]),
}
"""Tasks of each option that not every task has."""


def add_eval(commands, engine: Callable[[], type]) -> None:
    """Add `kvpop eval` to argparse's ``commands``.

    Args:
        commands: argparse's subcommands.
        engine: imports and returns vLLM's backend class.
    """
    summary = (
        "compare policies: recall, divergence from dense and perplexity on text; what they find again; long replay;"
        " problems that take long written steps; questions about documents that a small cache replaces"
    )
    command = commands.add_parser("eval", help=summary, description=summary)
    add = command.add_argument
    add("--model", required=True, metavar="MODEL", help="folder of the base model, or its name on the hub")
    add(
        "--teacher",
        metavar="MODEL",
        help="the model whose predictions are the dense ones, for a --model that was trained from it (default: --model itself)",
    )
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="text, JSONL, Parquet, datasets folders; not for reasoning",
    )
    add(
        "--task",
        choices=TASKS,
        default="text",
        help="text: recall, errors of outputs, divergence, perplexity, with sinks and window of all policies alike (default); retrieval: RULER's needles"
        " and lists, answers generated under the policy; replay: divergence from dense by position in long documents; reasoning:"
        " problems solved in about 1,000 written tokens; corpus: questions about documents after caches as 'kvpop compact'"
        " makes them; all but text with each policy's own sinks and window",
    )
    add(
        "--backend",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what runs all tasks but text and corpus: transformers with the kernels of serving (default), or vLLM's engine",
    )
    add("--split", choices=("train", "validation", "test", "all"), default="test")
    _add_policies(command)
    _add_settings(command)
    add("--kinds", nargs="+", choices=sum(KINDS.values(), []), help="of retrieval or reasoning (default: all)")
    _add_sampling(command)
    _add_methods(command)
    add("--digits", type=positive, choices=range(2, 10), metavar="N", help="of a needle's number, 2 to 9 (default 4)")
    add(
        "--no-dense",
        action="store_true",
        default=None,
        help="retrieval, reasoning: leave out the dense models, for examples or problems that they have answered before",
    )
    add("--bucket", type=positive, metavar="N", help="positions that replay takes together (default: S / 16)")
    add("--out", metavar="FILE.jsonl", help="all records, one per line (until all are there, in FILE.jsonl.draft)")
    add("--report", metavar="DIR", help="write table.md, figure.png and a map of what each layer retains into DIR")
    add("--threads", type=positive, help="CPU threads (default: all)")
    command.set_defaults(run=lambda options: run_eval(options, engine))


def _add_policies(command) -> None:
    """Add the options that choose policies and vary each of them."""
    add = command.add_argument
    add("--scorer", action="append", default=[], metavar="DIR", help="a scorer folder; may be repeated")
    add(
        "--policies",
        nargs="*",
        metavar="NAME",
        help="default: streaming-llm, l2norm and random for text, else all that need neither a scorer nor a calibration",
    )
    add(
        "--against",
        metavar="NAME",
        help="the compared policy that ratios of text and replay refer to (default: streaming-llm, if it is compared), or"
        " method of corpus (default: the first)",
    )
    add_setting(
        command,
        "correction",
        "moment: each that can be served with plain and with corrected outputs (MomentKV); none: momentkv without its own",
    )
    add_setting(
        command,
        "allocator",
        "each that can be served with each of these, as --kv-allocator (default: each policy's own); a pair that cannot be is an error",
        nargs="+",
    )
    add_setting(
        command,
        "calibration",
        "each with each of these, as --kv-calibration; none is without, and triattention takes the first (default: none)",
        nargs="+",
    )
    add_setting(
        command,
        "protect_prompt",
        "each that can be served with each of these, as --kv-protect-prompt (default: each policy's own)",
        nargs="+",
    )


def _add_sampling(command) -> None:
    """Add the options of reasoning."""
    add = command.add_argument
    add("--size", type=positive, metavar="N", help="reasoning: steps of a problem (default: about 1,000 tokens)")
    add("--samples", type=positive, metavar="N", help="reasoning: solutions of each problem (default 1)")
    add("--temperature", type=temperature, metavar="T", help="reasoning: of sampling (default 0: greedy)")
    add("--requests", type=positive, metavar="N", help="reasoning: problems that are solved at once (default 16)")
    add("--top-p", type=share, metavar="P", help="reasoning: of sampling (default 1)")


def _add_methods(command) -> None:
    """Add the options of corpus."""
    add = command.add_argument
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="corpus: truncation, first, attention-matching, cartridge, still, or policies that compress prompts"
        " (policy:attention-matching is the policy; default: truncation, snapkv, attention-matching)",
    )
    add("--compactor", metavar="DIR", help="corpus: of still, for as many slots as --budget")
    add("--questions", type=positive, metavar="N", help="corpus: most of each kind about a document (default 4)")
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="corpus: steps of a trained cartridge, on 16 conversations each (64)",
    )


def _add_settings(command) -> None:
    """Add options for lengths, budgets and their slot roles, rows and dtype."""
    add = command.add_argument
    add(
        "--length",
        nargs="+",
        type=positive,
        metavar="S",
        help="tokens per row or document (default 1024); reasoning: of a prompt with its solution (default: what the longest takes)",
    )
    size = command.add_mutually_exclusive_group()
    size.add_argument("--share", nargs="+", type=positive, metavar="C", help="budgets: B = S / C (default 4)")
    add_setting(size, "budget", "budgets, tokens per KV head; corpus: slots", nargs="+")
    add_setting(
        command,
        "sinks",
        "s of all policies alike (default for text: the scorer's, else 4; otherwise each policy's own)",
    )
    add_setting(
        command,
        "window",
        "w of all policies alike (default for text: what the scorer was trained with at each budget, else 64; otherwise"
        " each policy's own)",
    )
    add(
        "--rows",
        type=positive,
        default=4,
        help="rows of text, documents, or examples of each kind (default 4; intervals need 8, a figure to quote 16)",
    )
    add("--seed", type=int, default=0, help="of problems, prompts, the order of the text, and draws (default 0)")
    add("--dtype", choices=DTYPES["cpu"], default="bfloat16")
    add(
        "--equal",
        nargs="+",
        choices=("k", "bytes"),
        help="what is equal between policies: long-range tokens, allocated bytes (default: each in turn)",
    )


def run_eval(options, engine: Callable[[], type]) -> None:
    """Run `kvpop eval`."""
    _check_options(options)
    options.model = model_folder(options.model)
    options.teacher = options.teacher and model_folder(options.teacher)
    if options.backend == "vllm":  # stdout holds the table alone
        # before vLLM is imported, which reads it then
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from kvpop_vllm.evaluation.backends import TransformersBackend
    from kvpop_vllm.evaluation.corpus_task import evaluate_corpus
    from kvpop_vllm.evaluation.tasks import evaluate_task

    if options.task == "corpus":
        evaluate_corpus(options)
        return

    evaluate_task(options, engine() if options.backend == "vllm" else TransformersBackend)


def _check_options(options) -> None:
    task_options = {
        f"--{name.replace('_', '-')}": tasks
        for name, tasks in TASKS_OF.items()
        if getattr(options, name) not in (None, [])
    }
    if options.backend == "vllm":
        task_options = {"--backend vllm": ("retrieval", "replay", "reasoning")} | task_options
    for name, tasks in task_options.items():
        if options.task not in tasks:
            raise ConfigError(f"{name} says nothing to --task {options.task}: leave it out, or give --task {tasks[0]}")
    if options.task != "reasoning" and not options.data:
        raise ConfigError(f"--task {options.task} needs text: give --data")
    if options.no_dense and options.teacher:
        raise ConfigError("--no-dense leaves out the model of --teacher: give one of them")
    if options.top_p is not None and not options.temperature:
        raise ConfigError("--top-p is about sampling, and decoding is greedy: give --temperature")
    if options.samples and options.samples > 1 and not options.temperature:
        raise ConfigError(
            f"greedy decoding gives {options.samples} equal solutions: give --temperature, or --samples 1"
        )
    kinds = KINDS.get(options.task, [])
    if unknown := [kind for kind in options.kinds or () if kind not in kinds]:
        raise ConfigError(f"--task {options.task} has no kind {unknown[0]}: choose from {', '.join(kinds)}")
    # in the order given, each once
    options.kinds, options.digits = list(dict.fromkeys(options.kinds or kinds)), options.digits or 4
    options.requests = options.requests or (16 if options.task == "reasoning" else 1)
    # of reasoning it follows from the problems, see tasks._questions()
    if options.length is None and options.task != "reasoning":
        options.length = [1024]
