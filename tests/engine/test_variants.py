"""Comparisons with the oracle that need their own engine.

They cover head sizes, other kernels and dtypes, and `full`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from engine.driving import BLOCK, Job, one_thread, serving, watched
from engine.judge import Judge
from engine.matrix import BUDGET, make_case
from engine.recorder import Held
from engine.test_fidelity import EVERY, STEPS
from engine.test_requests import MOST, Judges

from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.supported import HEAD_SIZES
from kvpop_vllm.testing import (
    DisturbedSums,
    OraclePolicy,
    assert_within_budget,
    eager_runs,
    margin_bound,
    masked_attention,
    random_prompt,
    write_tiny_model,
)

WITHOUT = {"norm": False, "skip": False, "feature_map": "hedgehog", "gate_softcap": None, "delayed": True}
TEXT = random_prompt(260, seed=94)
JOBS = [Job(1, new=70), Job(BUDGET), Job(150, new=40)]
"""Few requests, because tests/policies/test_product.py and tests/kernels cover the rules in pages."""


@pytest.mark.parametrize("size", [size for size in HEAD_SIZES if size != 32])
def test_head_sizes(tmp_path, size):
    """Every supported head size gives the oracle's results; all other tests use 32."""
    model = str(write_tiny_model(tmp_path / "model", "llama", head_dim=size))
    with serving(make_case(model, tmp_path / "scorer", "kvpop")) as engine:
        engine.chunk(7)
        engine.verdict(engine.serve(JOBS))


def decisions(judge, **changes) -> torch.Tensor:
    """Return what the oracle's first layer retains with changes of its policy."""
    with one_thread():
        return judge.models[0].run(random_prompt(200), dataclasses.replace(judge.policy, **changes)).visible[0]


def test_the_decay_step_matters(case):
    """Ages rounded down to steps retain other tokens, otherwise the engine's case would prove nothing."""
    judge = case("qwen3", "kvpop", **STEPS).judge
    smooth = [[per_step / STEPS["decay_step"] for per_step in judge.policy.decay(layer, 2)] for layer in range(2)]
    assert not torch.equal(decisions(judge), decisions(judge, step=1, log_gamma=smooth))


@pytest.mark.parametrize("option", WITHOUT)
def test_each_scorer_option_matters(case, option):
    """Each option changes the retained tokens, so an engine that ignores it fails."""
    judge = case("qwen3", "kvpop", **({"delayed": False} if option == "delayed" else EVERY)).judge
    scorer = judge.policy.scorer
    assert scorer["config"][option] != WITHOUT[option]
    lesser = {**scorer, "config": scorer["config"] | {option: WITHOUT[option]}}
    if option in ("norm", "skip"):
        drop = f"{option}.weight"
        lesser["layers"] = [{key: t for key, t in layer.items() if key != drop} for layer in scorer["layers"]]
    assert not torch.equal(decisions(judge), decisions(judge, scorer=lesser))


def test_reference_kernels(case, monkeypatch):
    monkeypatch.setattr(dispatch, "CPP_DTYPES", {})
    assert dispatch.select("decode_step", torch.empty(0)) == "reference"
    with serving(case("qwen3", "kvpop")) as engine:
        engine.chunk(7)
        engine.verdict(engine.serve([Job(1, new=24), Job(100, new=8)]))


def test_the_fast_kernels_run(case, monkeypatch):
    """Every layer uses the C++ kernels for the prompt and for each later token, and nothing else."""
    ran, find = Counter(), dispatch._implementation
    monkeypatch.setattr(dispatch, "_implementation", lambda op, impl: ran.update([(op, impl)]) or find(op, impl))
    with serving(case("qwen3", "kvpop")) as engine:
        engine.chunk(None)
        ran.clear()
        engine.verdict(engine.serve([Job(100, new=8)]))
    assert ran == {("prefill_chunk", "cpp"): 2, ("decode_step", "cpp"): 2 * 7}


def test_full_equals_stock(tiny_model):
    model, tokens = tiny_model("qwen3"), []
    jobs = [Job(n, scored=False) for n in (1, 17, 64, 130, 300)]
    for policy in (None, {"policy": "full"}):
        with watched(model, policy, Judge(model, OraclePolicy.full()), block_size=64) as engine:
            answers = engine.serve(jobs)
            tokens.append([answers[name].outputs[0].token_ids for name in sorted(answers)])
            if policy is not None:
                engine.verdict(answers)
    assert tokens[0] == tokens[1]


def test_heads_that_divide_more_blocks_than_equal_ones_take(case):
    """Unequal heads may take one block more than equal ones.

    The budget fills whole blocks, of which unequal heads fill two in part. The window is so small that every
    head keeps different tokens.
    """
    found = case("qwen3", "adakv", protect_prompt=True, budget=64, sinks=2, window=4)
    with serving(found, max_model_len=256, num_gpu_blocks_override=80) as engine:
        engine.chunk(50)
        lengths = (26, 63, 64, 65, 66, 80, 119, 150)
        answers = engine.serve([Job(new=40, prompt=TEXT[:n], scored=False) for n in lengths])
        engine.verdict(answers)
        for step in engine.recorder.blocks:
            for name, (tokens, row) in step.running.items():
                prompt = step.protected[name]
                if tokens > prompt:
                    full = cdiv(min(tokens, 64), BLOCK) if prompt <= 64 else 5
                    assert len([block for block in row if block]) == engine.state_blocks + full
        held = [layers[layer][-1].positions for layers in engine.recorder.held.values() for layer in (0, 1)]
        shares = [[len(positions) for positions in heads] for heads in held]
        assert all(sum(share) == 2 * 64 for share in shares) and sum(a != b for a, b in shares) >= 8
        assert min(map(min, shares)) >= 64 // 5


