"""Sampler of conversations for `kvpop compact --method cartridge` that runs vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvpop_vllm.compaction.conversations import ROUND, TEMPERATURE, TOP, Answer
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.vllm_glue.extras.evaluation import start_engine


@contextmanager
def engine_sampler(model: str, dtype: str, longest: int, stop: set[int]) -> Iterator[EngineSampler]:
    """Start a dense engine that shares the prefix of a round's requests.

    Args:
        model: folder of the model.
        dtype: dtype of weights and cache.
        longest: most tokens of a request, answer included.
        stop: ids that end an answer.
    """
    shape, options = ModelShape.of(model, longest), {"enable_prefix_caching": True, "max_logprobs": TOP}
    llm = start_engine(model, shape, getattr(torch, dtype), longest, ROUND, **options)
    try:
        yield EngineSampler(llm, stop)
    finally:
        llm.llm_engine.engine_core.shutdown()


class EngineSampler:
    """Sampler on one engine. See :class:`kvpop_vllm.compaction.conversations.Sampler`.

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
        for output in self.llm.generate(requests, options, use_tqdm=False):
            completion = output.outputs[0]
            rows = [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs]
            logp = [[round(value, 5) for value in row.values()] for row in rows]
            answers.append(Answer(list(completion.token_ids), [list(row) for row in rows], logp))
        return answers
