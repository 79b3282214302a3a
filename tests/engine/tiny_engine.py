"""vLLM's engine on tiny models, in this process."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from threads import one_thread

from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 64, 300)]


def generate(model, policy: dict | None, *, tokens: int = 24, **options) -> list[list[tuple[int, float]]]:
    """Start an engine and return greedy tokens of :data:`PROMPTS` with their log-probabilities.

    Args:
        model: folder of the model.
        policy: contents of ``kv_policy``, None for a stock engine.
        tokens: number of tokens to generate.
        options: options of ``LLM``.
    """
    with running(model, policy, **options) as llm:
        return complete(llm, tokens)


@contextmanager
def running(model, policy: dict | None, **options) -> Iterator:
    """Yield an engine that gives equal bits for equal requests in every process, and stop it at the end.

    It runs eagerly on one thread.
    """
    with one_thread(), quick():
        llm = start(model, policy, **options)
        try:
            yield llm
        finally:
            stop(llm)


@contextmanager
def quick() -> Iterator[None]:
    """Start engines faster: compile no helpers of the sampler, and collect no garbage.

    Tiny models gain nothing from compiled helpers. The collections that vLLM asks for would take longer than
    the rest of a start in a process with many objects. Classes of transformers that vLLM serves are left as they
    are: vLLM would mark them for compilation, and tests could not build models of them any more.
    """
    from vllm.model_executor.models.transformers import base

    with (
        torch._dynamo.config.patch(disable=True),
        mock.patch.object(gc, "collect", lambda *generation: 0),
        mock.patch.object(base, "support_torch_compile", lambda *args, **kwargs: lambda cls: cls),
    ):
        yield


def start(model, policy: dict | None, **options):
    """Return a float32 engine in this process, eager unless told otherwise."""
    from vllm import LLM
    from vllm.distributed import parallel_state

    # groups that an earlier engine has left, which has stopped or is alone in its groups too, may lack that of experts
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()
    sizes = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    additional = {} if policy is None else {"kv_policy": policy}
    options = sizes | {"enforce_eager": True} | options
    with mock.patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        return LLM(str(model), skip_tokenizer_init=True, additional_config=additional, **options)


def configure(model, policy: dict | None, **options):
    """Return an engine's config. vLLM inspects model classes in this process; it would start one of 10 s for each."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    additional = {} if policy is None else {"kv_policy": policy}
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "additional_config": additional} | options
    with mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
        return EngineArgs(str(model), **options).create_engine_config()


def stop(llm) -> None:
    """Stop an engine now; a shutdown at the last reference would tear down what a later engine uses."""
    llm.llm_engine.engine_core.shutdown()


def complete(llm, tokens: int) -> list[list[tuple[int, float]]]:
    return [scores(answer) for answer in answers(llm, tokens)]


def answers(llm, tokens: int) -> list:
    """Return vLLM's greedy answers to :data:`PROMPTS`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)


def scores(answer) -> list[tuple[int, float]]:
    """Return the tokens of an answer with their log-probabilities."""
    out = answer.outputs[0]
    return [(token, chosen[token].logprob) for token, chosen in zip(out.token_ids, out.logprobs, strict=True)]


def backend(llm) -> type:
    """Return the attention backend class in use."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.attn_groups[0][0].backend
