"""The commands `kvpop distill --recipe trimkv`, `dms` and `kvzap`, and an engine that serves the result."""

from __future__ import annotations

import pytest
from distill.typed import distill
from engine.driving import Job, one_thread, watched
from engine.judge import Judge
from hf.prompts import distinct

from kvpop_vllm.model_shape import borrows_channel
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import OraclePolicy

SMALL = "--length=96 --topk 23 --warmup=2 --dtype=float32 --batch=2"
TRIMKV = f"--recipe=trimkv {SMALL} --gate-width=16 --gate-bias=5 --lr-new=2e-2 --ce=0 --steps=25".split()
DMS = f"--recipe=dms {SMALL} --window=8 --lr-new=5e-3 --steps=40 --compression=4 --gate-scale=5".split()
KVZAP = f"--recipe=kvzap {SMALL} --window=8 --gate-width=16 --lr-new=2e-2 --steps=25".split()
RECIPES = {
    "trimkv": TRIMKV,
    "trimkv-kv": [*TRIMKV, "--gate-reads=kv", "--gate-gated"],
    "dms": DMS,
    "dms-query": [*DMS, *"--gate-reads=query --train-base --lr-base=1e-3 --borrow-steps=10".split()],
    "kvzap": KVZAP,
    "kvzap-linear": [*KVZAP[:-3], "--gate-linear", "--lr-new=2e-2", "--steps=25"],
}
JOBS = {"kvzap": [Job(prompt=distinct(length), new=8) for length in (1, 31, 90, 150)]}
"""Equal tokens of a first layer have equal scores: prompts have none, and answers fit into the window."""


def mean(steps, name):
    return sum(row[name] for row in steps) / len(steps)


@pytest.mark.parametrize("name", RECIPES)
def test_gates_are_trained_written_and_served(kvpop, folder, name):
    """TRIM-KV's loss and its excess over the capacity fall; DMS's evictions follow their target; KVzap's error falls.

    Gates are written, and the base only if it was trained. Retained sets and log-probabilities of an engine are
    those of the oracle, which has its own gates.
    """
    with one_thread():
        steps = distill(kvpop, name, recipe=RECIPES[name])
    first, last = steps[:5], steps[-5:]
    if name.startswith("dms"):
        assert steps[0]["target"] == 0 and steps[-1]["target"] == 0.75
        assert mean(last, "evicted") > mean(first, "evicted") + 0.2
    elif name.startswith("kvzap"):
        assert mean(last, "loss") < 0.7 * mean(first, "loss")
        assert mean(last, "explained") > max(0.0, mean(first, "explained")) + 0.1
    else:
        assert mean(last, "capacity") < 0.5 * mean(first, "capacity")
        assert mean(last, "loss") < mean(first, "loss")

    trains_base = name == "dms-query"
    model = folder / name / "model" if trains_base else folder / "qwen3"
    assert (folder / name / "model").exists() == borrows_channel(model) == trains_base
    config, layers = read_scorer(folder / name)
    reads = {"trimkv-kv": "kv", "dms-query": "query"}.get(name, "hidden")
    assert (config.scorer, config.reads) == (name.partition("-")[0], reads)
    roles = {"dms": (1, 8, 23), "kvzap": (4, 8, 23), "trimkv": (0, 1, 23)}[config.scorer]
    assert (config.sinks, config.window, config.topk) == roles
    assert all(t.abs().max() > 0 for layer in layers for t in layer.values()), "a tensor was not trained"

    judge = Judge(str(model), OraclePolicy.from_scorer(folder / name))
    with watched(model, {"policy": config.scorer, "scorer": str(folder / name)}, judge) as engine:
        for chunk in (7, None):
            engine.chunk(chunk)
            engine.check(engine.serve(JOBS.get(config.scorer, [Job(1, new=60), Job(31), Job(90), Job(150)])))
    assert judge.decisions > 200
