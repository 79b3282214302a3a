"""Prompts and generated tokens under policies match the naive oracle; replay matches its definition."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation import replay
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.options import contenders_of
from kvpop_vllm.evaluation.pictures import retention_map
from kvpop_vllm.evaluation.policies import learned, training_free
from kvpop_vllm.evaluation.runner import Setting, evaluate
from kvpop_vllm.testing import OracleModel, OraclePolicy, random_prompt, write_random_scorer, write_tiny_model

S, B, NEW = 90, 30, 12
NAMES = None, "h2o", "kvpop", "dms, shifted", "h2o+pyramid"
"""Policies of each kind of plumbing. tests/hf/test_cache.py compares the cache with the oracle under all of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "model", "llama"))


@pytest.fixture(scope="module")
def scorer(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer") / "scorer"
    return str(write_random_scorer(folder, model, sinks=2, window=6, topk=B - 8))


@pytest.fixture(scope="module")
def backend(model):
    return TransformersBackend(model, torch.float32, S + NEW)


@pytest.fixture(scope="module")
def both(model, scorer, backend, tmp_path_factory):
    """Function ``name -> (resolved policy, oracle policy)``; None is dense."""

    def make(name):
        if name is None:
            return None, None
        if name == "h2o+pyramid":
            k = B - B // 2
            oracle = OraclePolicy("mean mass", 0, B // 2, (2 * k - round(k / 20), round(k / 20)))
            return training_free("h2o").allocated("pyramid").resolve(backend.shape, B), oracle
        if name == "dms, shifted":
            folder = tmp_path_factory.mktemp("gate") / "gate"
            write_random_scorer(folder, model, "dms", sinks=2, window=6, topk=B - 8, evict=0.5, shifted=True)
            return learned(str(folder), model)[0].resolve(backend.shape, B), OraclePolicy.from_scorer(folder)
        if name == "kvpop":
            return learned(scorer, model)[0].resolve(backend.shape, B), OraclePolicy.from_scorer(scorer)
        return training_free(name).resolve(backend.shape, B), OraclePolicy("mean mass", 0, B // 2, B - B // 2)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_predictions_and_held_tokens_of_a_prompt_are_the_oracles(model, backend, both, name):
    tokens, (resolved, oracle) = random_prompt(S), both(name)
    exact = OracleModel(model).run(tokens, oracle)
    with backend.start(resolved) as run:
        own = run.logits(run.hidden(torch.tensor(tokens))).log_softmax(-1)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own.double(), exact.logprobs, rtol=0, atol=2e-4)
    if name is None:
        return
    roles, layers = resolved.roles, len(resolved.policy.shares())
    assert (roles.sinks, roles.window, roles.budget) == (oracle.sinks, oracle.window, B)
    assert [resolved.budgets(layer).unique().tolist() for layer in range(layers)] == [
        [b] for b in oracle.budgets(layers)
    ]
    held = backend.held(resolved, torch.tensor(tokens))
    assert all(torch.equal(held[layer], visible[:, S - 1]) for layer, visible in enumerate(exact.visible))
    assert held.sum(-1).max() == max(oracle.budgets(layers)) or name == "dms, shifted"


@pytest.mark.parametrize("name", NAMES)
def test_generated_tokens_are_the_oracles(model, backend, both, name):
    """Decode steps on caches that the prompt filled generate the oracle's tokens, none of them a near-tie."""
    prompt, (resolved, oracle) = random_prompt(60, seed=3), both(name)
    naive = OracleModel(model)
    exact = []
    for _ in range(NEW):
        exact.append(int(naive.run(prompt + exact, oracle).logprobs[-1].argmax()))
    gaps = naive.run(prompt + exact, oracle).top2_gap[len(prompt) - 1 : -1]
    assert gaps.min() > 1e-3 and len(set(exact)) > 4
    assert name is None or exact != naive.greedy(prompt, NEW), "the budget shows in nothing"
    with backend.start(resolved) as run:
        assert run.generate(prompt, NEW, set()) == exact
        assert run.generate(prompt, 3, set()) == exact[:3], "a request knows nothing of the one before"
        stop = exact[5]
        assert run.generate(prompt, NEW, {stop}) == exact[: exact.index(stop)]


def test_draws_follow_the_seed(backend):
    """``kvpop eval --seed`` decides what a policy that draws holds."""
    unasked = dict.fromkeys(("allocator", "protect_prompt", "correction"))
    options = SimpleNamespace(task="replay", policies=["random"], scorer=[], equal=["k"], **unasked)
    held = []
    for options.seed in (0, 0, 1):
        ((spec,), _) = contenders_of(options, ())
        held.append(backend.held(spec.resolve(backend.shape, B), torch.tensor(random_prompt(S))))
    assert torch.equal(held[0], held[1]) and not torch.equal(held[0], held[2])


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv"])
def test_a_prompt_is_compressed_as_the_oracle_does(model, backend, name):
    """Tokens retained at the end of the prompt and tokens generated from them match the oracle."""
    prompt, k = random_prompt(70, seed=11), B - 8
    shares = {"pyramidkv": (2 * k - round(k / 20), round(k / 20))}
    oracle = OraclePolicy(
        "prompt votes", 0, 8, shares.get(name, k), adaptive_head_budgets=name == "adakv", prompt=len(prompt)
    )
    resolved, naive, exact = training_free(name).resolve(backend.shape, B, 0, 8), OracleModel(model), []
    run = naive.run([*prompt, 0], oracle)
    held = backend.held(resolved, torch.tensor(prompt))
    for layer, visible in enumerate(run.visible):
        # The oracle has taken one more step: one more token has left the window, and a full head has evicted
        # its lowest token.
        mine, theirs = held[layer], visible[:, len(prompt), : len(prompt)]
        assert bool((mine | ~theirs).all()) and bool((mine.sum(-1) - theirs.sum(-1) <= 1).all())
    assert int(held.sum()) == 2 * 2 * B
    for _ in range(NEW):
        exact.append(int(naive.run(prompt + exact, oracle).logprobs[-1].argmax()))
    assert naive.run(prompt + exact, oracle).top2_gap[len(prompt) - 1 : -1].min() > 1e-3
    with backend.start(resolved) as run:
        assert run.generate(prompt, NEW, set()) == exact != naive.greedy(prompt, NEW)


@pytest.mark.parametrize("kind, mark", [("llama", "kvpop_borrowed_channel"), ("qwen3", "dms_alpha_scale")])
def test_a_model_that_gives_up_a_channel_has_it_under_no_policy(kind, mark, tmp_path):
    """Dense attention and the policy both run without the channel that the gate reads, on whole rows too."""
    folder, scorer = str(write_tiny_model(tmp_path / "model", kind)), str(tmp_path / "gate")
    write_random_scorer(scorer, folder, "dms", sinks=2, window=6, topk=B - 8, reads="query", evict=0.5)
    tokens, policy = torch.tensor(random_prompt(S)), OraclePolicy.from_scorer(scorer)
    spec = learned(scorer, folder)[0]
    plain = TransformersBackend(folder, torch.float32, S)
    with pytest.raises(ConfigError, match="has not given up"), plain.start(spec.resolve(plain.shape, B)):
        pass
    with pytest.raises(ConfigError, match="has not given up"):
        list(evaluate(plain.model, [tokens], [spec], [Setting(S, B, None, None)], recall=False))
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {mark: 1}))
    backend, model = TransformersBackend(folder, torch.float32, S), OracleModel(folder)
    resolved = spec.resolve(backend.shape, B)
    whole = model.run(tokens.tolist(), OraclePolicy(policy.scorer, sinks=0, window=2**62, topk=0))
    sparse = model.run(tokens.tolist(), policy)
    assert not torch.allclose(whole.logprobs, model.run(tokens.tolist(), None).logprobs, atol=1e-2)
    for exact, own in ((whole, None), (sparse, resolved)):
        with backend.start(own) as run:
            logp = run.logits(run.hidden(tokens)).log_softmax(-1)
        torch.testing.assert_close(logp.double(), exact.logprobs, rtol=0, atol=2e-4)
    found = backend.held(resolved, tokens)
    for layer, visible in enumerate(sparse.visible):
        assert torch.equal(found[layer], visible[:, S - 1])
    dense, own = evaluate(backend.model, [tokens], [spec], [Setting(S, B, None, None)], recall=False)
    for record, exact in ((dense, whole), (own, sparse)):
        nll = -exact.logprobs[:-1].gather(-1, tokens[1:, None]).mean()
        assert record["nll"] == pytest.approx(float(nll), abs=1e-4)
    assert own["error"] > 0.01


