"""Files of shares, and the scorers' configs that former versions have written them into."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from distill.typed import distill, evaluated, refused
from kernels.naive import visible_keys

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.distill.recipes import DEMO
from kvpop_vllm.distill.sparse_attention import Sparse
from kvpop_vllm.distill.student import Student
from kvpop_vllm.evaluation.policies import learned
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import read_config, read_scorer, write_shares
from kvpop_vllm.testing import OracleModel, OraclePolicy, random_prompt, write_random_scorer

SHARES = ((0.5, 1.5), (1.25, 0.75))


def test_a_scorers_shares_serve_every_policy(kvpop, folder):
    write_random_scorer(Path("measured"), "qwen3", "mlp", sinks=2, window=6, topk=16)
    before, tensors = read_config("measured"), Path("measured/kvpop_scorer.safetensors").read_bytes()
    write_shares("measured", SHARES)
    config = read_config("measured")
    assert config == dataclasses.replace(before, shares=SHARES) and before.shares == ()
    assert Path("measured/kvpop_scorer.safetensors").read_bytes() == tensors
    network = load_model("qwen3", torch.float32)
    budgets = KVpopCache(network, "kvpop-mlp", scorer="measured", budget=24).policy.shares()
    assert (budgets - 8).tolist() == [[8, 24], [20, 12]]
    resolved = learned("measured", "qwen3")[0].resolve(ModelShape.of("qwen3", 256), 24)
    assert torch.equal(KVpopCache(network, **resolved.settings).policy.shares(), budgets)
    options = {"budget": 24, "sinks": 2, "window": 6}
    other = KVpopCache(network, "h2o", calibration="measured/kvpop_config.json", **options).policy.shares()
    assert torch.equal(budgets, other)
    equal = KVpopCache(network, "kvpop-mlp", scorer="measured", budget=24, allocator="uniform").policy.shares()
    assert (equal == 24).all()
    words = (
        "--scorer measured --allocator uniform --calibration measured/kvpop_config.json --rows 1 --length 96 --budget 24"
        " --equal k"
    )
    records = evaluated(kvpop, f"--data text.jsonl --policies h2o {words}").records
    names = "dense h2o h2o+measured/kvpop_config.json measured+uniform measured+measured/kvpop_config.json"
    assert {record["policy"] for record in records} == {*names.split()}
    kl = {record["policy"]: record["kl"] for record in records if "kl" in record}
    assert kl["h2o"] != kl["h2o+measured/kvpop_config.json"]
    start = "eval --model qwen3 --data text.jsonl --policies h2o"
    refused(kvpop, f"{start} {words.replace('uniform', 'cone')}", "must be one of uniform, pyramid, ada, got 'cone'")
    file = "measured/kvpop_config.json"
    refused(kvpop, f"{start} {words.replace('uniform', file)}", f"got '{file}': give --calibration {file} instead")
    with pytest.raises(
        ValueError, match="is a file of shares and recommends nothing: give policy the name of a policy"
    ):
        KVpopCache(network, "auto", calibration=file)


def test_training_with_shares_keeps_what_serving_with_them_keeps(kvpop, folder):
    """Masks of training, with each window that was trained, are those of the oracle for the folder that is written."""
    Path("measured.json").write_text(json.dumps({"shares": SHARES}))
    words = ["--window", "8", "12", "--topk", "20", "13", "--sinks=3", "--decay-step=1", "--no-fit-decays"]
    distill(kvpop, "shared", "--shares=measured.json", "--steps=3", "--batch=2", *words)
    config, layers = read_scorer("shared")
    assert config.shares == SHARES and [(b.window, b.topk) for b in config.trained] == [(8, 20), (12, 13)]
    again = distill(kvpop, "again", "--shares=shared", "--steps=3", "--batch=2", *words)
    assert again == read_metrics(Path("shared/run/metrics.jsonl"))
    equal = distill(kvpop, "equal", "--steps=3", "--batch=2", *words)
    assert again[0]["retention"] != equal[0]["retention"]
    recipe = dataclasses.replace(
        DEMO, length=96, positions=None, sinks=3, window=[8, 12], topk=[20, 13], shares=config.shares
    )
    student = Student(load_model("qwen3", torch.float64), [from_tensors(config, tensors) for tensors in layers], recipe)
    tokens, oracle = random_prompt(96), OracleModel("qwen3")
    for row, (window, topk) in enumerate(recipe.trained):
        masks, roles = [], student.roles(row)
        near = roles.sinks, roles.window

        def observe(layer, masks=masks, near=near):
            masks.append(visible_keys(layer.rank, layer.cutoff, *near)[0])

        student.read(torch.tensor([tokens]), Sparse(student.score, roles, observe, student.topk(roles)), row=0)
        policy = OraclePolicy.from_scorer("shared", window=window, topk=topk)
        judged = oracle.run(tokens, policy, visible=masks)  # refuses sets that the slots of a head do not allow
        assert all(float(margins.min()) > -1e-5 for margins in judged.margins), "float32 scores decide otherwise"
        slots = [mask[:, -1].sum(-1).tolist() for mask in masks]
        assert slots == [[roles.first_long + k for k in layer] for layer in policy.topk] != [[roles.budget] * 2] * 2


def test_the_former_command_names_the_new_one(kvpop, folder):
    words = "--model qwen3 --data text.jsonl more.txt --out measured --length 64 --no-pack --protect-prompt"
    new = "run 'kvpop calibrate qwen3 --scorer measured --shares head --data text.jsonl more.txt --protect-prompt'"
    refused(kvpop, f"distill shares {words}", f"shares are measured by another command: {new}")


@pytest.mark.parametrize(
    "shares",
    [
        *([], "no", [[1.0, 1.0]], [[1.0], [1.0]], [[0, 0], [0, 0]], [[1e308, 1e308], [1e308, 1e308]]),
        *([[number, 1], [1, 1]] for number in (10**400, -1, "1", True)),
    ],
)
def test_files_with_other_shares_are_refused(kvpop, folder, shares):
    Path("shares.json").write_text(json.dumps({"shares": shares}))
    message = "has no shares: give calibration the folder" if shares == [] else "2 lists of 2 numbers"
    with pytest.raises(ValueError, match=message):
        KVpopCache(load_model("qwen3", torch.float32), "h2o", budget=24, calibration="shares.json")
