"""Policies that evaluation runs on serving kernels match the naive oracle."""

import dataclasses

import pytest
import torch

from kvpop_vllm import policies
from kvpop_vllm.config import PolicySettings
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.evaluation.policies import known_training_free, learned, training_free
from kvpop_vllm.evaluation.recall import Judge
from kvpop_vllm.evaluation.runner import Setting, evaluate, resolve_all
from kvpop_vllm.evaluation.serving_kernels import attend_and_keep
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.model_hook import load_model, show_hidden_states
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.roles import Retention
from kvpop_vllm.testing import (
    OracleModel,
    OraclePolicy,
    retained_by_attention,
    write_random_scorer,
)

S, Q0 = 90, [40, 70]
SHAPE = ModelShape("llama", 2, 2, 32, 256, num_heads=4)
ORACLES = {"streaming-llm": "recency", "h2o": "mean mass", "tova": "newest mass", "momentkv": "moment residual"}


@pytest.fixture(scope="module")
def layer():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, S, 32, generator=g) for heads in (4, 2, 2))
    return q, k, v


def row(seed=1):
    return torch.randint(0, 256, (S,), generator=torch.Generator().manual_seed(seed))


CORRECTED = [f"{name}+moment" for name in ORACLES if name != "momentkv"]
CASES = [*ORACLES, *CORRECTED, "trimkv", "dms", "kvzap", "h2o+pyramid"]


@pytest.mark.parametrize("name", CASES)
def test_next_tokens_are_the_oracles(model, tmp_path, name):
    """Recall is omitted where heads hold different numbers of tokens."""
    plain, _, suffix = name.partition("+")
    setting = Setting(S, 30, None, None)
    if name in ("trimkv", "dms", "kvzap"):
        folder = write_random_scorer(tmp_path / "gate", model, name, sinks=2, window=6, topk=22, evict=0.5)
        spec, policy = learned(str(folder), model)[0], OraclePolicy.from_scorer(folder)
    elif suffix == "pyramid":
        spec, policy = training_free("h2o").allocated("pyramid"), OraclePolicy("mean mass", 0, 15, (29, 1))
    else:
        spec, setting = training_free(plain), Setting(S, 30, 2, 6)
        spec = spec.corrected() if suffix else spec
        policy = OraclePolicy(ORACLES[plain], 2, 6, 22, corrected=bool(suffix) or name == "momentkv")
    loaded = load_model(model, torch.float32)
    show_hidden_states(loaded)
    runs = resolve_all([(spec, setting)], ModelShape.of(model, S), torch.float32)
    _, record = evaluate(loaded, [row()], [S], runs)
    run, dense = (OracleModel(model).run(row().tolist(), chosen) for chosen in (policy, None))
    nll, exact_nll = (float(-r.logprobs[:-1].gather(-1, row()[1:, None]).mean()) for r in (run, dense))
    assert record["nll"] == pytest.approx(nll, rel=1e-5) and abs(nll - exact_nll) > 1e-4
    exact, inexact = dense.logprobs[:-1], run.logprobs[:-1]
    assert record["kl"] == pytest.approx(float((exact.exp() * (exact - inexact)).sum(-1).mean()), rel=1e-3)
    assert record["error"] > 0 and ("mass" in record) == ("hindsight" in record) == (name != "dms")
    assert name == "dms" or (0 < record["hindsight"] <= 1 and 0 < record["mass"] <= 1.0001)


@pytest.mark.parametrize("name", ["h2o", "tova", "momentkv"])
def test_recall_is_of_the_sets_on_dense_queries(layer, name):
    q, k, v = layer
    roles = Retention(16, 2, 6)
    resolved = training_free(name).resolve(SHAPE, roles.budget, 2, 6)
    assert resolved.roles == roles
    out, retained = attend_and_keep(resolved, 0, q, k, v, 32**-0.5, Q0)
    for b in range(2):
        visible, margins, _, _ = retained_by_attention(q[b], k[b], v[b], ORACLES[name], 2, 6, 8)
        assert margins.min() > 1e-6
        for q0, retained_of in zip(Q0, retained, strict=True):
            assert torch.equal(retained_of[b], visible[:, q0, 2 : q0 - 5])
    judge = Judge(q, k, dense_attention(q, k, v, 32**-0.5)[1], 32**-0.5)
    recall, again = resolved.on_dense(judge, 0, v, Q0)
    expected = judge.recall_of(retained, torch.zeros(2), roles, Q0)
    assert torch.equal(recall.hindsight, expected.hindsight) and torch.equal(recall.mass, expected.mass)
    assert torch.equal(again, out)
    _, order = attend_and_keep(resolved, 0, q, k, v, 32**-0.5, Q0[::-1])
    assert all(torch.equal(a, b) for a, b in zip(order[::-1], retained, strict=True))


