"""The commands `kvpop distill` and `kvpop eval` at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.evaluation.output import read_records

RECIPE = (
    "--recipe=demo --length=96 --positions=300 --window=8 --samples=32 --warmup=2 --dtype=float32 --topk 20".split()
)


def distill(kvpop, out, *options, action="train", recipe=RECIPE):
    status, _, errors = kvpop(
        "distill", action, "--model=qwen3", "--data", "text.jsonl", f"--out={out}", *recipe, *options
    )
    assert status in (0, None), errors
    return read_metrics(Path(out) / "run/metrics.jsonl")


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def evaluated(kvpop, words):
    """Run `kvpop eval` in float32 on all documents, and return its output and records."""
    common = "eval --model=qwen3 --split=all --dtype=float32 --out=records.jsonl".split()
    status, output, errors = kvpop(*common, *words.split())
    assert status in (0, None), errors
    return output, read_records("records.jsonl")[1]


def refused(kvpop, words, message):
    """Check that a command line is refused with one line that contains the message."""
    status, _, errors = kvpop(*words.split())
    own = [text for text in errors.splitlines() if text.startswith("kvpop: ") or ": error: " in text]
    assert status == 2 and len(own) == 1 and message in own[0], errors
