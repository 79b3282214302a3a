"""`kvpop eval`: its options. Nothing heavy is imported before it runs."""

from __future__ import annotations

from kvpop_vllm.argument_types import non_negative, positive
from kvpop_vllm.config import CORRECTIONS


def add_eval(commands) -> None:
    """Adds `kvpop eval` to argparse's ``commands``."""
    summary = "compare policies on text: retention recall, hindsight recall, perplexity and accuracy"
    command = commands.add_parser("eval", help=summary, description=summary)
    command.add_argument("--model", required=True, metavar="MODEL", help="folder of the base model")
    command.add_argument(
        "--data", required=True, nargs="+", metavar="TEXT", help="text, JSONL, Parquet, datasets folders"
    )
    command.add_argument("--split", choices=("train", "validation", "test", "all"), default="test")
    command.add_argument(
        "--scorer", action="append", default=[], metavar="DIR", help="a scorer folder; may be repeated"
    )
    command.add_argument("--policies", nargs="*", default=["streaming-llm", "l2norm", "random"], metavar="NAME")
    command.add_argument(
        "--correction",
        choices=CORRECTIONS,
        help="moment: each that can be served with plain and with corrected outputs (MomentKV); none: momentkv without its own; both on the kernels of serving",
    )
    command.add_argument("--length", nargs="+", type=positive, default=[1024], metavar="S", help="tokens per row")
    command.add_argument("--share", nargs="+", type=positive, default=[4], metavar="C", help="budgets: B = S / C")
    command.add_argument("--sinks", type=non_negative, help="s of all policies alike (default: the scorer's, else 4)")
    command.add_argument(
        "--window",
        type=positive,
        help="w of all policies alike (default: what the scorer was trained with at each budget, else 64)",
    )
    command.add_argument("--decide-every", type=positive, default=1, metavar="E", help="tokens between decisions")
    command.add_argument("--rows", type=positive, default=4, help="rows of text (default 4)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    command.add_argument(
        "--equal", nargs="+", choices=("k", "bytes"), default=["k"], help="what is equal between policies"
    )
    command.add_argument(
        "--out", metavar="FILE.jsonl", help="all records, one per line (until all are there, in FILE.jsonl.draft)"
    )
    command.add_argument("--threads", type=positive, help="CPU threads (default: all)")
    command.set_defaults(run=run_eval)


def run_eval(options) -> None:
    """Runs `kvpop eval`."""
    from kvpop_vllm.evaluation.report import evaluate_text

    evaluate_text(options)