def test_budgets_of_requests(case):
    """Each request is compressed to its own budget."""
    found, asks = case("qwen3", "snapkv", protect_prompt=True), (None, {"kv_budget": 30}, {"kv_budget": MOST})
    judges = Judges("snapkv", found)
    with serving(found._replace(settings=found.settings | {"max_budget": MOST})) as engine:
        engine.recorder.windows = judges.windows()
        lengths = 60, 60, 60, 120, 110, 100
        jobs = {str(i): Job(new=50, prompt=TEXT[:n], asks=asks[i % 3]) for i, n in enumerate(lengths)}
        judges.check(engine, engine.serve([*jobs.values()]), jobs)
        engine.check_blocks()


OWN_KEYS = [
    (policy, "bfloat16") for policy in ("kvpop", "kvpop-mlp", "streaming-llm", "l2norm", "tova", "h2o", "momentkv")
]
OWN_KEYS.append(("l2norm", "float32"))


@pytest.mark.parametrize("policy, dtype", OWN_KEYS)
def test_judged_on_its_own_keys(case, policy, dtype):
    """Each run is compared with the oracle on its own cached keys, because chunking changes bfloat16 keys."""
    found, ties = case("llama", policy), []
    with serving(found, dtype=dtype) as engine:
        for chunk in (1, 7, 64, None) if dtype == "float32" else (7, None):
            engine.chunk(chunk)
            for name in engine.serve([Job(1, new=205 // (chunk or 205) + 1), Job(BUDGET), Job(200)]):
                for layer, held in engine.recorder.held[name].items():
                    ties += _judge_layer(engine.recorder, found.judge.policy, name, layer, held)
    print(f"{len(ties)} decisions, {sum(ties)} near-ties")
    assert len(ties) > 1000 and sum(ties) <= 1e-3 * len(ties)


def _judge_layer(recorder, policy, name, layer, held) -> list[bool]:
    """Compare one layer with the oracle, from the queries, keys and values that reached it.

    Returns:
        One entry per decision, True for each near-tie.
    """
    seen = held[-1].seen
    parts = [recorder.tensors[name, layer, part][:seen].transpose(0, 1) for part in ("query", "key", "value", "out")]
    query, key, value, out = parts
    exact = policy.decide(layer, query.double(), key.double(), value.double())
    with DisturbedSums(0):
        low = policy.decide(layer, query.float(), key.float(), value.float(), forced=exact.visible)
    sets, margins, bound = exact.visible, exact.margins, margin_bound(low.scores, exact.scores)
    ties, others = [False] * int((margins < float("inf")).sum()), [*range(len(key))]
    for head in range(len(key)):
        before = 0
        for step in held:
            if step.positions[head] != sets[head, step.seen - 1].nonzero().flatten().tolist():
                assert margins[head, before : step.seen].min() < bound, f"{name}, layer {layer}, head {head}, {step}"
                ties.append(True)
                others.remove(head)
                break
            before = step.seen
    exact = policy.attend(query.double(), key.double(), value.double(), sets)
    eager = eager_runs(lambda: policy.attend(query.to(key.dtype), key, value, sets))
    group = len(query) // len(key)
    # a head with a near-tie sees other tokens
    rows = [head * group + i for head in others for i in range(group)]
    found, exact, *eager = (
        x.unflatten(-1, (len(query), -1))[:, rows] for x in (out.transpose(0, 1).flatten(1), exact, *eager)
    )
    assert_within_budget(found, exact, eager)
    return ties


def test_a_near_tie_excuses_its_own_head_only(case, monkeypatch):
    policy, length = case("llama", "kvpop-linear").judge.policy, 130
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, length, 32, generator=draw).bfloat16() for heads in (4, 2, 2))
    decided = policy.decide(0, query.double(), key.double(), value.double())
    sets = decided.visible
    out = masked_attention(query, key, value, sets).unflatten(-1, (4, -1)).transpose(0, 1)
    tensors = {
        ("0", 0, n): t.transpose(0, 1) for n, t in zip(("query", "key", "value"), (query, key, value), strict=True)
    }
    held = [Held(length, length, [row[-1].nonzero().flatten().tolist() for row in sets])]

    def ties(out):
        recorder = SimpleNamespace(tensors=tensors | {("0", 0, "out"): out.transpose(0, 1)})
        return sum(_judge_layer(recorder, policy, "0", 0, held))

    assert ties(out) == 0
    held[0].positions[0][policy.sinks] -= 1
    with pytest.raises(AssertionError, match="layer 0, head 0"):
        ties(out)
    tied = dataclasses.replace(decided, margins=torch.zeros(2, length))

    def decide(policy, layer, query, key, value, forced=None):
        return tied if query.dtype is torch.float64 else dataclasses.replace(tied, scores=tied.scores + 1e-3)

    monkeypatch.setattr(OraclePolicy, "decide", decide)
    assert ties(out) == 1
    with pytest.raises(AssertionError, match="exceeds"):
        ties(out + torch.tensor([0, 0, 0, 1])[:, None, None])
    held[0].positions[1][policy.sinks] -= 1
    assert ties(out) == 2
