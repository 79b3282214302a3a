"""Named requests stepped by hand, and engines with a recorder."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from engine.judge import MOST_NEAR_TIES, Judge
from engine.matrix import Case
from engine.recorder import Recorder
from engine.tiny_engine import quick, start, stop
from policies.matrix import allocated
from threads import one_thread

from kvpop_vllm.cache.pages import cdiv
from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run import draft_pauses

TOP_LOGPROBS = 3
BLOCK = 16
VOTERS = 32
"""Number of queries at the end of a prompt that vote, in the tests of policies that compress prompts."""
MOST_STEPS = 2000


@dataclass
class Job:
    """A request, greedy unless it has several samples or a temperature.

    Attributes:
        length: number of random prompt tokens, if ``prompt`` is None.
        new: number of tokens to generate.
        scored: True to ask for log-probabilities of the prompt; such a request hits no cached prefix.
        prompt: token ids of the prompt.
        salt: cache salt.
        priority: priority for the scheduler.
        samples: number of continuations; more than one are drawn at temperature 1.
        temperature: temperature of the one sample.
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
    temperature: float = 0.0
    adapter: object = None
    asks: dict | None = None

    @property
    def seed(self) -> int | None:
        """Seed of the sampling parameters, which draws of evictions follow too."""
        return 5 if self.samples > 1 or self.temperature else None

    @property
    def tokens(self) -> list[int]:
        return random_prompt(self.length, seed=self.length) if self.prompt is None else self.prompt


@dataclass
class Watched:
    """An engine of this process, its recorder, and the judge of its model and policy.

    Attributes:
        withheld: blocks that :meth:`small_pool` keeps from requests.
        poisons: False suspends :meth:`poison`.
        shares: False without a prefix cache.
    """

    llm: object
    recorder: Recorder
    judge: Judge | None
    withheld: int = 0
    poisons: bool = True
    shares: bool = True
    names: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self):
        return self.llm.llm_engine

    @property
    def spec(self):
        """The cache spec, whose counts of blocks tests/cache compares with plain counts."""
        return self.recorder.manager.kv_cache_spec

    @property
    def votes(self) -> bool:
        """True if prompts are held until their end and then compressed."""
        return self.spec.compression is not None

    def chunk(self, tokens: int | None) -> None:
        """Cut prompts into chunks of this many tokens from now on; None leaves them whole."""
        self.recorder.scheduler.scheduler_config.long_prefill_token_threshold = tokens or 0

    def add(self, name: str, job: Job) -> str:
        """Queue a request, also while others are served, and return its internal id."""
        prompt = {"prompt_token_ids": job.tokens} | ({"cache_salt": job.salt} if job.salt else {})
        options = {"priority": job.priority, "lora_request": job.adapter}
        self.names[name] = self.engine.add_request(name, prompt, _parameters(job), **options)
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
        for i, job in enumerate(jobs):
            if job.temperature:
                answers[self.names[str(i)]].sampled = True
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
            ids = torch.tensor([block.block_id for block in blocks], dtype=torch.int64)
            for cache in self.recorder.runner.kv_caches if len(ids) and self.poisons else ():
                cache.view(torch.uint8)[ids] = 255

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
        used = [block.block_id for block in pool.blocks if block.ref_cnt != 0 and not block.is_null]
        leaked = {"blocks": used, "requests": list(manager.req_to_blocks), "counts": list(manager.num_cached_block)}
        leaked |= {
            "asked": list(getattr(manager, "requests", ())),
            "bounds": list(getattr(manager, "bounds", ())),
            "lost": range(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1),
        }
        return [f"{kind}: {list(leftovers)}" for kind, leftovers in leaked.items() if len(leftovers)]

    def check(self, answers: dict, judge: Judge | None = None) -> None:
        """Compare answers with the oracle, and check the blocks of all requests at every step."""
        (judge or self.judge).check(answers, self.recorder.retained)
        self.check_blocks()

    def check_blocks(self) -> None:
        """Check the blocks of all running requests at every step.

        A request holds the blocks that the spec counts. A prompt that votes is held until the step after its
        end, on a GPU one more, and nothing of it afterwards. No block of a tail is shared, and none is lost.
        """
        total = self.recorder.pool.num_gpu_blocks - 1 - self.withheld  # vLLM never hands out the null block
        late, cuts = Counter(), self.spec.drafts if self.spec.rounds or draft_pauses.LONGEST else 0
        for step in self.recorder.blocks:
            unshared, shared = [], set()
            for name, (tokens, last, (protected, *sizes), row) in step.running.items():
                counted = last if self.spec.reserve else tokens
                # drafts that a round or a pause cuts had blocks
                counts = {
                    self.spec.blocks(counted + cut, self.spec.slots(protected, *sizes)) for cut in range(cuts + 1)
                }
                assert len(row) in counts, f"{tokens} tokens, {protected} protected"
                prefix, full = cdiv(min(tokens, protected), BLOCK), min(tokens, protected) // BLOCK
                if self.votes and tokens > protected and row[0] == 0:
                    dropped = {
                        column
                        for part in self.spec.dropped(self.spec.slots(protected, *sizes))
                        for column in range(*part)
                    }
                    assert not any(row[column] for column in dropped) and dropped >= set(range(prefix))
                    row, full = [block for column, block in enumerate(row) if column not in dropped], 0
                elif self.votes and tokens > protected + self.spec.late:  # a resumed chunk may hold the prompt's end
                    late[name] += 1
                unshared += row[full:]
                shared |= set(row[:full])
            assert len(set(unshared)) == len(unshared) and 0 not in unshared and not shared & set(unshared)
            assert len(unshared) + len(shared) == total - step.free
        assert all(often <= self.recorder.preemptions[name] for name, often in late.items()), "held for too long"

    @contextmanager
    def small_pool(self, blocks: int) -> Iterator[None]:
        """Leave only this many blocks to requests."""
        pool = self.recorder.pool
        withheld = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
        self.withheld = len(withheld)
        try:
            yield
        finally:
            self.withheld = 0
            pool.free_blocks(withheld)

    def chunks(self, name: str) -> list[int]:
        """Return the number of tokens in each step of one request."""
        return [step.new for step in self.recorder.retained[name][0]]


