"""Shares of heads are those that lose least, by evictions simulated token by token in float64."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from distill.rows import Rows, noisy_student
from distill.train_tiny import LENGTH, RECIPE
from distill.typed import evaluated, refused

from kvpop_vllm.distill.shares import PARTS, divide_slots, expected_error, measure_errors
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.evaluation.policies import learned
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers.checkpoint import read_config, read_scorer
from kvpop_vllm.testing import write_random_scorer

SINKS, WINDOW, TOPK = 4, 8, 20


def attended(q, k, v, score, log_gamma, slots, scale, sinks, step):
    """Return the outputs ``[G, S, D]`` of one KV head that drops tokens one by one, in float64.

    Args:
        q: ``[G, S, D]``.
        k: ``[S, D]``.
        v: ``[S, D]``.
        score: ``[S]``.
        log_gamma: float.
        slots: number of long-range slots.
        scale: factor on q . k.
        sinks: tokens that are never dropped.
        step: n, positions per decay step.
    """
    held, kept, outs = [], [], []
    for p in range(len(k)):
        held.append(p)
        if (leaves := p - WINDOW) >= sinks:
            kept.append(leaves)
            if len(kept) > slots:
                worst = min(kept, key=lambda t: (float(score[t]) + (p - t) // step * log_gamma, t))
                kept.remove(worst)
                held.remove(worst)
        outs.append(torch.softmax(q[:, p] @ k[held].T * scale, -1) @ v[held])
    return torch.stack(outs, 1)


@pytest.mark.parametrize("step, protect", [(1, 0), (3, 0), (1, 9)])
def test_errors_are_those_of_evictions_one_by_one(model, step, protect):
    recipe = dataclasses.replace(RECIPE, window=[WINDOW], topk=[TOPK], sinks=SINKS, positions=None, decay_step=step)
    recipe = dataclasses.replace(recipe, pack=not protect, protect_prompt=bool(protect))
    student = noisy_student(model, recipe)
    rows, seen = Rows(LENGTH), []

    def recorder(layer, q, k, v, scale):
        score, log_gamma = student.score(layer, k, v, student.roles(0, protect))
        seen.append((layer, q[0].double(), k[0].double(), v[0].double(), score[0], log_gamma, scale))
        return dense_attention(q, k, v, scale)[0]

    given = [(rows[0], protect), (rows[1], protect)]
    found = measure_errors(student, given)
    with torch.no_grad():
        for tokens, _ in given:
            student.read(tokens.unsqueeze(0), recorder, 0)
    sinks = protect or SINKS
    expected, first = torch.zeros_like(found), sinks + WINDOW + TOPK
    with torch.no_grad():
        for layer, q, k, v, score, log_gamma, scale in seen:
            groups = q.unflatten(0, (len(k), -1))
            weights = groups @ k.unsqueeze(1).transpose(-1, -2) * scale
            full = torch.softmax(weights.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf), -1)
            full = full @ v.unsqueeze(1)
            for (h, group), (i, part) in itertools.product(enumerate(groups), enumerate(PARTS)):
                decay, slots = float(log_gamma[h]), round(part * TOPK)
                out = attended(group, k[h], v[h], score[h], decay, slots, scale, sinks, step)
                error = (out - full[h])[:, first:].square().sum()
                expected[layer, h, i] += error / full[:, :, first:].square().sum()
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-7)
    assert found.diff(dim=-1).max() < 0 < found.min(), "more slots lose less"


def test_no_other_division_loses_less():
    """Compared with all divisions of three heads' slots into the measured parts."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        falls = torch.rand(1, 3, len(PARTS), generator=draw, dtype=torch.float64).pow(3)
        errors = falls.flip(-1).cumsum(-1).flip(-1)
        shares = divide_slots(errors)
        assert shares.sum().item() == pytest.approx(3) and shares.min() >= 0
        others = (torch.tensor(parts)[None] for parts in itertools.product(PARTS, repeat=3) if sum(parts) <= 3)
        best = min(expected_error(errors, other.double()) for other in others)
        hull = errors.clone()  # the best mixture of two numbers of slots
        for h, (i, j) in itertools.product(range(3), itertools.combinations(range(len(PARTS)), 2)):
            for between in range(i + 1, j):
                weight = (PARTS[between] - PARTS[i]) / (PARTS[j] - PARTS[i])
                line = errors[0, h, i] + weight * (errors[0, h, j] - errors[0, h, i])
                hull[0, h, between] = torch.minimum(hull[0, h, between], line)
        assert expected_error(hull, shares) <= best + 1e-12


def test_slots_that_nobody_needs_go_to_all():
    errors = torch.zeros(2, 2, len(PARTS), dtype=torch.float64)
    errors[0, 1, 0] = 1.0  # an eighth of k is enough
    assert divide_slots(errors).tolist() == [[0.96875, 1.09375], [0.96875, 0.96875]]