@pytest.mark.parametrize("positions, bucket", [(512, 20), (7, 20), (512, 89)])
def test_replay_by_definition(model, backend, both, monkeypatch, positions, bucket):
    monkeypatch.setattr("kvpop_vllm.evaluation.replay.POSITIONS", positions)
    tokens, (resolved, oracle) = random_prompt(S), both("h2o")
    exact, own = (OracleModel(model).run(tokens, policy).logprobs[:-1] for policy in (None, oracle))
    kl = (exact.exp() * (exact - own)).sum(-1)
    same = (exact.argmax(-1) == own.argmax(-1)).double()
    nll = -own.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    with backend.start(None) as run:
        dense = replay.predictions(run, torch.tensor(tokens))
        itself = replay.compare(run, torch.tensor(tokens), dense, bucket)
    with backend.start(resolved) as run:
        found = replay.compare(run, torch.tensor(tokens), dense, bucket)
    for name, values in (("nll", nll), ("kl", kl), ("agreement", same)):
        by_hand = [values[a : a + bucket].mean().item() for a in range(0, S - 1, bucket)]
        assert found[f"{name}_by_position"] == pytest.approx(by_hand, rel=1e-3, abs=1e-6), name
        assert found[name] == pytest.approx(values.mean().item(), rel=1e-4)
    assert (found["kl"] > 0.01 > abs(itself["kl"])) and itself["agreement"] == 1 > found["agreement"]
    assert bucket != 20 or found["kl_by_position"][0] < 1e-6 < 1e-2 < found["kl_by_position"][-1]


def test_maps_are_means_over_heads_and_positions():
    held = torch.zeros(2, 3, 10, dtype=torch.bool)
    held[0, :, 0] = held[0, 1, 5] = held[1, 2, 8:] = True
    torch.testing.assert_close(retention_map(held, 4), torch.tensor([[3 / 12, 1 / 12, 0], [0, 0, 2 / 6]]))
