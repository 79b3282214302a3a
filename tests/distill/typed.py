"""The commands `kvpop distill` and `kvpop eval` at tiny sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.evaluation.output import read_records

RECIPE = "--recipe=demo --length=96 --positions=300 --window=8 --lists=8 --warmup=2 --dtype=float32 --topk 20".split()


def distill(kvpop, out, *options, action="train", recipe=RECIPE):
    status, _, errors = kvpop(
        "distill", action, "--model=qwen3", "--data", "text.jsonl", f"--out={out}", *recipe, *options
    )
    assert status in (0, None), errors
    return read_metrics(Path(out) / "run/metrics.jsonl")


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Evaluated(NamedTuple):
    """Output of `kvpop eval`: the table as printed, the records, what they say of the run, and stderr."""

    table: str
    records: list[dict]
    about: dict
    notes: str

    @property
    def lines(self) -> list[list[str]]:
        """Cells of the table's lines, the heading first, split where there are two spaces or more."""
        heading, *lines = self.table.splitlines()
        ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", heading)]
        cut = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return [[line[one].strip() for one in cut] for line in (heading, *lines)]


def evaluated(kvpop, words) -> Evaluated:
    """Run `kvpop eval` in float32 on all documents. Records are in ``records.jsonl``, or in the last ``--out=``."""
    common = "eval --model=qwen3 --dtype=float32 --out=records.jsonl".split()
    split = [] if "--split" in words else ["--split=all"]
    options = [*common, *split, *words.split()]
    status, output, errors = kvpop(*options)
    assert status in (0, None), errors
    outs = [option.removeprefix("--out=") for option in options if option.startswith("--out=")]
    about, records = read_records(outs[-1])
    return Evaluated(output, records, about, errors)


def refused(kvpop, words, message):
    """Check that a command line is refused with one line that contains the message."""
    status, _, errors = kvpop(*words.split())
    messages = [text for text in errors.splitlines() if text.startswith("kvpop: ") or ": error: " in text]
    assert status == 2 and len(messages) == 1 and message in messages[0], errors
