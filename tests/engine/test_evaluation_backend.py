"""The two backends of `kvpop eval`, vLLM's engine and transformers with the serving kernels, agree.

In float32, on a tiny model, log-probabilities differ by at most 2e-4 nats and greedy tokens are equal.
Divergences over the whole vocabulary agree to a thousandth.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from engine.driving import one_thread
from engine.tiny_engine import quick

from kvpop_vllm.cli import main
from kvpop_vllm.evaluation import replay
from kvpop_vllm.evaluation.backends import Sampling, TransformersBackend
from kvpop_vllm.evaluation.output import read_records
from kvpop_vllm.evaluation.policies import learned, training_free
from kvpop_vllm.testing import random_prompt, write_mixed_model, write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue.extras.evaluation import EngineBackend

B, LONGEST = 56, 240
CLOSE = 2e-4
"""Largest difference of log-probabilities, in nats."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("backends")
    write_byte_tokenizer(write_tiny_model(root / "model", "qwen3", vocab=VOCABULARY))
    write_random_scorer(root / "scorer", root / "model", sinks=4, window=16, topk=B - 20)
    write_random_scorer(root / "dms", root / "model", "dms", sinks=4, window=16, topk=B - 20)
    write_byte_tokenizer(write_mixed_model(root / "gemma3", "gemma3_text", vocab_size=VOCABULARY))
    roles = {"layers": [2, 5], "sinks": 4, "window": 16, "topk": B - 20}
    write_random_scorer(root / "gemma3-scorer", root / "gemma3", **roles)
    write_byte_tokenizer(write_tiny_model(root / "teacher", vocab=VOCABULARY, seed=3))
    write_text(root / "text.jsonl", documents=200)
    return root


@pytest.fixture(autouse=True)
def small():
    with one_thread(), quick():
        yield


@pytest.mark.parametrize(
    "source, name, options",
    [
        ("model", None, {}),
        ("model", "h2o", {}),
        ("model", "momentkv", {"sinks": 2, "window": 8}),
        ("model", "kvpop", {}),
        ("model", "dms", {}),
        ("model", "h2o", {"allocator": "pyramid"}),
        ("model", "random", {"protect_prompt": 0}),
        ("gemma3", "h2o", {}),
        ("gemma3", "kvpop", {}),
    ],
)
def test_both_backends_are_one(folder, source, name, options):
    model = str(folder / source)
    backends = [record(model, torch.float32, LONGEST, requests=3) for record in (TransformersBackend, EngineBackend)]
    assert backends[0].shape == backends[1].shape
    resolved = None
    if name is not None:
        folders = {"kvpop": "scorer" if source == "model" else f"{source}-scorer", "dms": "dms"}
        spec = learned(str(folder / folders[name]), model)[0] if name in folders else training_free(name)
        if "allocator" in options:
            spec = spec.allocated(options["allocator"])
        if name == "random":
            spec = replace(spec, protect=options["protect_prompt"], seed=5)
        roles = {role: tokens for role, tokens in options.items() if role in ("sinks", "window")}
        resolved = spec.resolve(backends[0].shape, B, **roles)
        expected = {"policy": name, "budget": B} | options | ({"scorer": spec.scorer} if name in folders else {})
        assert resolved.settings == expected
    rows = [torch.tensor(random_prompt(LONGEST, VOCABULARY - 1, seed=i)) for i in range(2)]
    prompts = [random_prompt(length, VOCABULARY - 1, seed=9) for length in (20, 200)]
    with backends[0].start(None) as run:
        dense = [replay.predictions(run, row) for row in rows]
    outcomes = []
    for backend in backends:
        with backend.start(resolved) as run:
            predicted = [replay.predictions(run, row) for row in rows]
            logp = [run.logits(prediction.hidden).log_softmax(-1) for prediction in predicted]
            compared = [replay.compare(*three, 60) for three in zip(predicted, rows, dense, strict=True)]
            answers = run.generate(prompts, 24, set())
            stop = answers[1][7]
            assert run.generate(prompts[1:], 24, {stop}) == [answers[1][: answers[1].index(stop)]]
            drawn, again = (run.generate(prompts * 3, 24, set(), Sampling(1.0, 0.5), [*range(6)]) for _ in "ab")
            assert drawn == again and len({*map(tuple, drawn)}) == 6
            maps = (
                None
                if name is None
                else [run.held(row[:length]) for row, length in zip(rows, (LONGEST, 31), strict=True)]
            )
            outcomes.append((logp, compared, answers, maps))
    (ours, compared, answers, maps), (engines, engine_compared, engine_answers, engine_maps) = outcomes
    if name is not None:
        assert [torch.equal(a, b) for a, b in zip(maps, engine_maps, strict=True)] == [True, True]
        assert 0 < maps[0].sum(-1).max() < LONGEST
    for a, b in zip(ours, engines, strict=True):
        assert a.shape == b.shape == (LONGEST - 1, VOCABULARY)
        torch.testing.assert_close(a, b, rtol=0, atol=CLOSE)
    assert answers == engine_answers and len({*answers[0], *answers[1]}) > 4
    for record, theirs in zip(compared, engine_compared, strict=True):
        assert record["kl_by_position"] == pytest.approx(theirs["kl_by_position"], rel=1e-3, abs=1e-5)
        assert record["nll"] == pytest.approx(theirs["nll"], rel=1e-4) and record["agreement"] == theirs["agreement"]
        smallest = 1e-2 if source == "model" else 1e-3
        assert (record["kl"] > smallest) == (name is not None), "the budget shows in nothing"


