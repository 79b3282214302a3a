"""Policies that evaluation runs on serving kernels match the naive oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.distill.hook import load_model, show_hidden_states
from kvpop_vllm.distill.sparse import dense_attention
from kvpop_vllm.evaluation.policies import in_registry, known_training_free, learned, training_free
from kvpop_vllm.evaluation.recall import Judge
from kvpop_vllm.evaluation.runner import Setting, evaluate, summarise
from kvpop_vllm.evaluation.served import Served, attend_and_keep
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.roles import Retention
from kvpop_vllm.testing import (
    OracleModel,
    OraclePolicy,
    retained_by_attention,
    write_random_scorer,
    write_tiny_model,
)

S, Q0 = 90, [40, 70]
SHAPE = ModelShape("llama", 2, 2, 32, 256, num_heads=4)
ORACLES = {"streaming-llm": "recency", "h2o": "mean mass", "tova": "newest mass", "momentkv": "moment residual"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", "llama")


@pytest.fixture(scope="module")
def layer():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, S, 32, generator=g) for heads in (4, 2, 2))
    return q, k, v


def row(seed=1):
    return torch.randint(0, 256, (S,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ORACLES)
def test_next_tokens_are_the_oracles(model, name, corrected):
    spec, setting = training_free(name), Setting(S, 30, 2, 6)
    if corrected and not spec.uses_moment_correction:
        spec = spec.corrected()
    _, record = evaluate(load_model(model, torch.float32), [row()], [spec], [setting])
    policy = OraclePolicy(ORACLES[name], 2, 6, record["topk"], corrected=corrected or name == "momentkv")
    run, plain = (OracleModel(model).run(row().tolist(), chosen) for chosen in (policy, None))
    nll, dense = (float(-r.logprobs[:-1].gather(-1, row()[1:, None]).mean()) for r in (run, plain))
    assert record["nll"] == pytest.approx(nll, rel=1e-5) and abs(nll - dense) > 1e-4
    exact, own = plain.logprobs[:-1], run.logprobs[:-1]
    assert record["kl"] == pytest.approx(float((exact.exp() * (exact - own)).sum(-1).mean()), rel=1e-3)
    assert 0 < record["hindsight"] <= 1 and 0 < record["mass"] <= 1.0001


@pytest.mark.parametrize("name", ["trimkv", "dms", "h2o+pyramid"])
def test_next_tokens_with_gates_and_unequal_layers_are_the_oracles(model, tmp_path, name):
    """Predictions match the oracle; recall is omitted where heads hold different numbers of tokens."""
    if name in ("trimkv", "dms"):
        folder = write_random_scorer(tmp_path / "gate", model, name, sinks=2, window=6, topk=22, evict=0.5)
        spec, policy = learned(str(folder), model)[0], OraclePolicy.from_scorer(folder)
    else:
        spec, policy = training_free("h2o").allocated("pyramid"), OraclePolicy("mean mass", 0, 15, (29, 1))
    loaded = load_model(model, torch.float32)
    show_hidden_states(loaded)
    _, record = evaluate(loaded, [row()], [spec], [Setting(S, 30, None, None)])
    run, plain = (OracleModel(model).run(row().tolist(), chosen) for chosen in (policy, None))
    nll, dense = (float(-r.logprobs[:-1].gather(-1, row()[1:, None]).mean()) for r in (run, plain))
    assert record["nll"] == pytest.approx(nll, rel=1e-5) and abs(nll - dense) > 1e-4
    assert record["error"] > 0.01 and ("mass" in record) == (name != "dms")


@pytest.mark.parametrize("name", ["h2o", "tova", "momentkv"])
def test_recall_is_of_the_sets_on_dense_queries(layer, name):
    q, k, v = layer
    roles = Retention(16, 2, 6)
    resolved = training_free(name).resolve(SHAPE, roles.budget, 2, 6)
    assert resolved.roles == roles
    out, kept = attend_and_keep(resolved, 0, q, k, v, 32**-0.5, Q0)
    for b in range(2):
        visible, margins, _, _ = retained_by_attention(q[b], k[b], v[b], ORACLES[name], 2, 6, 8)
        assert margins.min() > 1e-6
        for q0, found in zip(Q0, kept, strict=True):
            assert torch.equal(found[b], visible[:, q0, 2 : q0 - 5])
    judge = Judge(q, k, dense_attention(q, k, v, 32**-0.5)[1], 32**-0.5)
    recall, again = resolved.on_dense(judge, 0, v, Q0)
    expected = judge.recall_of(kept, torch.zeros(2), roles, Q0)
    assert torch.equal(recall.hindsight, expected.hindsight) and torch.equal(recall.mass, expected.mass)
    assert torch.equal(again, out)
    _, order = attend_and_keep(resolved, 0, q, k, v, 32**-0.5, Q0[::-1])
    assert all(torch.equal(a, b) for a, b in zip(order[::-1], kept, strict=True))


@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_a_correction_changes_no_decision(layer, name):
    """A correction changes no measure of evictions, the teacher's included."""
    q, k, v = layer
    judge = Judge(q, k, dense_attention(q, k, v, 32**-0.5)[1], 32**-0.5)
    both = training_free(name), training_free(name).corrected()
    (plain, _), (corrected, _) = (c.resolve(SHAPE, 16, 2, 6).on_dense(judge, 0, v, Q0) for c in both)
    for measure in ("teacher", "hindsight", "mass"):
        assert torch.equal(getattr(plain, measure), getattr(corrected, measure)), measure


