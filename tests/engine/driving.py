"""Named requests stepped by hand, and engines with a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

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
    """A request, greedy if it has one sample.

    Attributes:
        length: number of random prompt tokens, if ``prompt`` is None.
        new: number of tokens to generate.
        scored: True to ask for log-probabilities of the prompt; such a request hits no cached prefix.
        prompt: token ids of the prompt.
        salt: cache salt.
        priority: priority for the scheduler.
        samples: number of continuations; more than one are drawn at temperature 1.
        adapter: a ``LoRARequest``.
        asks: ``extra_args`` of the request for its cache.
    """

    length: int = 0
    new: int = 12
    scored: bool = True
    prompt: list[int] | None = None
    salt: str | None = None
    priority: int = 0
    samples: int = 1
    adapter: object = None
    asks: dict | None = None

    @property
    def tokens(self) -> list[int]:
        return random_prompt(self.length, seed=self.length) if self.prompt is None else self.prompt


@dataclass
class Watched:
    """An engine of this process, its recorder, and the judge of its model and policy."""

    llm: object
    recorder: Recorder
    judge: Judge | None
    names: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self):
        return self.llm.llm_engine

    def chunk(self, tokens: int | None) -> None:
        """Cut prompts into chunks of this many tokens from now on; None leaves them whole."""
        self.recorder.scheduler.scheduler_config.long_prefill_token_threshold = tokens or 0

    def add(self, name: str, job: Job) -> str:
        """Queue a request, also while others are served, and return its internal id."""
        prompt = {"prompt_token_ids": job.tokens} | ({"cache_salt": job.salt} if job.salt else {})
        told = {"priority": job.priority, "lora_request": job.adapter}
        self.names[name] = self.engine.add_request(name, prompt, _parameters(job), **told)
        return self.names[name]

    def serve(self, jobs: list[Job], each_step: Callable[[int], None] | None = None) -> dict:
        """Run steps until all requests have finished, and return the answers by internal id.

        ``each_step(i)`` runs before step i. Each of several samples has its own entry.
        """
        self.recorder.clear()
        self.names.clear()
        for i, job in enumerate(jobs):
            self.add(str(i), job)
        answers, step = {}, 0
        while self.engine.has_unfinished_requests():
            if each_step is not None:
                each_step(step)
            for answer in self.engine.step():
                if answer.finished:
                    answers |= _each_sample(self.names[answer.request_id], answer)
            step += 1
            assert step < MOST_STEPS, "the engine does not come to an end"
        return answers

    def fill_pool(self, byte: int) -> None:
        """Overwrite the whole pool; 255 is NaN as a float and -1 as a position."""
        for cache in self.recorder.runner.kv_caches:
            cache.view(torch.uint8).fill_(byte)

    def poison(self, patch) -> None:
        """Overwrite blocks with 255 when they are freed or handed out, until ``patch`` is undone.

        A freed block that is kept for prefix hits stays as it is.
        """
        pool = self.recorder.pool
        free, get = pool.free_blocks, pool.get_new_blocks

        def spoil(blocks):
            at = torch.tensor([block.block_id for block in blocks], dtype=torch.int64)
            for cache in self.recorder.runner.kv_caches if len(at) else ():
                cache.view(torch.uint8)[at] = 255

        def poisoning_free(blocks):
            blocks = list(blocks)
            free(blocks)
            spoil([block for block in blocks if block.ref_cnt == 0 and block.block_hash is None and not block.is_null])

        def poisoning_get(number):
            blocks = get(number)
            spoil(blocks)
            return blocks

        patch.setattr(pool, "free_blocks", poisoning_free)
        patch.setattr(pool, "get_new_blocks", poisoning_get)

    def leaks(self) -> list[str]:
        """Return what is still held although nothing runs."""
        pool, manager = self.recorder.pool, self.recorder.manager
        held = [block.block_id for block in pool.blocks if block.ref_cnt != 0 and not block.is_null]
        found = {"blocks": held, "requests": list(manager.req_to_blocks), "counts": list(manager.num_cached_block)}
        found |= {
            "asked": list(getattr(manager, "requests", ())),
            "lost": range(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1),
        }
        return [f"{what}: {list(which)}" for what, which in found.items() if len(which)]

    def verdict(self, answers: dict) -> Verdict:
        """Compare answers with the oracle, and print and return the verdict."""
        held = {name: self.recorder.held[name] for name in answers}
        verdict = self.judge.check(answers, held)
        print(verdict)
        return verdict

    def check_blocks(self, state: int, *budgets: int, sinks: int = 0) -> int:
        """Check the blocks of all running requests at every step, and return the number of steps.

        Every request must hold the blocks of its protected tokens. With more tokens it must hold further
        ``state + cdiv(min(len, budget), BLOCK)`` blocks, where ``len`` counts the tokens scheduled behind the
        protected ones. With several budgets this is the mean over the layers, rounded up. No such block may
        be shared, and no block may be lost.

        Args:
            state: state blocks of a request.
            budgets: one budget, or one per layer.
            sinks: subtracted from the budgets where tokens are protected.
        """
        total = self.recorder.pool.num_gpu_blocks - 1  # vLLM never hands out the null block
        for step in self.recorder.blocks:
            own, shared = [], set()
            for name, (tokens, blocks) in step.running.items():
                protected = step.protected[name]
                prefix, rest = cdiv(min(tokens, protected), BLOCK), tokens - protected
                asked = (step.budgets[name],) if name in step.budgets else budgets
                tails = [budget - (sinks if protected else 0) for budget in asked]
                pages = sum(state + cdiv(min(rest, tail), BLOCK) for tail in tails) if rest > 0 else 0
                assert len(blocks) == prefix + cdiv(pages, len(budgets)), (
                    f"after {tokens} tokens, {protected} protected"
                )
                full = protected // BLOCK
                own += blocks[min(full, prefix) :]
                shared |= set(blocks[: min(full, prefix)])
            assert len(set(own)) == len(own) and not shared & set(own)
            assert len(own) + len(shared) == total - step.free
        return len(self.recorder.blocks)

    def chunks(self, name: str) -> list[int]:
        """Return the number of tokens in each step of one request."""
        return [held.new for held in self.recorder.held[name][0]]


def _each_sample(name: str, answer) -> dict:
    """Return an answer by its internal id, or one entry for each of several samples."""
    if len(answer.outputs) == 1:
        return {name: answer}
    told = {"request_id": name, "prompt_token_ids": answer.prompt_token_ids, "prompt_logprobs": None, "sampled": True}
    return {f"{out.index}_{name}": SimpleNamespace(**told, outputs=[out]) for out in answer.outputs}


def _parameters(job: Job):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0 if job.samples == 1 else 1.0,
        n=job.samples,
        seed=None if job.samples == 1 else 5,
        max_tokens=job.new,
        logprobs=TOP_LOGPROBS,
        prompt_logprobs=TOP_LOGPROBS if job.scored else None,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=job.asks,
    )


@contextmanager
def watched(model, policy: dict, judge: Judge | None = None, **options) -> Iterator[Watched]:
    """Start an engine with small blocks, yield it with a recorder, and stop it."""
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