@pytest.mark.parametrize("name", ["streaming-llm", "momentkv"])
def test_the_error_of_outputs_by_definition(model, name):
    """The output error of the first layer matches its definition.

    Queries, keys and values of that layer are the same with every policy.
    """
    runs = resolve_all([(training_free(name), Setting(S, 30, 2, 6))], ModelShape.of(model, S), torch.float32)
    records = list(evaluate(load_model(model, torch.float32), [row()], [S], runs))
    projections = {}

    def capture(layer, q, k, v, scale):
        projections.setdefault(layer, tuple(x[0].detach().double() for x in (q, k, v)))
        return dense_attention(q, k, v, scale)[0]

    load_model(model, torch.float32).get_decoder()(input_ids=row()[None], attend=capture)
    policy, full = OraclePolicy(ORACLES[name], 2, 6, 22, corrected=name == "momentkv"), OraclePolicy.full()
    q, k, v = projections[0]
    evicted, exact = (
        p.attend(q, k, v, p.decide(0, q, k, v).visible).unflatten(-1, (4, -1))[30:] for p in (policy, full)
    )
    expected = ((evicted - exact).norm(dim=-1) / exact.norm(dim=-1)).mean(0)
    assert records[1]["error_by_layer"][0] == pytest.approx(expected.tolist(), rel=1e-4) and expected.min() > 0.01


@pytest.mark.parametrize("allocator, extra", [("uniform", 0), ("pyramid", 1)])
@pytest.mark.parametrize("name", ["h2o", "streaming-llm"])
def test_equal_bytes_count_pages_that_are_not_full(name, allocator, extra):
    """Unequal shares round up to whole pages in every layer."""
    shape, spec = ModelShape("llama", 30, 3, 64, 2048), training_free(name).allocated(allocator)
    settings = {equal: Setting(2048, 512, None, None, equal) for equal in ("k", "bytes")}
    resolved = {equal: one.resolve(spec, shape, torch.bfloat16) for equal, one in settings.items()}
    bytes_of = {equal: one.request_bytes(2048, torch.bfloat16).allocated for equal, one in resolved.items()}
    page = 30 * 3 * 64 * (2 * 64 * 2 + 8)
    assert bytes_of == {"k": (8 + extra) * page, "bytes": 8 * page} and resolved["k"].roles.budget == 512
    fits = resolved["bytes"].roles.budget
    assert (fits == 512) == (extra == 0)
    if fits < 512:
        one_more = spec.resolve(shape, fits + 1)
        assert one_more.request_bytes(2048, torch.bfloat16).allocated > 8 * page


@pytest.mark.parametrize("name, allocator", [("streaming-llm", "uniform"), ("h2o", "uniform"), ("h2o", "pyramid")])
def test_how_many_tokens_are_all_held(layer, name, allocator):
    """So many tokens are all retained, and after one more token some are not."""
    resolved = training_free(name).allocated(allocator).resolve(SHAPE, 40)
    assert (resolved.smallest_budget < 40) == (allocator == "pyramid")
    rows, count = LayerRows(resolved.rules[0], resolved.smallest_budget, layer[1], 32**-0.5), resolved.dense_length
    rows.append(*(x[:, :, :count] for x in layer))
    assert rows.held_by_rows().all()
    rows.append(*(x[:, :, count : count + 1] for x in layer))
    assert not rows.held_by_rows().all()


@pytest.mark.parametrize("name", known_training_free())
def test_evaluated_is_what_is_served(name):
    """Each policy without a scorer gets its defaults, or the given roles, as an engine resolves them."""
    for roles_set in ({}, {"sinks": 0, "window": 6}):
        policy = policies.get(name)(PolicySettings(name, 128, **roles_set), SHAPE)
        resolved = training_free(name).resolve(SHAPE, 128, **roles_set)
        served, evaluated = policy.layer_rule(1, slice(0, 2)), resolved.rules[1]
        tensors = {"log_gamma": None, "scorer": None, "rounds": None}
        plain = dataclasses.replace(served, **tensors)
        assert all(dataclasses.replace(r, **tensors) == plain for r in (served, evaluated))
        assert repr((served.scorer, served.rounds)) == repr((evaluated.scorer, evaluated.rounds))
        assert torch.equal(served.log_gamma, evaluated.log_gamma)
        retention, roles = policy.retention, resolved.roles
        assert (roles.budget, roles.sinks, roles.window) == (128, retention.sinks, retention.window)
        assert torch.equal(resolved.budgets(1), policy.shares()[1])