@pytest.mark.parametrize("name", ["streaming-llm", "momentkv"])
def test_the_error_of_outputs_by_definition(model, name):
    """The output error of the first layer matches its definition.

    Queries, keys and values of that layer are the same with every policy.
    """
    records = list(evaluate(load_model(model, torch.float32), [row()], [training_free(name)], [Setting(S, 30, 2, 6)]))
    kept = {}

    def capture(layer, q, k, v, scale):
        kept.setdefault(layer, tuple(x[0].detach().double() for x in (q, k, v)))
        return dense_attention(q, k, v, scale)[0]

    load_model(model, torch.float32).get_decoder()(input_ids=row()[None], attend=capture)
    policy, full = OraclePolicy(ORACLES[name], 2, 6, 22, corrected=name == "momentkv"), OraclePolicy.full()
    q, k, v = kept[0]
    own, exact = (p.attend(q, k, v, p.decide(0, q, k, v).visible).unflatten(-1, (4, -1))[30:] for p in (policy, full))
    expected = ((own - exact).norm(dim=-1) / exact.norm(dim=-1)).mean(0)
    assert records[1]["error_by_layer"][0] == pytest.approx(expected.tolist(), rel=1e-4) and expected.min() > 0.01


@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_heads_may_hold_different_budgets(layer, name):
    """Each head behaves as if all heads had its budget, in a chunk and token by token."""
    uneven, rule = torch.tensor([20, 33], dtype=torch.int32), training_free(name).resolve(SHAPE, 33, 2, 6).rules[0]

    def run(budget):
        rows, parts = LayerRows(rule, budget, layer[1][:1], 32**-0.5), []
        for a, b in ((0, 70), *((t, t + 1) for t in range(70, S))):
            parts.append(rows.append(*(x[:1, :, a:b] for x in layer)))
        return torch.cat(parts, 2)[0], rows.held_by_rows()[0]

    (out, held), alone = run(uneven), [run(int(b)) for b in uneven]
    assert held.sum(-1).tolist() == [20, 33]
    for head in range(2):
        assert torch.equal(held[head], alone[head][1][head])
        mine = slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(out[mine], alone[head][0][mine], rtol=0, atol=2e-5)


def test_recall_is_left_out_where_heads_hold_different_numbers(model, monkeypatch):
    """Recall is omitted because it assumes equal k; other measures are present and the shares apply."""

    class Uneven(policies.get("h2o")):
        name = "uneven"

        def shares(self):
            return torch.tensor([[24, 36], [30, 30]], dtype=torch.int32)

    monkeypatch.setitem(policies.POLICIES, "uneven", Uneven)
    specs, setting = [training_free("h2o"), training_free("uneven")], Setting(S, 30, 2, 6)
    records = list(evaluate(load_model(model, torch.float32), [row()], specs, [setting]))
    even, uneven = records[1:]
    assert {"teacher", "hindsight", "mass"} <= even.keys() and not {"teacher", "hindsight", "mass"} & uneven.keys()
    assert uneven["kl"] > 0 and uneven["nll"] != even["nll"]
    by_layer = [record["error_by_layer"] for record in (even, uneven)]
    assert by_layer[0][1] == by_layer[1][1] and all(a != b for a, b in zip(by_layer[0][0], by_layer[1][0], strict=True))
    (line,) = (x for x in summarise(records) if x["policy"] == "uneven")
    assert "mass" not in line and line["kl"] == uneven["kl"]


