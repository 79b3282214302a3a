"""Options of `kvpop compact`; nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse

from kvpop_vllm.argument_types import positive


def add_compact(commands) -> None:
    """Add `kvpop compact` to argparse's ``commands``."""
    summary = "write a cartridge of a corpus: a KV cache of a few slots that MODEL can use in place of the corpus"
    command = commands.add_parser("compact", help=summary, description=summary)
    command.add_argument("model", metavar="MODEL", help="folder of the base model")
    command.add_argument("--data", required=True, metavar="TEXT", help="the corpus: a text or JSONL file, or a folder")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    command.add_argument(
        "--method",
        choices=("attention-matching", "first", "last", "truncation"),
        default="attention-matching",
        help="attention-matching (default); first or last (the same as truncation): the corpus' own tokens, for comparison",
    )
    command.add_argument("--slots", type=positive, default=1024, metavar="P", help="slots per KV head (default 1024)")
    command.add_argument(
        "--queries",
        choices=("repeat-prefill", "self-study"),
        default="repeat-prefill",
        help="what the cache is fitted to: the corpus repeated (default), or sampled answers about it",
    )
    command.add_argument(
        "--keys",
        choices=("highest", "omp"),
        default="highest",
        help="kept keys: of highest attention (default), or of a matching pursuit (slower)",
    )
    command.add_argument(
        "--chunk", type=positive, metavar="N", help="compact N tokens at a time (default: all at once)"
    )
    command.add_argument(
        "--reference", type=positive, default=4096, metavar="N", help="queries per head (default 4096)"
    )
    command.add_argument("--answers", type=positive, default=10, metavar="N", help="answers of self-study (default 10)")
    command.add_argument(
        "--on-policy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fit upper layers to queries that come from compacted lower ones (default)",
    )
    command.add_argument("--kv-allocator", metavar="FILE", help="JSON with the heads' shares ('kvpop distill shares')")
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the model and of the cartridge (default float32)",
    )
    command.add_argument("--threads", type=positive, help="CPU threads (default: all)")
    command.add_argument("--seed", type=int, default=0, help="of samples (default 0)")
    command.set_defaults(run=run_compact)


def run_compact(options: argparse.Namespace) -> None:
    """Run `kvpop compact`.

    Raises:
        ConfigError: an option, the model or the data is wrong.
    """
    from kvpop_vllm.compaction.matching import Matching
    from kvpop_vllm.compaction.run import CompactOptions, compact

    names = ("method", "slots", "queries", "chunk", "reference", "answers", "on_policy", "dtype", "seed")
    chosen = {name: getattr(options, name) for name in names}
    settings = CompactOptions(**chosen, allocator=options.kv_allocator, matching=Matching(keys=options.keys))
    compact(options.model, options.data, options.out, settings, options.threads)
