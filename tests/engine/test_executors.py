"""Pipeline stages, data-parallel engines and asynchronous scheduling, compared with one engine of one rank."""

import asyncio
import functools
import re

import pytest
from engine.tiny_engine import PROMPTS, complete, running, scores
from policies.matrix import SHARES
from threads import core_for_each_of_two

pytestmark = pytest.mark.slow

NEW = 24
HEADS, LAYERS = {"allocator": str(SHARES)}, {"allocator": "pyramid"}
STAGED = [("streaming-llm", {}), ("kvpop", {}), ("kvpop", HEADS), ("h2o", LAYERS)]
"""Policies of pipeline stages, one with shares of heads and one with shares of layers."""


@pytest.fixture(scope="module")
def alone(case):
    """Return ``tokens(policy, **options)``, which returns the case of a policy and what one rank answers."""

    @functools.cache
    def answered(policy: str, **options):
        matrix_case = case("qwen3", policy, **options)
        with running(matrix_case.model, matrix_case.settings, block_size=16) as llm:
            return matrix_case, complete(llm, NEW)

    return answered


@pytest.fixture(autouse=True)
def a_core_for_each_of_two(monkeypatch):
    for name, value in core_for_each_of_two().items():
        monkeypatch.setenv(name, value)


def assert_equal(answers, alone) -> None:
    """Check that tokens are equal, and log-probabilities but for the order of sums."""
    for ours, one in zip(answers, alone, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in one]
        assert [score for _, score in ours] == pytest.approx([score for _, score in one], abs=1e-3)


@pytest.mark.parametrize("policy, options", STAGED)
def test_two_pipeline_stages_equal_one(alone, policy, options):
    """Each stage holds one of two layers, with that layer's scorers and the slots of its heads.

    vLLM on a CPU needs compiled stages (tests/test_refusals.py); tracing alone is enough.
    """
    matrix_case, one = alone(policy, **options)
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    stages |= {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    with running(matrix_case.model, matrix_case.settings, block_size=16, **stages) as llm:
        assert_equal(complete(llm, NEW), one)


def test_asynchronous_scheduling_changes_no_token(alone, request):
    """A step is scheduled before the one before has its token."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    matrix_case, one = alone("kvpop")
    request.getfixturevalue("asynchronous")  # not for the engine that it is compared with
    with running(matrix_case.model, matrix_case.settings, block_size=16, async_scheduling=True) as llm:
        core = llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler, AsyncScheduler) and core.batch_queue_size == 2
        assert_equal(complete(llm, NEW), one)


async def ask_both(engine) -> list:
    """Return the answers to all prompts, each asked of both engines."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = dict(temperature=0, max_tokens=NEW, logprobs=0, detokenize=False, ignore_eos=True)
    params = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)

    async def ask(number: int, rank: int):
        prompt = {"prompt_token_ids": PROMPTS[number]}
        name = f"{number} of {rank}"
        async for answer in engine.generate(prompt, params, name, data_parallel_rank=rank):
            if answer.finished:
                return scores(answer)

    return await asyncio.gather(*(ask(number, rank) for rank in range(2) for number in range(len(PROMPTS))))


def test_two_data_parallel_engines_answer_as_one(alone):
    """Each engine gives the tokens of one that is alone, and counts what its own caches held."""
    import prometheus_client
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    matrix_case, one = alone("kvpop")
    sizes = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    sizes |= {"block_size": 16, "enforce_eager": True, "skip_tokenizer_init": True, "data_parallel_size": 2}

    async def serve() -> list:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(matrix_case.model, additional_config={"kv_policy": matrix_case.settings}, **sizes)
        )
        try:
            return await ask_both(engine)
        finally:
            engine.shutdown()

    answers = asyncio.run(serve())
    assert_equal(answers[: len(PROMPTS)], one)
    assert_equal(answers[len(PROMPTS) :], one)
    counted = prometheus_client.generate_latest().decode()
    counts = re.findall(r'^vllm:kv_policy_tokens_seen_total{.*engine="(\d)".*} (\S+)$', counted, re.M)
    tokens = sum(len(prompt) + NEW - 1 for prompt in PROMPTS)
    assert {engine: float(number) for engine, number in counts} == {"0": tokens, "1": tokens}