def eval_records(folder, source, task, backend, *options):
    out = folder / f"{source}-{task}-{backend}.jsonl"
    words = f"eval --task={task} --backend={backend} --model={folder / source}"
    words += "" if task == "reasoning" else f" --data {folder / 'text.jsonl'} --split=all"
    words += f" --equal=k --dtype=float32 --policies h2o --budget {B} --out={out}"
    assert main([*words.split(), *options]) in (0, None)
    return read_records(out)[1]


@pytest.mark.parametrize(
    "source, task, options",
    [
        ("model", "replay", ["--length=200", "--rows=2", "--bucket=50", "--report=report"]),
        ("model", "retrieval", ["--length=700", "--rows=1", "--kinds", "needle", "multikey"]),
        ("model", "reasoning", ["--rows=2", "--kinds=programs", "--size=2", "--split=test", "--requests=2"]),
        ("gemma3", "reasoning", ["--rows=2", "--kinds=programs", "--size=2", "--split=test", "--requests=2"]),
        ("gemma3", "retrieval", ["--length=700", "--rows=1", "--kinds", "needle"]),
    ],
)
def test_the_command_says_the_same_with_both(folder, tmp_path, monkeypatch, capfd, source, task, options):
    monkeypatch.chdir(tmp_path)
    names = ["dense", "h2o"]
    if task == "replay":  # the teacher runs in transformers with both
        names, options = ["dense", "dense (own)", "h2o"], [*options, f"--teacher={folder / 'teacher'}"]
    ours, engines = (eval_records(folder, source, task, backend, *options) for backend in ("transformers", "vllm"))
    assert {r.pop("backend") for r in ours} == {"transformers"} and {r.pop("backend") for r in engines} == {"vllm"}
    assert [r["policy"] for r in ours] == [name for name in names for _ in range(len(ours) // len(names))]
    for record, theirs in zip(ours, engines, strict=True):
        assert record.keys() == theirs.keys()
        for name in record:
            close = name.startswith(("kl", "nll"))
            assert record[name] == (pytest.approx(theirs[name], rel=1e-3, abs=1e-5) if close else theirs[name]), name
    if task == "replay":
        assert sorted(p.name for p in Path("report").iterdir()) == [
            "figure.png", "retained.jsonl", "retained.png", "table.md"
        ]  # fmt: skip
