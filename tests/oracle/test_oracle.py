"""The oracle, checked from first principles because everything else is compared with it."""

import math
from types import MethodType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpop_vllm.testing import (
    DisturbedSums,
    OracleModel,
    OraclePolicy,
    decision_margins,
    derived_budget,
    derived_margin_bound,
    random_prompt,
    raw_scores,
    read_scorer,
    require_distant_influence,
    retained_sets,
    retained_sets_static,
    write_random_scorer,
    write_tiny_model,
)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model_dir(request, tmp_path_factory):
    hidden = 128 if request.param == "qwen2" else 64
    return write_tiny_model(tmp_path_factory.mktemp("model"), request.param, hidden=hidden)


def random_scores(seed, heads=2, length=80):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(heads, length)), -generator.uniform(0.0, 0.1, size=heads)


def key_values(length=50, heads=2, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, size, generator=generator, dtype=torch.float64)


def hf_logprobs(model_dir, tokens, exact_norm):
    """Return log-probabilities of the transformers model in float64.

    Its RMS norm computes in float32 unless ``exact_norm`` replaces it.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="sdpa")

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if exact_norm and type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


# The forward pass


@pytest.mark.parametrize("exact_norm, tolerance", [(True, 1e-9), (False, 1e-4)])
def test_full_mask_equals_transformers(model_dir, exact_norm, tolerance):
    tokens = random_prompt(150)
    ours = OracleModel(model_dir).run(tokens).logprobs
    torch.testing.assert_close(ours, hf_logprobs(model_dir, tokens, exact_norm), rtol=0, atol=tolerance)


def test_tied_embeddings_equal_transformers(tmp_path):
    write_tiny_model(tmp_path, "llama", tied=True)
    tokens = random_prompt(30)
    ours = OracleModel(tmp_path).run(tokens).logprobs
    torch.testing.assert_close(ours, hf_logprobs(tmp_path, tokens, True), rtol=0, atol=1e-9)


def test_models_depend_on_distant_tokens(model_dir):
    assert require_distant_influence(model_dir) > 0.05


def test_unknown_model_features_are_refused(tmp_path):
    write_tiny_model(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"rope_type": "default"', '"rope_type": "yarn"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="rope_type"):
        OracleModel(tmp_path)


# Retained sets

BUDGETS = [(4, 8, 12), (0, 8, 12), (4, 1, 5), (4, 8, 1), (4, 8, 0), (0, 1, 0), (90, 4, 4), (0, 90, 0)]


@pytest.mark.parametrize("sinks, window, topk", BUDGETS)
def test_two_formulations_agree_for_static_order(sinks, window, topk):
    for seed in range(4):
        scores, decay = random_scores(seed)
        online = retained_sets(scores, decay, sinks, window, topk)
        np.testing.assert_array_equal(online, retained_sets_static(scores, decay, sinks, window, topk))
        counts = np.minimum(np.arange(1, 81), sinks + window + topk)
        np.testing.assert_array_equal(online.sum(-1), np.broadcast_to(counts, (2, 80)))


def test_online_rule_differs_from_instantaneous_topk():
    differing = 0
    for seed in range(12):
        scores, decay = random_scores(seed)
        rule = (scores, 10 * decay, 2, 4, 6, 7)
        online, instantaneous = retained_sets(*rule), retained_sets_static(*rule)
        long_range = online & ~retained_sets(scores, decay, 2, 4, 0)
        returned = long_range[:, 1:] & ~online[:, :-1]
        assert not returned.any(), "an evicted token came back"
        differing += not np.array_equal(online, instantaneous)
    assert differing > 0


def test_ties_evict_the_older():
    equal = np.zeros((1, 30))
    np.testing.assert_array_equal(retained_sets(equal, [0.0], 2, 4, 5), retained_sets(equal, [0.0], 2, 9, 0))
    # Scores 5, 4, 4: the older of the two fours is evicted, although it is already retained.
    scores = np.array([[5.0, 4.0, 4.0, 0.0, 0.0]])
    assert np.flatnonzero(retained_sets(scores, [0.0], 0, 1, 2)[0, 3]).tolist() == [0, 2, 3]


def test_margins_judge_given_sets():
    scores, decay = random_scores(3)
    rule = (4, 8, 12)
    sets = retained_sets(scores, decay, *rule)
    margins = decision_margins(sets, scores, decay, *rule)
    assert (margins[:, :24] == math.inf).all() and np.isfinite(margins[:, 24:]).all()
    assert (margins >= 0).all()
    negated = decision_margins(retained_sets(-scores, decay, *rule), scores, decay, *rule)
    assert (negated < 0).any(), "sets made from other scores were judged right"


@pytest.mark.parametrize("damage", ["returned", "lost", "sink", "future"])
def test_impossible_sets_are_refused(damage):
    scores, decay = random_scores(3)
    sets = retained_sets(scores, decay, 4, 8, 12)
    evicted = np.flatnonzero(~sets[0, 40, :32])[0]
    q, t = {"returned": (41, evicted), "lost": (20, 6), "sink": (30, 0), "future": (10, 11)}[damage]
    sets[0, q, t] ^= True
    with pytest.raises(ValueError, match=f"query {q}"):
        decision_margins(sets, scores, decay, 4, 8, 12)


# Scores

MLSTM_OPTIONS = [
    {},
    {"feature_map": "softmax", "gate_softcap": 2.0},
    {"norm": True, "skip": True, "value_width": 16},
    {"v_proj": False, "features": 8},
    {"delayed": False, "gate_softcap": 15.0},
]


def silu(a):
    return a / (1.0 + np.exp(-a))


def readout_by_definition(scorer, head, x, values, u, q):
    """Return one score from the unrolled, unstabilised sums over tokens ``0 .. q``, in numpy only."""
    p = {name: t[head].numpy() for name, t in scorer["layers"][0].items()}
    config = scorer["config"]

    def phi(a):
        features = [a, -a] if config["feature_map"] == "hedgehog" else [a]
        return np.concatenate([np.exp(part) / np.exp(part).sum() for part in features])

    def gate(name, row):
        a, c = row @ p[f"{name}.weight"] + p[f"{name}.bias"], config["gate_softcap"]
        return a if c is None else c * np.tanh(a / c)

    query, numerator, denominator = phi(x[u] @ p["q_proj"]), 0.0, 1e-6
    for j in range(q + 1):
        weight = np.exp(gate("igate", x[j]))
        for later in range(j + 1, q + 1):
            weight /= 1.0 + np.exp(-gate("fgate", x[later]))
        weight *= query @ phi(x[j] @ p["k_proj"])
        numerator = numerator + weight * (x[j] @ p["v_proj"] if "v_proj" in p else values[j])
        denominator += weight
    h = numerator / denominator
    if config["norm"]:
        h = h / np.sqrt(np.mean(h * h) + 1e-6) * p["norm.weight"]
    skip = x[u] @ p["skip.weight"] if config["skip"] else 0.0
    return p["out.weight"] @ silu(h) + p["out.bias"] + skip


@pytest.mark.parametrize("options", MLSTM_OPTIONS)
def test_mlstm_equals_its_unrolled_definition(model, tmp_path, options):
    scorer = read_scorer(write_random_scorer(tmp_path, model, **options))
    (keys, values), window = key_values(30), 5
    scores = raw_scores(scorer, 0, keys, values, window)
    x = torch.cat([keys, values], -1).numpy()
    delay = window if scorer["config"]["delayed"] else 0
    assert scores[:, : 30 - delay].isfinite().all() and scores[:, 30 - delay :].isnan().all()
    for head, u in [(0, 0), (0, 13), (1, 7), (1, 29 - delay)]:
        expected = readout_by_definition(scorer, head, x[head], values[head].numpy(), u, u + delay)
        assert float(scores[head, u]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("gate_bias", [-200.0, 200.0])
def test_mlstm_survives_extreme_input_gates(model, tmp_path, gate_bias):
    scorer = read_scorer(write_random_scorer(tmp_path, model))
    scorer["layers"][0]["igate.bias"] += gate_bias
    for dtype in (torch.float32, torch.float64):
        keys, values = key_values(20).to(dtype)
        assert raw_scores(scorer, 0, keys, values, 4)[:, :16].isfinite().all()


def test_stateless_scorers_by_hand(model, tmp_path):
    keys, values = key_values(9)
    x = torch.cat([keys, values], -1).numpy()[1, 4]
    by_hand = {
        "linear": lambda p: x @ p["weight"] + p["bias"],
        "mlp": lambda p: silu(x @ p["fc1.weight"] + p["fc1.bias"]) @ p["fc2.weight"] + p["fc2.bias"],
    }
    for kind, expected in by_hand.items():
        scorer = read_scorer(write_random_scorer(tmp_path / kind, model, kind))
        p = {name: t[1].numpy() for name, t in scorer["layers"][1].items()}
        assert float(raw_scores(scorer, 1, keys, values, 3)[1, 4]) == pytest.approx(expected(p), abs=1e-12)


def test_zero_output_scorer_is_the_sliding_window(model, tmp_path):
    write_random_scorer(tmp_path, model, sinks=4, window=8, topk=20)
    path = tmp_path / "kvpop_scorer.safetensors"
    weights = {name: t * (".out." not in name) for name, t in load_file(path).items()}
    save_file(weights, path)
    tokens = random_prompt(100)
    model = OracleModel(model)
    run = model.run(tokens, OraclePolicy.from_scorer(tmp_path))
    streaming = model.run(tokens, OraclePolicy.streaming(4, 8, 20))
    assert all(map(torch.equal, run.visible, streaming.visible))
    assert torch.equal(run.logprobs, streaming.logprobs)


# Whole runs


@pytest.mark.parametrize("scorer", ["mlstm", "mlp", "linear"])
def test_budgets_are_tight_and_near_ties_rare(model_dir, tmp_path, monkeypatch, scorer):
    policy = OraclePolicy.from_scorer(write_random_scorer(tmp_path, model_dir, scorer))
    tokens = random_prompt(320)
    exact = OracleModel(model_dir).run(tokens, policy)
    with DisturbedSums(0):
        low = OracleModel(model_dir, torch.float32).run(tokens, policy, visible=exact.visible)
    budget = derived_budget(low, exact)
    assert 0 < budget < 1e-4
    near = [int((m < b).sum()) for m, b in zip(exact.margins, derived_margin_bound(low, exact), strict=True)]
    decisions = sum(int(m.isfinite().sum()) for m in exact.margins)
    assert decisions == 2 * 2 * (320 - policy.budget) and sum(near) <= 0.003 * decisions
    assert all((m > -b).all() for m, b in zip(low.margins, derived_margin_bound(low, exact), strict=True))
    full = OracleModel(model_dir).run(tokens)
    assert (full.logprobs - exact.logprobs)[-1].abs().max() > 0.1, "the budget changed nothing"
    attend = OraclePolicy.attend

    def without_a_key(self, query, key, value, visible, added):
        visible = visible.clone()
        visible[0, 310, int(visible[0, 310].nonzero()[30])] = False
        return attend(self, query, key, value, visible, added)

    monkeypatch.setattr(OraclePolicy, "attend", without_a_key)
    fault = (OracleModel(model_dir).run(tokens, policy).logprobs - exact.logprobs).abs().max()
    assert fault > 5 * budget, "one key that one query of one head does not see"


def test_prefix_of_a_run_is_the_run_of_the_prefix(model, tmp_path):
    policy = OraclePolicy.from_scorer(write_random_scorer(tmp_path, model))
    model, tokens = OracleModel(model), random_prompt(130)
    tokens += model.greedy(tokens, 3, policy)
    long, short = model.run(tokens, policy), model.run(tokens[:131], policy)
    torch.testing.assert_close(long.logprobs[:131], short.logprobs, rtol=0, atol=1e-10)
    assert tokens[130:] == long.logprobs[129:132].argmax(-1).tolist()
    assert all(torch.equal(a[:, :131, :131], b) for a, b in zip(long.visible, short.visible, strict=True))
