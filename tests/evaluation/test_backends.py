"""Prompts and generated tokens under policies match the naive oracle; replay matches its definition."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation import backends, replay
from kvpop_vllm.evaluation.backends import Sampling, TransformersBackend, choose
from kvpop_vllm.evaluation.options import contenders_of
from kvpop_vllm.evaluation.policies import learned, training_free
from kvpop_vllm.evaluation.runner import Setting, evaluate, resolve_all
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import OracleModel, OraclePolicy, random_prompt, write_random_scorer, write_tiny_model

S, B, NEW = 90, 30, 12


@pytest.fixture(scope="module")
def backend(model):
    return TransformersBackend(model, torch.float32, S + NEW)


@pytest.fixture(scope="module")
def h2o(backend):
    """The policy and its oracle. tests/hf/test_cache.py compares the cache with oracles of all policies."""
    return training_free("h2o").resolve(backend.shape, B), OraclePolicy("mean mass", 0, B // 2, B - B // 2)


@pytest.mark.parametrize("dense", [True, False])
def test_generated_tokens_are_the_oracles(model, backend, h2o, dense):
    """Decode steps on caches that the prompt filled generate the oracle's tokens, none of them a near-tie."""
    prompt, (resolved, oracle) = random_prompt(60, seed=3), (None, None) if dense else h2o
    naive = OracleModel(model)
    exact = []
    for _ in range(NEW):
        exact.append(int(naive.run(prompt + exact, oracle).logprobs[-1].argmax()))
    gaps = naive.run(prompt + exact, oracle).top2_gap[len(prompt) - 1 : -1]
    assert gaps.min() > 1e-3 and len(set(exact)) > 4
    assert dense or exact != naive.greedy(prompt, NEW), "the budget shows in nothing"
    with backend.start(resolved) as run:
        assert run.generate([prompt], NEW, set()) == [exact]
        assert run.generate([prompt], 3, set()) == [exact[:3]], "a request knows nothing of the one before"
        stop = exact[5]
        assert run.generate([prompt], NEW, {stop}) == [exact[: exact.index(stop)]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_policys_cache_is_where_its_kernels_are(backend, h2o, monkeypatch, device):
    """The device follows from the model's keys and the policy's rule."""
    asked_for = []

    def kernel_device(keys, rule):
        asked_for.append((keys.device, keys.dtype, keys.shape[-1], rule))
        return torch.device(device)

    monkeypatch.setattr(backends, "kernel_device", kernel_device)
    with backend.start(h2o[0]) as run:
        assert run.cache.device == torch.device(device)
    assert asked_for == [(torch.device("cpu"), torch.float32, backend.shape.head_dim, h2o[0].rules[0])]


def test_draws_follow_the_seed(backend):
    """``kvpop eval --seed`` decides what a policy that draws holds."""
    unasked = dict.fromkeys(("allocator", "calibration", "protect_prompt", "correction"))
    options = SimpleNamespace(task="replay", policies=["random"], scorer=[], **unasked)
    retained = []
    for options.seed in (0, 0, 1):
        ((spec,), _) = contenders_of(options, ())
        retained.append(backend.held(spec.resolve(backend.shape, B), torch.tensor(random_prompt(S))))
    assert torch.equal(retained[0], retained[1]) and not torch.equal(retained[0], retained[2])


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
    retained = backend.held(resolved, torch.tensor(prompt))
    for layer, visible in enumerate(run.visible):
        # The oracle has taken one more step: one more token has left the window, and a full head has evicted
        # its lowest token.
        mine, theirs = retained[layer], visible[:, len(prompt), : len(prompt)]
        assert bool((mine | ~theirs).all()) and bool((mine.sum(-1) - theirs.sum(-1) <= 1).all())
    assert int(retained.sum()) == 2 * 2 * B
    for _ in range(NEW):
        exact.append(int(naive.run(prompt + exact, oracle).logprobs[-1].argmax()))
    assert naive.run(prompt + exact, oracle).top2_gap[len(prompt) - 1 : -1].min() > 1e-3
    with backend.start(resolved) as run:
        assert run.generate([prompt], NEW, set()) == [exact] != naive.greedy(prompt, NEW)


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
        runs = resolve_all([(spec, Setting(S, B, None, None))], plain.shape, torch.float32)
        list(evaluate(plain.model, [tokens], [S], runs, recall=False))
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {mark: 1}))
    backend, model = TransformersBackend(folder, torch.float32, S), OracleModel(folder)
    resolved = spec.resolve(backend.shape, B)
    unevicted = model.run(tokens.tolist(), OraclePolicy(policy.scorer, sinks=0, window=2**62, topk=0))
    sparse = model.run(tokens.tolist(), policy)
    assert not torch.allclose(unevicted.logprobs, model.run(tokens.tolist(), None).logprobs, atol=1e-2)
    for exact, resolved_policy in ((unevicted, None), (sparse, resolved)):
        with backend.start(resolved_policy) as run:
            logp = run.logits(run.hidden(tokens)).log_softmax(-1)
        torch.testing.assert_close(logp.double(), exact.logprobs, rtol=0, atol=2e-4)
    retained = backend.held(resolved, tokens)
    for layer, visible in enumerate(sparse.visible):
        assert torch.equal(retained[layer], visible[:, S - 1])
    marked = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # the cache under any policy
        room = KVpopCache(marked, "h2o", budget=256, window=200)
        logits = marked(tokens[None], past_key_values=room).logits[0]
    torch.testing.assert_close(logits.log_softmax(-1).double(), unevicted.logprobs, rtol=0, atol=2e-4)
    dense, evicted = evaluate(backend.model, [tokens], [S], runs, recall=False)
    for record, exact in ((dense, unevicted), (evicted, sparse)):
        nll = -exact.logprobs[:-1].gather(-1, tokens[1:, None]).mean()
        assert record["nll"] == pytest.approx(float(nll), abs=1e-4)
    assert evicted["error"] > 0.01


