"""Two tensor-parallel ranks, each with half of the KV heads and scorers, compared with one rank."""

import os

import pytest
from engine.matrix import BUDGET
from engine.test_cartridges import SLOTS, write
from engine.test_inspector import core, recorded
from engine.tiny_engine import answers, complete, running, scores
from policies.matrix import MILD_SHARES, SHARES

from kvpop_vllm.cache.ranks import heads_of_rank
from kvpop_vllm.testing import random_prompt


@pytest.mark.parametrize(
    "total, ranks, first",
    [(8, 1, [0]), (8, 2, [0, 4]), (8, 8, [*range(8)]), (2, 4, [0, 0, 1, 1]), (1, 2, [0, 0]), (3, 3, [0, 1, 2])],
)
def test_heads_of_each_rank(total, ranks, first):
    """Heads are placed like vLLM's: in order, and replicated if there are more ranks than heads."""
    heads = max(1, total // ranks)
    slices = [heads_of_rank(rank, ranks, total, heads) for rank in range(ranks)]
    assert slices == [slice(start, start + heads) for start in first]


HEADS = {"allocator": str(SHARES)}
"""Shares of heads: of two ranks one has 2.45 and the other 1.57 of 4 parts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, options",
    [
        ("kvpop", {}),
        ("trimkv", {"allocator": "pyramid"}),
        ("kvpop", HEADS | {"protect_prompt": True}),
        ("vase", {}),
        ("triattention", {"allocator": str(MILD_SHARES)}),
        ("snapkv", {"window": 24}),  # with 16 two tokens have the same votes but for rounding
        ("attention-matching", {}),
        ("streaming-llm", {}),
        ("h2o", {"correction": "moment"}),
        ("dms-query", {}),
    ],
)
def test_two_ranks_equal_one(case, monkeypatch, policy, options):
    """Two ranks give the tokens of one rank.

    The second case has gates and pages of layers with unequal budgets. In the third, repeated prompts are
    hit. The fourth draws by the head of the whole model. The fifth has statistics of all heads. In the third and the
    fifth the heads of each layer have unequal shares, so that the ranks need different numbers of slots. The next two
    compress prompts. The last three have no state, attention masses with moments, and a channel of the queries.
    """
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    matrix_case = case("qwen3", policy, **options)
    with running(matrix_case.model, matrix_case.settings, block_size=16) as llm:
        one = complete(llm, 24)
    with running(
        matrix_case.model,
        matrix_case.settings,
        block_size=16,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as llm:
        two = [*answers(llm, 24), *answers(llm, 24)]
    hit = [answer.num_cached_tokens for answer in two]
    stored = {"snapkv": 32, "attention-matching": BUDGET // 4}  # queries
    computed = 1 if "protect_prompt" in options else stored.get(policy, 10**6)  # tokens at the end, at least
    assert hit == [0] * 4 + [max(0, len(a.prompt_token_ids) - computed) // 16 * 16 for a in two[:4]]
    for alone, together in zip(one * 2, map(scores, two), strict=True):
        assert [token for token, _ in together] == [token for token, _ in alone]
        assert [score for _, score in together] == pytest.approx([score for _, score in alone], abs=1e-3)


@pytest.mark.slow
def test_two_ranks_with_cartridges_equal_one(case, tmp_path, monkeypatch):
    """Each rank holds the slots of its heads, and copies after other cartridges."""
    from vllm import SamplingParams

    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    matrix_case, tokens = case("qwen3", "kvpop"), []
    folders = [f"{name}={write(tmp_path / name, matrix_case.model, name)}" for name in SLOTS]
    for ranks in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}):
        with running(matrix_case.model, matrix_case.settings | {"cartridge": folders}, block_size=16, **ranks) as llm:
            options = dict(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
            named = [{"kv_cartridges": names} for names in (["biased"], ["plain", "later"])]
            params = [SamplingParams(**options, extra_args=asks) for asks in named]
            prompts = [{"prompt_token_ids": random_prompt(50, seed=i)} for i in range(2)]
            tokens.append([a.outputs[0].token_ids for a in llm.generate(prompts, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_the_inspect_page_joins_ranks(case, monkeypatch):
    """Two ranks give the record of one; draws differ by the head of the whole model, and do not depend on rounding."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    from vllm import SamplingParams

    matrix_case = case("qwen3", "random")
    settings, records = matrix_case.settings | {"inspect": True, "protect_prompt": 0}, []
    for ranks in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}):
        with running(matrix_case.model, settings, block_size=16, **ranks) as llm:
            params = SamplingParams(temperature=0, max_tokens=30, detokenize=False, ignore_eos=True)
            llm.generate({"prompt_token_ids": random_prompt(100, seed=1)}, params, use_tqdm=False)
            (name,) = [request["id"] for request in core(llm).kvpop_inspect()["requests"]]
            records.append(recorded(llm, name)[0])
    one, two = records
    assert one.shape == (2, 2, 129) and (one[:, 0] != one[:, 1]).any(1).all()
    assert (one == two).all()