@pytest.mark.parametrize("name", ["random", "vase"])
def test_draws_follow_the_seed(layer, name):
    """The seed of `kvpop eval` decides what a policy that draws retains."""
    outs = []
    for seed in (0, 0, 1):
        spec = dataclasses.replace(training_free(name), protect=0, seed=seed)
        outs.append(Served(spec.resolve(SHAPE, 40, 2, 6))(0, *layer, 32**-0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", known_training_free())
def test_evaluated_is_what_is_served(name):
    """Each policy without a scorer gets its defaults, or the given roles, as an engine resolves them."""
    for asked in ({}, {"sinks": 2, "window": 6}):
        policy = policies.get(name)(PolicySettings(name, 128, **asked), SHAPE)
        resolved = training_free(name).resolve(SHAPE, 128, **asked)
        served, evaluated = policy.layer_rule(1, slice(0, 2)), resolved.rules[1]
        tensors = {"log_gamma": None, "scorer": None, "rounds": None}
        plain = dataclasses.replace(served, **tensors)
        assert all(dataclasses.replace(r, **tensors) == plain for r in (served, evaluated))
        assert repr((served.scorer, served.rounds)) == repr((evaluated.scorer, evaluated.rounds))
        assert torch.equal(served.log_gamma, evaluated.log_gamma)
        kept, roles = policy.retention, resolved.roles
        assert (roles.budget, roles.sinks, roles.window) == (128, kept.sinks, kept.window)
        assert torch.equal(resolved.budgets(1), policy.shares()[1])


def test_every_registered_policy_comes_with_its_scorer(model, tmp_path):
    folders = [str(write_random_scorer(tmp_path / str(i), model, "mlstm", seed=i)) for i in range(2)]
    specs, left_out = in_registry(folders, model)
    names = [c.name for c in specs]
    assert set(names) == {*known_training_free(), *(f"kvpop, {folder}" for folder in folders)}
    assert {"streaming-llm", "l2norm", "h2o", "tova", "momentkv", "random"} <= set(names) and "full" not in names
    others = [cls.name for cls in policies.POLICIES.values() if cls.scorer_kind not in (None, "mlstm")]
    assert [line.split()[0] for line in left_out] == others and "kvpop-mlp" in others
    specs, _ = in_registry(folders[:1], model)
    assert "kvpop" in [c.name for c in specs]


@pytest.mark.parametrize(
    "name, message",
    [
        ("kvpop", "'kvpop' needs a scorer: give --scorer DIR"),
        ("full", "'full' evicts nothing"),
        ("l2", "unknown policy 'l2': choose from .*l2norm.* or give --scorer DIR"),
    ],
)
def test_names_that_cannot_be_compared_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        training_free(name)


def test_equal_bytes_count_the_moments():
    """At D = 64 the moments fill exactly one page of 64 slots."""
    plain, shape, setting = (
        training_free("h2o"),
        ModelShape("llama", 2, 2, 64, 4096),
        Setting(4096, 1024, None, None, "bytes"),
    )
    for spec, budget in ((plain, 1024), (plain.corrected(), 960), (training_free("momentkv"), 960)):
        resolved = setting.resolve(spec, shape, torch.bfloat16)
        assert resolved.roles.budget == budget and (spec is not plain or resolved.roles.window == 512)


@pytest.mark.parametrize("allocator, more", [("uniform", 0), ("pyramid", 1)])
@pytest.mark.parametrize("name", ["h2o", "streaming-llm"])
def test_equal_bytes_count_pages_that_are_not_full(name, allocator, more):
    """Unequal shares round up to whole pages in every layer."""
    shape, spec = ModelShape("llama", 30, 3, 64, 2048), training_free(name).allocated(allocator)
    settings = {equal: Setting(2048, 512, None, None, equal) for equal in ("k", "bytes")}
    found = {equal: one.resolve(spec, shape, torch.bfloat16) for equal, one in settings.items()}
    bytes_of = {equal: one.request_bytes(2048, torch.bfloat16).allocated for equal, one in found.items()}
    page = 30 * 3 * 64 * (2 * 64 * 2 + 8)
    assert bytes_of == {"k": (8 + more) * page, "bytes": 8 * page} and found["k"].roles.budget == 512
    fits = found["bytes"].roles.budget
    assert (fits == 512) == (more == 0)
    if fits < 512:
        one_more = spec.resolve(shape, fits + 1)
        assert one_more.request_bytes(2048, torch.bfloat16).allocated > 8 * page


def test_bytes_of_heads_that_divide():
    """Heads whose last pages are filled in part take a block more than equal ones, but not for a prompt that fits."""
    shape = ModelShape("llama", 30, 3, 64, 2048, num_heads=9)
    of = {name: training_free(name).resolve(shape, 512) for name in ("snapkv", "adakv")}
    more = [
        of["adakv"].request_bytes(length, torch.bfloat16).blocks
        - of["snapkv"].request_bytes(length, torch.bfloat16).blocks
        for length in (512, 513, 2000)
    ]
    assert more == [0, 1, 1]


@pytest.mark.parametrize("name, allocator", [("streaming-llm", "uniform"), ("h2o", "uniform"), ("h2o", "pyramid")])
def test_how_many_tokens_are_all_held(layer, name, allocator):
    """``whole`` tokens are all retained, and after one more token some are not."""
    resolved = training_free(name).allocated(allocator).resolve(SHAPE, 40)
    assert (resolved.least < 40) == (allocator == "pyramid")
    rows, whole = LayerRows(resolved.rules[0], resolved.least, layer[1], 32**-0.5), resolved.whole
    rows.append(*(x[:, :, :whole] for x in layer))
    assert rows.held_by_rows().all()
    rows.append(*(x[:, :, whole : whole + 1] for x in layer))
    assert not rows.held_by_rows().all()
