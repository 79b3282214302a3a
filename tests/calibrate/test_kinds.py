"""Calibrations of models whose layers are of several kinds are for those with full attention, and are served there."""

import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from distill.typed import refused
from engine.driving import Job
from engine.kinds import Served, serving
from engine.tiny_engine import PROMPTS, complete, configure, running
from hf.prompts import generate
from transformers import AutoModelForCausalLM

from kvpop_vllm.calibrate.plan import Options, Plan
from kvpop_vllm.calibrate.stages import Stages
from kvpop_vllm.calibration.shares import read_calibration
from kvpop_vllm.calibration.statistics import read_statistics
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.runner import Setting, resolve_all
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import FAMILIES, KindsOracle, OraclePolicy, write_mixed_model
from kvpop_vllm.testing.oracle_policy import shared_slots
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

NEW = 24
LAYERS = {"gemma3_text": (2, 5), "nemotron_h": (1, 4)}
"""Layers of each model with full attention."""
SHARED = {"policy": "streaming-llm", "budget": 56, "sinks": 4, "window": 8, "max_budget": 72}
WORDS = "--data text.jsonl --length 128 --rows 8 --policies l2norm --threads 1".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of which some layers have windows or states; the first layer with full attention has no effect."""
    root = tmp_path_factory.mktemp("kinds")
    for kind, (first, _) in LAYERS.items():
        write_byte_tokenizer(write_mixed_model(root / kind, kind, vocab_size=VOCABULARY))
        model = AutoModelForCausalLM.from_pretrained(root / kind)
        (weight,) = (weight for name, weight in model.named_parameters() if f".{first}." in name and "o_proj" in name)
        weight.data.zero_()
        model.save_pretrained(root / kind)
    write_text(root / "text.jsonl")
    return root


@pytest.fixture
def calibrated(folder, run_kvpop, monkeypatch):
    """Function that calibrates a model by heads or layers, and returns the calibration and the report's lines.

    One row of text is in memory at a time.
    """
    monkeypatch.chdir(folder)
    rows, replay = [], Stages.replay

    def replay_alone(stages, number):
        assert not any(row() for row in rows)
        row = replay(stages, number)
        rows.append(weakref.ref(row))
        return row

    monkeypatch.setattr(Stages, "replay", replay_alone)

    def run(kind="gemma3_text", unit="head"):
        out = f"{kind}-{unit}"
        status, _, errors = run_kvpop("calibrate", kind, "--out", out, "--shares", unit, *WORDS)
        assert status == 0, errors
        return read_calibration(out), json.loads(Path(out, "report.json").read_text())["lines"]

    return run


@pytest.mark.parametrize(
    "kind, unit",
    [pytest.param("gemma3_text", "layer", marks=pytest.mark.slow), ("gemma3_text", "head"), ("nemotron_h", "head")],
)
def test_layers_of_the_policy_are_calibrated(calibrated, kind, unit):
    """Slots go to the layer that has an effect; the report counts bytes of these layers.

    Attention of Nemotron-H does not rotate, so that it has no statistics.
    """
    calibration, lines = calibrated(kind, unit)
    assert calibration.layers == LAYERS[kind] and calibration.num_layers == 2
    first, second = calibration.shares
    assert min(second) > max(first)
    if kind == "gemma3_text":
        statistics = read_statistics(f"{kind}-{unit}")
        assert statistics.layers == LAYERS[kind] and len(statistics.mean) == len(statistics.norm) == 2
    shape = ModelShape.in_context(kind, 128)
    line = next(line for line in lines if line["policy"] == "streaming-llm" and line["shares"] == "equal")
    setting = Setting(128, line["budget"], None, None)
    ((resolved, _),) = resolve_all([(training_free("streaming-llm"), setting)], shape, torch.float32)
    assert line["MiB"] * 2**20 == resolved.request_bytes(128, torch.float32).allocated
    assert {line["policy"] for line in lines} == {"streaming-llm", "l2norm"}


def test_a_model_without_rotation_has_no_statistics(folder, run_kvpop, monkeypatch):
    """A policy that needs them is left out by default, and an error if it was asked for."""
    monkeypatch.chdir(folder)
    words = "calibrate nemotron_h --data text.jsonl --length 320 --budget 160 --rows 8 --threads 1 --out unrotated"
    status, _, errors = run_kvpop(*words.split())
    assert status == 0 and "streaming-llm decides: no statistics for triattention: " in errors, errors
    assert read_calibration("unrotated").policy == "streaming-llm"
    shutil.rmtree("unrotated")
    refused(
        run_kvpop, f"{words} --policies triattention", "layers of this model have different rotary embeddings, or none"
    )


@pytest.mark.parametrize("policy", ["streaming-llm", "triattention"])
def test_engine_and_cache_serve_a_calibration(calibrated, policy):
    calibrated()
    settings = {"policy": policy, "budget": 160 if policy == "triattention" else 56, "calibration": "gemma3_text-head"}
    with running("gemma3_text", settings, block_size=32) as llm:
        answers = complete(llm, NEW)
        shares = engine_policy(llm.llm_engine.vllm_config).shares()
    assert shares.shape == (2, 2) and (shares != settings["budget"]).any()
    network = AutoModelForCausalLM.from_pretrained("gemma3_text").eval()
    tokens = [[token for token, _ in answer] for answer in answers]
    cache = KVpopCache(network, **settings)
    assert tokens == generate(network, cache, PROMPTS, new=NEW) and torch.equal(cache.policy.shares(), shares)
    if policy == "streaming-llm":
        assert tokens != generate(network, KVpopCache(network, **settings, allocator="uniform"), PROMPTS, new=NEW)


@pytest.mark.parametrize("kind, queries", [("gemma3_text", 8), ("nemotron_h", 128)])
def test_states_begin_with_a_row(folder, monkeypatch, kind, queries):
    """With recurrent layers all queries of a row run again."""
    monkeypatch.chdir(folder)
    assert Plan(Options(kind, "out", ("text.jsonl",), length=128, rows=8)).queries == queries


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_budgets_of_requests_are_shared(calibrated, kind):
    """Heads of a request divide its budget by the calibration's shares; answers are the oracle's."""
    calibration, _ = calibrated(kind)
    oracle = KindsOracle(kind)
    with serving(kind, SHARED | {"calibration": f"{kind}-head"}) as engine:
        asks = [{}, {"kv_budget": 30}, {"kv_budget": 72}]
        jobs = [Job(n, new=30, scored=False, asks=one) for n in (140, 70) for one in asks]
        engine.chunk(16)
        for name, answer in engine.serve(jobs).items():
            slots = jobs[int(answer.request_id)].asks.get("kv_budget", 56) - 12
            exact = OraclePolicy("recency", 4, 8, shared_slots(calibration.shares, slots))
            Served(engine, oracle, exact, by_inputs=kind == "nemotron_h").check(name, answer)
            for layer, steps in engine.recorder.retained[name].items():
                slots = [min(steps[-1].tokens_seen, 12 + k) for k in exact.topk[layer]]
                assert [len(head) for head in steps[-1].positions] == slots


def test_a_calibration_of_other_layers_is_refused(calibrated, tmp_path):
    """As many layers of the same shape, at other places; of a model without windows, and of shares alone."""
    calibration, _ = calibrated()
    network = AutoModelForCausalLM.from_pretrained("gemma3_text")
    shutil.copytree("gemma3_text-head", tmp_path / "other")
    for layers, shown in (((1, 5), r"\(1, 5\)"), ((), r"\(\)")):
        dataclasses.replace(calibration, layers=layers).write(tmp_path / "other")
        message = rf"other was made for a model with layers = {shown}, this one has \(2, 5\): run 'kvpop calibrate'"
        for serve in (lambda one: configure("gemma3_text", one), lambda one: KVpopCache(network, **one)):
            with pytest.raises(ConfigError, match=message):
                serve({"policy": "streaming-llm", "budget": 56, "calibration": str(tmp_path / "other")})
    statistics = Path(tmp_path / "other" / "queries.json")
    statistics.write_text(json.dumps(json.loads(statistics.read_text()) | {"layers": [0, 1]}))
    calibration.write(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"was made for a model with layers = \(0, 1\), this one has \(2, 5\)"):
        KVpopCache(network, "triattention", budget=160, calibration=str(tmp_path / "other"))


def test_damaged_layers_are_refused(calibrated, tmp_path):
    calibrated()
    shutil.copytree("gemma3_text-head", tmp_path / "other")
    path = tmp_path / "other" / "shares.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": [5, 2]}))
    with pytest.raises(ConfigError, match=r"layers must be a list of 2 ascending indices of layers, got \[5, 2\]"):
        read_calibration(str(tmp_path / "other"))


def test_a_stage_without_full_attention_is_refused(folder, run_kvpop, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["calibrate", "gemma3_text", "--out", "staged", *WORDS, "--pipeline-parallel-size", 3]
    assert FAMILIES["gemma3_text"]["layer_types"][:2] == ["sliding_attention"] * 2
    status, _, errors = run_kvpop(*words)
    assert status == 2 and "a stage of --pipeline-parallel-size 3 has no layer with full attention: lower it" in errors
