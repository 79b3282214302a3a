"""vLLM's engine on tiny models, in this process if VLLM_ENABLE_V1_MULTIPROCESSING is 0."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from threads import one_thread

from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 64, 300)]


def generate(model, policy: dict | None, *, tokens: int = 24, **options) -> list[list[tuple[int, float]]]:
    """Greedy tokens of :data:`PROMPTS` with their log-probabilities, after a start of its own.

    Args:
        model: folder. policy: contents of ``kv_policy``, None for a stock engine. options: of ``LLM``.
    """
    with running(model, policy, **options) as llm:
        return complete(llm, tokens)


@contextmanager
def running(model, policy: dict | None, **options) -> Iterator:
    """An engine, stopped at the end. Of equal requests it makes the same bits in every process: on one thread, eagerly."""
    with one_thread(), quick():
        llm = start(model, policy, **options)
        try:
            yield llm
        finally:
            stop(llm)


@contextmanager
def quick() -> Iterator[None]:
    """Without compiling the sampler's helpers, from which tiny models gain nothing, and without the collections of
    garbage that vLLM asks for, which take longer than all else of a start in a process with much in memory."""
    with torch._dynamo.config.patch(disable=True), mock.patch.object(gc, "collect", lambda *generation: 0):
        yield


def start(model, policy: dict | None, **options):
    """A float32, eager engine."""
    from vllm import LLM

    sizes = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={} if policy is None else {"kv_policy": policy},
        **(sizes | options),
    )


def stop(llm) -> None:
    """Now, rather than when the last reference goes: that would tear down what a later engine uses."""
    llm.llm_engine.engine_core.shutdown()


def complete(llm, tokens: int) -> list[list[tuple[int, float]]]:
    return [scores(answer) for answer in answers(llm, tokens)]


def answers(llm, tokens: int) -> list:
    """vLLM's greedy answers to :data:`PROMPTS`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)


def scores(answer) -> list[tuple[int, float]]:
    """Tokens of an answer with their log-probabilities."""
    out = answer.outputs[0]
    return [(token, chosen[token].logprob) for token, chosen in zip(out.token_ids, out.logprobs, strict=True)]


def backend(llm) -> type:
    """The attention backend class in use."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.attn_groups[0][0].backend
