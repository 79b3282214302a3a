"""Comparisons with the oracle that need their own engine.

They cover head sizes, other kernels and dtypes, and `full`.
"""

import json
from collections import Counter

import pytest
import torch
from engine.driving import Job, serving, watched
from engine.judge import Judge
from engine.matrix import BUDGET, make_case
from engine.test_cartridges import unrotated
from engine.tiny_engine import generate, running, scores
from vllm import SamplingParams
from vllm.model_executor.models.llama import LlamaAttention

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.supported import HEAD_SIZES
from kvpop_vllm.testing import (
    DisturbedSums,
    OraclePolicy,
    assert_within_budget,
    eager_runs,
    margin_bound,
    random_prompt,
    write_tiny_model,
)

JOBS = [Job(1, new=70), Job(BUDGET), Job(150, new=40)]
"""Few requests, because tests/policies/test_product.py and tests/kernels cover the rules in pages."""


@pytest.mark.parametrize("size", [size for size in HEAD_SIZES if size != 32])
def test_head_sizes(tmp_path, size):
    """Every supported head size gives the oracle's results; all other tests use 32."""
    model = str(write_tiny_model(tmp_path / "model", "llama", head_dim=size))
    with serving(make_case(model, tmp_path / "scorer", "kvpop")) as engine:
        engine.chunk(7)
        engine.check(engine.serve(JOBS))


def test_gates_of_models_that_run_by_transformers(case):
    """Hidden states of transformers' modules have an axis more. Their queries are rotated before vLLM has them."""
    with serving(case("llama", "trimkv"), model_impl="transformers") as engine:
        engine.chunk(7)
        engine.check(engine.serve(JOBS))
    borrowing = case("llama", "dms-query")
    with pytest.raises(ConfigError, match="borrows a channel of the queries before RoPE, .* leave --model-impl out"):
        generate(borrowing.model, borrowing.settings, model_impl="transformers")


def test_gates_without_hidden_states_are_refused(case, monkeypatch):
    forward = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, positions, x: forward(self, positions, x))
    gated = case("llama", "trimkv")
    with pytest.raises(ConfigError, match="trimkv reads hidden states, which the modules around .* do not take"):
        generate(gated.model, gated.settings)


def test_reference_kernels(case, monkeypatch):
    monkeypatch.setattr(dispatch, "CPP_DTYPES", {})
    assert dispatch.select("decode_step", torch.empty(0)) == "reference"
    with serving(case("qwen3", "kvpop")) as engine:
        engine.chunk(7)
        engine.check(engine.serve([Job(1, new=24), Job(100, new=8)]))


def test_the_fast_kernels_run(case, monkeypatch):
    """Every layer uses the C++ kernels for the prompt and for each later token, and nothing else."""
    ran, find = Counter(), dispatch._implementation
    monkeypatch.setattr(dispatch, "_implementation", lambda op, impl: ran.update([(op, impl)]) or find(op, impl))
    with serving(case("qwen3", "kvpop")) as engine:
        engine.chunk(None)
        ran.clear()
        engine.check(engine.serve([Job(100, new=8)]))
    assert ran == {("prefill_chunk", "cpp"): 2, ("decode_step", "cpp"): 2 * 7}


def test_full_equals_stock(tiny_model):
    model, tokens = tiny_model("qwen3"), []
    jobs = [Job(n, scored=False) for n in (1, 17, 64, 130, 300)]
    for policy in (None, {"policy": "full"}):
        with watched(model, policy, Judge(model, OraclePolicy.full()), block_size=64) as engine:
            answers = engine.serve(jobs)
            tokens.append([answers[name].outputs[0].token_ids for name in sorted(answers)])
            if policy is not None:
                engine.check(answers)
    assert tokens[0] == tokens[1]