def test_the_command_writes_shares_that_every_policy_can_be_served_with(kvpop, folder):
    write_random_scorer(Path("measured"), "qwen3", "mlp", sinks=2, window=6, topk=16)
    before, tensors = read_scorer("measured")
    words = "--model qwen3 --data text.jsonl --out measured --length 64 --rows 2 --dtype float32 --threads 1".split()
    status, out, err = kvpop("distill", "shares", *words)
    assert status == 0, err
    assert out.startswith("long-range slots of a head: ") and "over that of equal heads: 0." in out
    config, after = read_scorer("measured")
    assert dataclasses.replace(config, shares=()) == before and before.shares == ()
    assert all(torch.equal(a[name], b[name]) for a, b in zip(tensors, after, strict=True) for name in a)
    shares = torch.tensor(config.shares, dtype=torch.float64)
    assert shares.shape == (2, 2) and shares.mean().item() == pytest.approx(1, abs=1e-3) and shares.std() > 0.01

    network = load_model("qwen3", torch.float32)
    own = KVpopCache(network, "kvpop-mlp", scorer="measured", budget=24).policy.shares()
    assert int(own.sum()) == 24 * 4 and (own != 24).any()
    resolved = learned("measured", "qwen3")[0].resolve(ModelShape.of("qwen3", 256), 24)
    assert torch.equal(KVpopCache(network, **resolved.settings).policy.shares(), own)
    asked = {"budget": 24, "sinks": 2, "window": 6}
    other = KVpopCache(network, "h2o", allocator="measured/kvpop_config.json", **asked).policy.shares()
    assert torch.equal(own, other)
    equal = KVpopCache(network, "kvpop-mlp", scorer="measured", budget=24, allocator="uniform").policy.shares()
    assert (equal == 24).all()
    words = (
        "--scorer measured --allocator uniform measured/kvpop_config.json --rows 1 --length 96 --budget 24 --equal k"
    )
    found = evaluated(kvpop, f"--data text.jsonl --policies h2o {words}").records
    names = {
        "dense",
        "h2o",
        "h2o+measured/kvpop_config.json",
        "measured+uniform",
        "measured+measured/kvpop_config.json",
    }
    assert {record["policy"] for record in found} == names
    refused(
        kvpop,
        f"eval --model qwen3 --data text.jsonl --policies h2o {words.replace('uniform', 'cone')}",
        "or a file, got 'cone'",
    )


@pytest.mark.parametrize(
    "words, message",
    [
        ("--out gate", "gate holds a gate (trimkv), and shares are measured for scorers of keys and values"),
        ("--out measured --recipe demo", "kvpop distill shares has no use for --recipe: leave it out"),
        ("--out measured --steps 3", "kvpop distill shares has no use for --steps: leave it out"),
        ("--out nothing", "no scorer at 'nothing'"),
        ("--out measured --topk 8 16", "shares are measured at one budget: give one --topk"),
        ("--out delayed --window 5", "--window 5 is not what the delayed scorer was trained with, window 6"),
        ("--out measured --length 24", "length 24 must exceed sinks + window + topk"),
        ("--out other", "llama"),
    ],
)
def test_refusals(kvpop, folder, words, message):
    write_random_scorer(Path("measured"), "qwen3", "mlp", sinks=2, window=6, topk=16)
    write_random_scorer(Path("gate"), "qwen3", "trimkv", sinks=2, window=6, topk=16)
    write_random_scorer(Path("delayed"), "qwen3", "mlstm", sinks=2, window=6, topk=16)
    write_random_scorer(Path("other"), "llama", "mlp", sinks=2, window=6, topk=16)
    length = "" if "--length" in words else "--length 64"
    refused(kvpop, f"distill shares --model qwen3 --data text.jsonl {length} {words}", message)
    assert read_config("measured").shares == ()


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [[1e308, 1e308], [1e308, 1e308]],
        [[10**400, 1], [1, 1]],
        [[1.0, 1.0]],
        [[1.0], [1.0]],
        [[1, -1], [1, 1]],
        [[0, 0], [0, 0]],
        [[1, "1"], [1, 1]],
        "no",
        [[1, True], [1, 1]],
    ],
)
def test_files_with_other_shares_are_refused(kvpop, folder, shares):
    Path("shares.json").write_text(json.dumps({"shares": shares}))
    message = "has no shares: write them with 'kvpop distill shares'" if shares == [] else "2 lists of 2 numbers"
    with pytest.raises(ValueError, match=message):
        KVpopCache(load_model("qwen3", torch.float32), "h2o", budget=24, allocator="shares.json")
