"""Sampler of conversations for `kvpop compact --method cartridge` that runs vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvpop_vllm.cache.accounting import dense_request_bytes
from kvpop_vllm.compaction.conversations import ROUND, TEMPERATURE, TOP, Answer
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.vllm_glue.extras.evaluation import SPARE_BYTES


@contextmanager
def engine_sampler(model: str, dtype: str, longest: int, stop: set[int]) -> Iterator[EngineSampler]:
    """Start a dense engine that shares the prefix of a round's requests.

    Args:
        model: folder of the model.
        dtype: dtype of weights and cache.
        longest: most tokens of a request, answer included.
        stop: ids that end an answer.
    """
    from vllm import LLM

    shape = ModelShape.of(model, longest)
    request = dense_request_bytes(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, getattr(torch, dtype), longest, 128
    )
    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=ROUND,
        kv_cache_memory_bytes=(ROUND + 1) * request.allocated + SPARE_BYTES,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_logprobs=TOP,
        skip_tokenizer_init=True,
    )
    try:
        yield EngineSampler(llm, stop)
    finally:
        llm.llm_engine.engine_core.shutdown()


class EngineSampler:
    """Sampler on one engine; see :class:`kvpop_vllm.compaction.conversations.Sampler`.

    Args:
        llm: the engine.
        stop: ids that end an answer.
    """

    def __init__(self, llm, stop: set[int]):
        self.llm, self.stop = llm, stop

    def __call__(self, prefix, prompts, new, seeds) -> list[Answer]:
        """Return an answer to each prompt, with the log-probabilities that the engine gives."""
        from vllm import SamplingParams

        shared = {"temperature": TEMPERATURE, "max_tokens": new, "logprobs": TOP, "detokenize": False}
        shared |= {"stop_token_ids": sorted(self.stop), "ignore_eos": True}
        options = [SamplingParams(seed=seed, **shared) for seed in seeds]
        requests = [{"prompt_token_ids": [*prefix, *prompt]} for prompt in prompts]
        answers = []
        for found in self.llm.generate(requests, options, use_tqdm=False):
            own = found.outputs[0]
            rows = [{token: entry.logprob for token, entry in row.items()} for row in own.logprobs]
            logp = [[round(value, 5) for value in row.values()] for row in rows]
            answers.append(Answer(list(own.token_ids), [list(row) for row in rows], logp))
        return answers
