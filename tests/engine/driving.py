"""Requests with names of their own, stepped by hand; and engines that are watched while they serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from engine.judge import Judge, Verdict
from engine.recorder import Recorder
from engine.tiny_engine import quick, start, stop
from threads import one_thread

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.testing import random_prompt

TOP_LOGPROBS = 3
BLOCK = 16
MOST_STEPS = 2000


@dataclass
class Job:
    """A greedy request: ``new`` tokens after ``length`` random ones, with log-probs of the prompt too if ``scored``."""

    length: int
    new: int = 12
    scored: bool = True


@dataclass
class Watched:
    """An engine of this process, its recorder, and the judge of its model and policy."""

    llm: object
    recorder: Recorder
    judge: Judge | None

    @property
    def engine(self):
        return self.llm.llm_engine

    def chunk(self, tokens: int | None) -> None:
        """Prompts from now on are cut into chunks of this many tokens; None leaves them whole."""
        self.recorder.scheduler.scheduler_config.long_prefill_token_threshold = tokens or 0

    def serve(self, jobs: list[Job], each_step: Callable[[int], None] | None = None) -> dict:
        """Steps until all are done; ``each_step(i)`` runs before step i. Returns finished answers by internal id."""
        self.recorder.clear()
        names = {}
        for i, job in enumerate(jobs):
            prompt = {"prompt_token_ids": random_prompt(job.length, seed=job.length)}
            names[str(i)] = self.engine.add_request(str(i), prompt, _parameters(job))
        answers, step = {}, 0
        while self.engine.has_unfinished_requests():
            if each_step is not None:
                each_step(step)
            for answer in self.engine.step():
                if answer.finished:
                    answers[names[answer.request_id]] = answer
            step += 1
            assert step < MOST_STEPS, "the engine does not come to an end"
        return answers

    def fill_pool(self, byte: int) -> None:
        """Overwrites the whole pool; 255 is NaN as a float and -1 as a position."""
        for cache in self.recorder.runner.kv_caches:
            cache.view(torch.uint8).fill_(byte)

    def verdict(self, answers: dict) -> Verdict:
        """Compares with the oracle; returns and prints what was compared."""
        held = {name: self.recorder.held[name] for name in answers}
        verdict = self.judge.check(answers, held)
        print(verdict)
        return verdict

    def check_blocks(self, state: int, *budgets: int) -> int:
        """Check that at every step each running request held ``state + cdiv(min(len, budget), BLOCK)`` blocks, ``len`` being what the
        scheduler had scheduled of it, or their mean over layers with several ``budgets``, rounded up, and that no block was
        shared or lost. Return the number of steps."""
        total = self.recorder.pool.num_gpu_blocks - 1  # one is never handed out
        for step in self.recorder.blocks:
            for tokens, blocks in step.running.values():
                pages = sum(state + cdiv(min(tokens, budget), BLOCK) for budget in budgets)
                assert len(blocks) == cdiv(pages, len(budgets)), f"after {tokens} tokens"
            held = [block for _, blocks in step.running.values() for block in blocks]
            assert len(set(held)) == len(held) == total - step.free
        return len(self.recorder.blocks)

    def chunks(self, name: str) -> list[int]:
        """Tokens of each step of one request."""
        return [held.new for held in self.recorder.held[name][0]]


def _parameters(job: Job):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=job.new,
        logprobs=TOP_LOGPROBS,
        prompt_logprobs=TOP_LOGPROBS if job.scored else None,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@contextmanager
def watched(model, policy: dict, judge: Judge | None = None, **options) -> Iterator[Watched]:
    """Starts an engine with small blocks, watches it, stops it."""
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 8 << 20}
    with one_thread(), pytest.MonkeyPatch.context() as patch, quick():
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = start(model, policy, **(sizes | options))
        torch._C.set_num_threads(1)
        recorder = Recorder(llm)
        recorder.attach(patch)
        try:
            yield Watched(llm, recorder, judge)
            if judge is not None:
                judge.check_near_ties()
        finally:
            stop(llm)