def test_cartridges_of_layers_without_rotation(tmp_path, monkeypatch):
    """Two cartridges in order give the log-probabilities of transformers in SmolLM3, whose last layer does not rotate."""
    from vllm.model_executor.models.transformers import base

    folder, cartridges, plain, past = unrotated(tmp_path)
    settings = {"policy": "streaming-llm", "budget": 256, "cartridge": dict(zip("ab", cartridges, strict=True))}
    prompt = random_prompt(30, seed=5)
    # vLLM compiles the class of transformers itself, which would not work outside engines any more.
    monkeypatch.setattr(base, "support_torch_compile", lambda *args, **kwargs: lambda cls: cls)
    params = SamplingParams(
        temperature=0, max_tokens=20, logprobs=0, detokenize=False, extra_args={"kv_cartridges": ["a", "b"]}
    )
    with running(folder, settings) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens, logprobs = zip(*scores(answer), strict=True)
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *tokens]]), past_key_values=past).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-3)


def test_windows_that_no_request_exceeds(tmp_path):
    """They are full attention: the same weights without windows give the same bits."""
    mistral, answers = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, []
    windows = {
        "all": {"sliding_window": 1024},
        "mixed": {"sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention"]},
        "none": {"sliding_window": None},
    }
    for name, changes in windows.items():
        folder = write_tiny_model(tmp_path / name, "llama")
        config = json.loads((folder / "config.json").read_text()) | mistral | changes
        (folder / "config.json").write_text(json.dumps(config))
        answers.append(generate(folder, {"policy": "h2o", "budget": 64}, max_model_len=1024))
    assert answers[0] == answers[1] == answers[2]


OWN_KEYS = [
    (policy, "bfloat16") for policy in ("kvpop", "kvpop-mlp", "streaming-llm", "l2norm", "tova", "h2o", "momentkv")
]
OWN_KEYS.append(("l2norm", "float32"))


@pytest.mark.parametrize("policy, dtype", OWN_KEYS)
def test_judged_on_its_own_keys(case, policy, dtype):
    """Each run is compared with the oracle on its own cached keys, because chunking changes bfloat16 keys."""
    matrix_case, ties = case("llama", policy), []
    with serving(matrix_case, dtype=dtype) as engine:
        for chunk in (1, 7, 64, None) if dtype == "float32" else (7, None):
            engine.chunk(chunk)
            for name in engine.serve([Job(1, new=205 // (chunk or 205) + 1), Job(BUDGET), Job(200)]):
                for layer, steps in engine.recorder.retained[name].items():
                    ties += _judge_layer(engine.recorder, matrix_case.judge.policy, name, layer, steps)
    print(f"{len(ties)} decisions, {sum(ties)} near-ties")
    assert len(ties) > 1000 and sum(ties) <= 1e-3 * len(ties)


def _judge_layer(recorder, policy, name, layer, steps) -> list[bool]:
    """Compare one layer with the oracle, from the queries, keys and values that reached it.

    Returns:
        One entry per decision, True for each near-tie.
    """
    tensors = [torch.cat(recorder.tensors[name, layer, part]) for part in ("query", "key", "value", "out")]
    query, key, value, out = (part.transpose(0, 1) for part in tensors)
    exact = policy.decide(layer, query.double(), key.double(), value.double())
    with DisturbedSums(0):
        low = policy.decide(layer, query.float(), key.float(), value.float(), forced=exact.visible)
    sets, margins, bound = exact.visible, exact.margins, margin_bound(low.scores, exact.scores)
    ties, exact_heads = [False] * int((margins < float("inf")).sum()), [*range(len(key))]
    for head in range(len(key)):
        before = 0
        for step in steps:
            if step.positions[head] != sets[head, step.tokens_seen - 1].nonzero().flatten().tolist():
                assert margins[head, before : step.tokens_seen].min() < bound, (
                    f"{name}, layer {layer}, head {head}, {step}"
                )
                ties.append(True)
                exact_heads.remove(head)
                break
            before = step.tokens_seen
    exact = policy.attend(query.double(), key.double(), value.double(), sets)
    eager = eager_runs(lambda: policy.attend(query.to(key.dtype), key, value, sets))
    group = len(query) // len(key)
    # a head with a near-tie sees other tokens
    rows = [head * group + i for head in exact_heads for i in range(group)]
    actual, exact, *eager = (
        x.unflatten(-1, (len(query), -1))[:, rows] for x in (out.transpose(0, 1).flatten(1), exact, *eager)
    )
    assert_within_budget(actual, exact, eager)
    return ties
