"""The command `kvpop distill` at tiny sizes."""

from __future__ import annotations

from pathlib import Path

from kvpop_vllm.distill.metrics import read_metrics

RECIPE = (
    "--recipe=demo --length=96 --positions=300 --window=8 --samples=32 --warmup=2 --dtype=float32 --topk 20".split()
)


def distill(kvpop, out, *options, action="train", recipe=RECIPE):
    status, _, errors = kvpop(
        "distill", action, "--model=qwen3", "--data", "text.jsonl", f"--out={out}", *recipe, *options
    )
    assert status in (0, None), errors
    return read_metrics(Path(out) / "run/metrics.jsonl")
