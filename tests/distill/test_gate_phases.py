"""The commands `kvpop distill --recipe trimkv` and `--recipe dms`, and an engine that serves the result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distill.typed import distill
from engine.driving import Job, one_thread, watched
from engine.judge import Judge

from kvpop_vllm.distill.hook import Dense, borrow_channel, load_model, show_hidden_states
from kvpop_vllm.scorers import Signals, from_tensors
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.scorers.init import borrows_channel
from kvpop_vllm.testing import OracleModel, OraclePolicy, random_prompt

SMALL = "--length=96 --topk 23 --warmup=2 --dtype=float32 --batch=2"
TRIMKV = f"--recipe=trimkv {SMALL} --gate-width=16".split()
DMS = f"--recipe=dms {SMALL} --window=8".split()
TRIMKV_RUN = [*TRIMKV, *"--gate-bias=5 --lr-new=2e-2 --ce=0 --steps=25".split()]
DMS_RUN = [*DMS, *"--lr-new=5e-3 --steps=40 --compression=4 --gate-scale=5".split()]
RECIPES = {
    "trimkv": TRIMKV_RUN,
    "trimkv-kv": [*TRIMKV_RUN, "--gate-reads=kv", "--gate-gated"],
    "dms": DMS_RUN,
    "dms-query": [*DMS_RUN, *"--gate-reads=query --train-base --lr-base=1e-3 --borrow-steps=10".split()],
}


def model_of(name, folder):
    """Return the model that a run's gates belong to, its own if the run trained it too."""
    return folder / name / "model" if name == "dms-query" else folder / "qwen3"


@pytest.fixture(scope="module", params=RECIPES)
def trained(request, folder):
    """Name, folder and metrics of a run."""
    from kvpop_vllm.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)

        def kvpop(*words):
            return main([str(word) for word in words]), "", ""

        with one_thread():
            steps = distill(kvpop, request.param, recipe=RECIPES[request.param])
        yield request.param, folder, steps


def mean(steps, name):
    return sum(row[name] for row in steps) / len(steps)


def test_what_the_phase_is_for_is_learned(trained):
    """TRIM-KV's loss and its excess over the capacity fall; DMS's evictions follow their target."""
    name, folder, steps = trained
    first, last = steps[:5], steps[-5:]
    if name.startswith("dms"):
        assert steps[0]["target"] == 0 and steps[-1]["target"] == 0.75
        assert mean(last, "evicted") > mean(first, "evicted") + 0.2
        return
    assert mean(last, "capacity") < 0.5 * mean(first, "capacity")
    assert mean(last, "loss") < mean(first, "loss")


def test_what_is_written(trained):
    """Gates are written, and the base only if it was trained."""
    name, folder, _ = trained
    assert (folder / name / "model").exists() == borrows_channel(model_of(name, folder)) == (name == "dms-query")
    config, layers = read_scorer(folder / name)
    assert config.scorer == name.partition("-")[0] and config.reads == {"trimkv-kv": "kv", "dms-query": "query"}.get(
        name, "hidden"
    )
    kept = (1, 8, 23) if name.startswith("dms") else (0, 1, 23)
    assert (config.sinks, config.window, config.topk) == kept
    assert all(t.abs().max() > 0 for own in layers for t in own.values()), "a tensor was not trained"


def test_training_and_serving_and_the_oracle_score_alike(trained):
    """A gate in transformers' model, loaded as in serving, scores as the oracle's in its own forward pass."""
    name, folder, _ = trained
    config, layers = read_scorer(folder / name)
    model, tokens, found = load_model(model_of(name, folder), torch.float32).eval(), random_prompt(60), {}
    show_hidden_states(model)
    if borrows_channel(model_of(name, folder)):
        borrow_channel(model)

    class Look(Dense):
        channel = None

        def see(self, layer, hidden):
            self.hidden = hidden

        def see_channel(self, layer, channel):
            self.channel = channel

        def __call__(self, layer, q, k, v, scale):
            gate = from_tensors(config, layers[layer])
            found[layer] = gate(Signals(self.hidden, k.transpose(1, 2), v.transpose(1, 2), self.channel))[0].T
            return super().__call__(layer, q, k, v, scale)

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), attend=Look()).logits[0]
    everything = dataclasses.replace(OraclePolicy.from_scorer(folder / name, topk=1000), threshold=None)
    exact = OracleModel(model_of(name, folder)).run(tokens, everything)
    torch.testing.assert_close(logits.log_softmax(-1), exact.logprobs.float(), rtol=0, atol=2e-4)
    for layer, scores in enumerate(exact.scores):
        torch.testing.assert_close(found[layer], scores.float(), rtol=1e-4, atol=1e-6)
        assert (scores.std(-1) > 0.1 * scores.abs().mean(-1)).all(), "all tokens score alike"