def _each_sample(name: str, answer) -> dict:
    """Return an answer by its internal id, or one entry for each of several samples."""
    if len(answer.outputs) == 1:
        return {name: answer}
    fields = {"request_id": name, "prompt_token_ids": answer.prompt_token_ids, "prompt_logprobs": None, "sampled": True}
    return {f"{out.index}_{name}": SimpleNamespace(**fields, outputs=[out]) for out in answer.outputs}


def _parameters(job: Job):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=job.temperature if job.samples == 1 else 1.0,
        n=job.samples,
        seed=job.seed,
        max_tokens=job.new,
        logprobs=TOP_LOGPROBS,
        prompt_logprobs=TOP_LOGPROBS if job.scored else None,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=job.asks,
    )


def preempt_all(scheduler) -> None:
    """Preempt all running requests as vLLM does, but keep the prefix cache."""
    while scheduler.running:
        request = scheduler.running.pop()
        scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()


@contextmanager
def serving(case: Case, poisoned: bool = True, **options) -> Iterator[Watched]:
    """Yield a watched engine of a case whose freed blocks are overwritten, and check that it leaks nothing."""
    with pytest.MonkeyPatch.context() as patch, watched(case.model, case.settings, case.judge, **options) as engine:
        if poisoned:
            engine.poison(patch)
        yield engine
        assert not engine.leaks()


@contextmanager
def watched(model, policy: dict, judge: Judge | None = None, **options) -> Iterator[Watched]:
    """Start an engine with small blocks, yield it with a recorder, and stop it; ``enforce_eager`` is True unless given."""
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 8 << 20}
    starting = quick() if options.get("enforce_eager", True) else nullcontext()
    with one_thread(), pytest.MonkeyPatch.context() as patch, starting:
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


class Judges:
    """One judge for each set of options that requests ask for."""

    def __init__(self, policy: str, case: Case):
        self.policy, self.case, self.by_options = policy, case, {}

    def window(self, budget: int) -> int:
        """Return w of a request's budget, by the policies' definitions."""
        if self.policy == "h2o":
            return budget // 2
        if self.policy == "kvpop":
            return 16 if budget - self.case.judge.policy.sinks >= 36 else 8
        return self.case.judge.policy.window

    def of(self, job: Job) -> Judge:
        """Return the judge of a request, by its options and by the seed that its draws follow."""
        asks = job.asks or {}
        key = job.seed, *sorted(asks.items())
        if key not in self.by_options:
            plain = self.case.judge.policy
            budget = asks.get("kv_budget", plain.budget)
            policy = replace(plain, seeds=(0, asks.get("kv_seed", job.seed or 0)))
            if "kv_budget" in asks:
                window = self.window(budget)
                policy = replace(policy, window=window, topk=budget - policy.sinks - window)
                policy = allocated(policy, self.case.allocator)
            protect = asks.get("kv_protect_prompt", self.case.judge.protect)
            self.by_options[key] = Judge(self.case.model, policy, protect=True if protect == "all" else protect)
        return self.by_options[key]

    def check_near_ties(self) -> None:
        """Raise AssertionError if there is more than one near-tie and more than MOST_NEAR_TIES of all decisions."""
        near = sum(judge.near_ties for judge in self.by_options.values())
        assert near <= max(1, MOST_NEAR_TIES * sum(judge.decisions for judge in self.by_options.values()))