@pytest.mark.parametrize("positions, bucket", [(512, 20), (7, 20), (512, 89)])
def test_replay_by_definition(model, backend, h2o, monkeypatch, positions, bucket):
    monkeypatch.setattr("kvpop_vllm.evaluation.replay.POSITIONS", positions)
    tokens, (resolved, oracle) = random_prompt(S), h2o
    exact, inexact = (OracleModel(model).run(tokens, policy).logprobs[:-1] for policy in (None, oracle))
    kl = (exact.exp() * (exact - inexact)).sum(-1)
    same = (exact.argmax(-1) == inexact.argmax(-1)).double()
    nll = -inexact.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    with backend.start(None) as run:
        dense = replay.predictions(run, torch.tensor(tokens))
        itself = replay.compare(replay.predictions(run, torch.tensor(tokens)), torch.tensor(tokens), dense, bucket)
    with backend.start(resolved) as run:
        compared = replay.compare(replay.predictions(run, torch.tensor(tokens)), torch.tensor(tokens), dense, bucket)
    for name, values in (("nll", nll), ("kl", kl), ("agreement", same)):
        by_hand = [values[a : a + bucket].mean().item() for a in range(0, S - 1, bucket)]
        assert compared[f"{name}_by_position"] == pytest.approx(by_hand, rel=1e-3, abs=1e-6), name
        assert compared[name] == pytest.approx(values.mean().item(), rel=1e-4)
    assert (compared["kl"] > 0.01 > abs(itself["kl"])) and itself["agreement"] == 1 > compared["agreement"]
    assert bucket != 20 or compared["kl_by_position"][0] < 1e-6 < 1e-2 < compared["kl_by_position"][-1]


def test_prompts_of_all_lengths_run_in_batches(model, backend, h2o):
    """Answers are those of single requests, in the prompts' order; a row that ended changes no other."""
    prompts = [random_prompt(length, seed=length) for length in (60, 40, 60, 50, 60, 40)]
    wide = TransformersBackend(model, torch.float32, S + NEW, requests=2)
    for resolved in (None, h2o[0]):
        with backend.start(resolved) as run:
            alone = [run.generate([prompt], NEW, set())[0] for prompt in prompts]
        stop = alone[0][4]
        expected = [row[: row.index(stop)] if stop in row else row for row in alone]
        with wide.start(resolved) as run:
            assert run.generate(prompts, NEW, set()) == alone
            assert run.generate(prompts, NEW, {stop}) == expected


def test_draws_follow_temperature_top_p_and_seed():
    """Draws have the probabilities of a softmax at that temperature, cut at top-p."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chances = (logits[0] / 0.7).softmax(-1)
    nucleus = torch.tensor([True, True, False, False]) * chances  # the first two hold more than 0.9
    assert chances[0] < 0.9 < chances[:2].sum()
    drawn = choose(logits.expand(4000, 4), Sampling(0.7, 0.9), [torch.Generator().manual_seed(i) for i in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, nucleus / nucleus.sum(), rtol=0, atol=4 * 0.5 / 4000**0.5)
    assert int(choose(logits, Sampling(), [None])) == 0
    one, two = (choose(logits.expand(8, 4), Sampling(2.0), [torch.Generator().manual_seed(3)] * 8) for _ in "ab")
    assert torch.equal(one, two) and len(one.unique()) > 1