def test_an_engine_serves_what_was_trained(trained):
    """Retained sets and log-probabilities are the oracle's, which has its own gates."""
    name, folder, _ = trained
    settings = {"policy": name.partition("-")[0], "scorer": str(folder / name)}
    model = model_of(name, folder)
    judge = Judge(str(model), OraclePolicy.from_scorer(folder / name))
    with watched(model, settings, judge) as engine:
        for chunk in (7, None):
            engine.chunk(chunk)
            engine.check(engine.serve([Job(1, new=60), Job(31), Job(90), Job(150)]))
    assert judge.decisions > 200


def test_stored_logits_do_for_the_model_itself(kvpop):
    """Stored log-probabilities give the same run, up to half precision."""
    recipe = [*TRIMKV, "--steps=3", "--kl-top=32"]
    with one_thread():
        distill(kvpop, "logits", action="teacher", recipe=recipe)
        online, stored = (distill(kvpop, out, recipe=[*recipe, *more]) for out, more in (("on", ()), ("off", ["--teacher=logits"])))  # fmt: skip
    for a, b in zip(online, stored, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4) and a["kl"] > 0
    assert read_scorer("on")[0] == read_scorer("off")[0]


START = "distill --out=x --model=qwen3 --data text.jsonl --length=96"
REFUSED = {
    "--recipe=trimkv --topk 23 --train-base": "phase trimkv trains gates alone: leave --train-base out",
    "--recipe=trimkv --topk 23 --lr-base=1e-5": "--lr-base is about training the base model, and phase trimkv trains gates alone",
    "--recipe=dms --window=8 --topk 23 --lr-base=1e-5": "--lr-base is about training the base model, which is frozen",
    "--recipe=dms --window=8 --topk 23 --capacity=2": "--capacity is about TRIM-KV's gates, and phase dms has none",
    "--recipe=trimkv --topk 23 --compression=4": "--compression is about DMS's gates, and phase trimkv has none",
    "--recipe=trimkv --topk 23 --scorer=mlp": "--scorer is about scorers, and phase trimkv has none",
    "--recipe=trimkv --topk 23 --kl=0 --ce=0": "gates are trained but neither --kl nor --ce is above 0",
    "--recipe=trimkv --topk 23 --gate-reads=query": "gate_reads must be hidden or kv",
    "--recipe=dms --window=8 --topk 23 --gate-reads=kv": "gate_reads must be hidden or query in phase dms, got 'kv'",
    "--recipe=dms --window=8 --topk 23 --gate-reads=query": "with --gate-reads query give --train-base",
    "--recipe=dms --window=8 --topk 23 --borrow-steps=3": "--borrow-steps is about a borrowed channel: give --gate-reads query",
    "--recipe=dms --window=8 --topk 23 --gate-reads=query --train-base --steps=5 --borrow-steps=6": "borrow_steps 6 exceeds steps 5",
    "--recipe=trimkv --topk 23 --gate-width=0": "gate_width must be at least 1",
    "--recipe=trimkv --topk 23 --capacity=-1": "capacity must be at least 0",
    "--recipe=dms --window=8 --topk 23 --compression=0.5": "compression must be at least 1",
    "--recipe=dms --window=8 --topk 23 --gumbel-tau=0": "gumbel_tau must be above 0",
    "--recipe=dms --window=1 --topk 23": "window must be an integer from 2",
    "--recipe=trimkv --topk 511": "length 96 must exceed sinks + window + topk",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line(kvpop, line):
    status, _, errors = kvpop(*START.split(), *line.split())
    own = [text for text in errors.splitlines() if text.startswith("kvpop: ")]
    assert status == 2 and len(own) == 1 and REFUSED[line] in own[0], errors
