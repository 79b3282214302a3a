"""Child processes of engines that take turns (harness.py): an engine of vLLM, and what a peer has in common with it.

Nothing of this repository is imported before the engine starts: peers have none of it, and another checkout may be
served.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

WARM_UP = 2
"""Steps of each turn that are not counted, because the processor's caches hold another process's data."""
FORCED = 1e6
"""Logit of a token that is forced, far above those of a model."""
LEAST_POOL = 8320
"""Tokens for which vLLM wants room: the demo model's 8,192 positions, and a block."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number of each dtype."""
SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils when it is heated, and it freezes when",
    "Once upon a time there was a miller who had three sons. When he died, the eldest got the mill,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # several pieces of a prefill
    " ".join(f"Line {i} of the list says that {i} plus {i} is {2 * i}." for i in range(30)),
)
LEAST_BUDGET, LONG_BUDGET = 128, 768
"""Smallest budgets that hold the tokens, prompt and answer, of all short prompts but the last, and of the last."""


def short_prompts(budget: int | str) -> tuple[str, ...]:
    """Return the short prompts that a budget in slots holds, with their answers: all of them if it is empty."""
    return SHORT_PROMPTS if budget == "" or budget >= LONG_BUDGET else SHORT_PROMPTS[:-1]


def token_bytes(model: str | Path, dtype: str) -> int:
    """Return the bytes of a token's keys and values in stock's cache of a dtype."""
    config = json.loads((Path(model) / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return BYTES[dtype] * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * width


class Child:
    """Process whose parent sends lines ``[method, arguments]`` and gets a line of JSON for each.

    Other output goes to the log.
    """

    def __init__(self):
        self.replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def serve(self) -> None:
        """Answer commands from standard input until it ends, and end the process without its teardown."""
        for line in sys.stdin:
            command, arguments = json.loads(line)
            self.reply(getattr(self, command)(**arguments))
        os._exit(0)

    def reply(self, reply) -> None:
        """Write a reply, or a line of progress."""
        print(json.dumps(reply), file=self.replies)

    @staticmethod
    def random_tokens(seed: int, length: int) -> list[int]:
        """Return random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(100, 40000) for _ in range(length)]

    def steps(self, requests: int, steps: int) -> dict:
        """Return milliseconds of each step in which all ``requests`` decode; the first few steps are not counted."""
        times = []
        for _ in range(WARM_UP + steps):
            begin = time.perf_counter()
            decoded = self.step()
            times.append(1e3 * (time.perf_counter() - begin))
            if decoded != requests:
                raise RuntimeError(f"{decoded} of {requests} requests decoded: a turn must hold all of them")
        return {"ms": times[WARM_UP:]}


def greedy(new: int, **options):
    """Return sampling parameters for ``new`` greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **options)


class EngineChild(Child):
    """Engine of vLLM in this process, whose methods are the commands of :class:`harness.Engine`."""

    def __init__(self, options: dict):
        super().__init__()
        self.options = argparse.Namespace(**options)
        self.forced: dict[str, list[int]] | None = None  # by a request's internal id

    def start(self) -> dict:
        """Start the engine; return the seconds that it took, the bytes of its KV pool, and whether the plugin is loaded."""
        begin, options = time.monotonic(), self.options
        from vllm import LLM

        import kvpop_vllm

        if not Path(kvpop_vllm.__file__).is_relative_to(options.checkout):
            raise RuntimeError(f"{kvpop_vllm.__file__} is served, which is not in {options.checkout}")
        self.llm = LLM(
            options.model,
            dtype=options.dtype,
            max_num_seqs=options.most_requests,
            kv_cache_memory_bytes=int(max(options.pool_tokens, LEAST_POOL) * token_bytes(options.model, options.dtype)),
            enable_prefix_caching=options.prefix_caching,
            enforce_eager=options.eager,
            load_format=options.load_format,
            additional_config={"kv_policy": options.policy} if options.policy else {},
            speculative_config={"method": "ngram", "num_speculative_tokens": options.drafts}
            if options.drafts
            else None,
        )
        self.engine = self.llm.llm_engine
        scheduler = self.engine.engine_core.engine_core.scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        pool_bytes = sum(tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors)
        self.block_bytes = pool_bytes // scheduler.kv_cache_config.num_blocks
        self.free = self.pool.get_num_free_blocks()
        seconds, plugin = time.monotonic() - begin, "kvpop_vllm.vllm_glue.plugin" in sys.modules
        return {"seconds": seconds, "pool_bytes": pool_bytes, "plugin": plugin}

    def short(self) -> list:
        """Return greedy tokens of short prompts.

        Each has its log-probability and its lead over the second.
        """
        answers = self.llm.generate(list(short_prompts(self.options.budget)), greedy(24, logprobs=2), use_tqdm=False)
        return [
            [self._token(*pair) for pair in zip(a.outputs[0].token_ids, a.outputs[0].logprobs, strict=True)]
            for a in answers
        ]

    @staticmethod
    def _token(token: int, candidates: dict) -> dict:
        first, second = sorted((c.logprob for c in candidates.values()), reverse=True)[:2]
        return {"token": token, "logprob": candidates[token].logprob, "gap": first - second}

    def prefill(self, lengths: list[int], new: int, shared: int = 0, texts: list[list[int]] | None = None) -> dict:
        """Prefill requests; return seconds and tokens until all of them decode.

        Args:
            lengths: tokens of each prompt, without those that are shared.
            new: tokens generated for each.
            shared: tokens of a system prompt, which is read before.
            texts: tokens that each request has and is forced to go on with, by default a random prompt and what
                follows.
        """
        system = self.random_tokens(0, shared)
        if system:
            self.llm.generate({"prompt_token_ids": system}, greedy(1), use_tqdm=False)
        if texts is None:
            self._add([[*system, *self.random_tokens(1 + i + 1000 * n, n)] for i, n in enumerate(lengths)], new)
        else:
            self._add([text[:n] for text, n in zip(texts, lengths, strict=True)], new)
            self._force(dict(zip(self.internal, texts, strict=True)))
        begin = reported = time.monotonic()
        while (decoding := self.step()) < len(lengths):
            if time.monotonic() - reported > 30:
                reported = time.monotonic()
                self.reply({"progress": f"{decoding} of {len(lengths)} prompts done after {reported - begin:.0f} s"})
        return {"seconds": time.monotonic() - begin, "tokens": sum(lengths)}

    def chat(self, turns: int, tokens: int, answer: int, seed: int) -> list[dict]:
        """Hold a conversation and measure its turns.

        Args:
            turns: number of turns.
            tokens: tokens that a turn adds.
            answer: tokens of these that are generated.
            seed: seed of the random tokens.

        Returns:
            For each turn the seconds from its request to its ``first`` and ``second`` token and of a decode ``step``
            after them (the median), ``hit``, the tokens of its prompt that were hit, and ``held_bytes``, the bytes of
            the KV cache that its request holds at its last step.
        """
        text, measured = [], []
        for turn in range(turns):
            text = [*text, *self.random_tokens(1000 * seed + turn, tokens - answer)]
            begin, times = time.perf_counter(), []
            self._add([text], answer)
            while self.engine.has_unfinished_requests():
                for reply in self.engine.step():
                    times += [time.perf_counter() - begin] * (len(reply.outputs[0].token_ids) - len(times))
                    generated, hit = reply.outputs[0].token_ids, reply.num_cached_tokens
                if self.engine.has_unfinished_requests():
                    held_bytes = self._held_bytes()
            steps = [after - before for before, after in itertools.pairwise(times[1:])]
            step = statistics.median(steps or times[:1])
            measured.append(
                {"first": times[0], "second": times[1], "step": step, "hit": hit or 0, "held_bytes": held_bytes}
            )
            text = [*text, *generated]
        return measured

    def _add(self, prompts: list[list[int]], new: int) -> None:
        """Add a request for each prompt, of which ``new`` tokens are generated."""
        self.request_ids = [f"{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
        self.internal = [
            self.engine.add_request(request, {"prompt_token_ids": tokens}, greedy(new))
            for request, tokens in zip(self.request_ids, prompts, strict=True)
        ]

    def _force(self, texts: dict[str, list[int]]) -> None:
        """Raise the logits of the tokens of texts above all others before tokens are sampled, by internal ids of requests.

        Drafts are then accepted as those of a model that writes these texts, whatever it attends to.
        """
        forces, self.forced = self.forced is not None, texts
        if forces:
            return
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        sample = runner._sample

        def forced(logits, drafted):
            batch, starts = runner.input_batch, runner.query_start_loc.np
            counts = [0] * len(batch.req_ids) if drafted is None else drafted.num_draft_tokens
            ends = batch.num_computed_tokens_cpu[: len(counts)] + starts[1 : len(counts) + 1] - starts[: len(counts)]
            tokens = [
                self.forced[name][end - count + i]
                for name, end, count in zip(batch.req_ids, ends.tolist(), counts, strict=True)
                for i in range(count + 1)
            ]
            logits[[*range(len(tokens))], tokens] = FORCED
            return sample(logits, drafted)

        runner._sample = forced

    def answer(self, requests: int, tokens: int) -> dict:
        """Run steps until each request has ``tokens`` more; the first few steps are not counted.

        Returns:
            Milliseconds of all steps, their number, and the tokens of all requests.
        """

        def step() -> dict[str, int]:
            lengths = {reply.request_id: len(reply.outputs[0].token_ids) for reply in self.engine.step()}
            if len(lengths) != requests:
                raise RuntimeError(f"{len(lengths)} of {requests} requests decoded: a turn must hold all of them")
            return lengths

        for _ in range(WARM_UP):
            lengths = step()
        before, steps, begin = lengths, 0, time.perf_counter()
        while min(length - before[name] for name, length in lengths.items()) < tokens:
            lengths, steps = step(), steps + 1
        seconds = time.perf_counter() - begin
        return {"ms": 1e3 * seconds, "steps": steps, "tokens": sum(lengths.values()) - sum(before.values())}

    def keep(self, requests: int) -> dict:
        """Continue with the first ``requests`` requests of the last ``prefill``.

        Return the bytes that they hold.
        """
        self.engine.abort_request(self.request_ids[requests:])
        self.request_ids = self.request_ids[:requests]
        return {"held_bytes": self._held_bytes()}

    def _held_bytes(self) -> int:
        """Return the bytes of the blocks that requests hold."""
        return (self.free - self.pool.get_num_free_blocks()) * self.block_bytes

    def step(self) -> int:
        """Run a step of the engine; return how many requests got a token."""
        return len(self.engine.step())

    def drain(self, requests: int, prompt: int, new: int, seed: int = 0) -> dict:
        """Run all requests at once until the last is done; return the times and the scheduler's counts.

        Each request has ``prompt`` random and ``new`` generated tokens. Prompts of two seeds differ.
        """
        scheduler, done, most_running, preempted = self.engine.engine_core.engine_core.scheduler, 0, 0, {}
        self._add([self.random_tokens(requests * seed + i, prompt) for i in range(requests)], new)
        begin, cpu_begin = time.monotonic(), time.process_time()
        generated, reported = 0, begin
        while self.engine.has_unfinished_requests():
            for answer in self.engine.step():
                done += answer.finished
                generated += len(answer.outputs[0].token_ids) if answer.finished else 0
            most_running = max(most_running, len(scheduler.running))
            preempted |= {r.request_id: r.num_preemptions for r in scheduler.requests.values()}
            if time.monotonic() - reported > 60:
                reported = time.monotonic()
                self.reply({"progress": f"{done} of {requests} requests done after {reported - begin:.0f} s"})
        if generated != requests * new:
            raise RuntimeError(f"{generated} tokens generated, not {requests} x {new}")
        times = {"seconds": time.monotonic() - begin, "cpu_seconds": time.process_time() - cpu_begin}
        return times | {"most_running": most_running, "preemptions": sum(preempted.values())}


if __name__ == "__main__":
    EngineChild(json.loads(sys.argv[1])).serve()
