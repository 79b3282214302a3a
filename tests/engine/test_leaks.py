"""Hundreds of conversations in one small pool, and the same requests with and without sharing."""

from __future__ import annotations

import random

import pytest
from engine.driving import Job, watched

from kvpop_vllm.testing import random_prompt

REQUESTS, TOGETHER, LONGEST, SAMPLED = 500, 14, 150, 25
TEXT = random_prompt(100, seed=97)


class Traffic:
    """Random requests: new prompts, turns after an earlier answer, and forks of earlier conversations."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.said: list[list[int]] = []

    def next(self) -> Job:
        draw = self.draw
        kind = draw.choice(("new", "turn", "turn", "fork", "same")) if self.said else "new"
        prompt = [] if kind == "new" else list(draw.choice(self.said[-30:]))
        if kind == "fork":
            prompt = prompt[: draw.randrange(len(prompt) + 1)]
        if kind != "same" or not prompt:
            prompt += [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        return Job(
            new=draw.randint(1, 24), prompt=prompt[-LONGEST:] if kind == "new" else prompt[:LONGEST], scored=False
        )


@pytest.mark.parametrize("policy, protect", [("kvpop", True), ("h2o", 33)])
def test_nothing_leaks(case, policy, protect):
    """Five hundred requests that extend and fork each other lose no block and leave none counted.

    Some are aborted, some preempted, and some come after the prefix cache was emptied. A sample of the
    answers is compared with the oracle.
    """
    found = case("qwen3", policy, protect_prompt=protect, budget=16)
    options = {"max_model_len": 256, "num_gpu_blocks_override": 56}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, found.settings, found.judge, **options) as engine:
        engine.poison(patch)
        traffic, recorder = Traffic(seed=11), engine.recorder
        sent = finished = aborted = hit = preempted = step = 0
        sample, running = {}, {}
        while sent < REQUESTS or running:
            while sent < REQUESTS and len(running) < TOGETHER and traffic.draw.random() < 0.7:
                running[str(sent)] = engine.add(str(sent), traffic.next())
                sent += 1
            if running and traffic.draw.random() < 0.04:
                name = traffic.draw.choice(sorted(running))
                engine.engine.abort_request([name])
                aborted += 1
            if step % 90 == 60:
                engine.engine.reset_prefix_cache(reset_running_requests=True)
            engine.chunk(traffic.draw.choice((None, 7, 16, 33)))
            for answer in engine.engine.step():
                if not answer.finished:
                    continue
                name = running.pop(answer.request_id)
                preempted += recorder.preemptions.get(name, 0)
                if answer.outputs[0].finish_reason == "abort":
                    recorder.forget(name)
                    continue
                finished, hit = finished + 1, hit + answer.num_cached_tokens
                traffic.said.append([*answer.prompt_token_ids, *answer.outputs[0].token_ids])
                if finished % SAMPLED == 0:
                    sample[name] = answer
                else:
                    recorder.forget(name)
            for name in [each for each in running if each not in engine.engine.output_processor.external_req_ids]:
                recorder.forget(running.pop(name))
            recorder.blocks.clear()
            step += 1
            assert step < 20_000
        print(f"{step} steps, {finished} finished, {aborted} aborted, {preempted} preemptions, {hit} tokens hit")
        assert finished + aborted >= REQUESTS and hit > 5 * REQUESTS and preempted > 10 and aborted > 10
        assert not engine.leaks()
        assert len(sample) >= finished // SAMPLED
        assert engine.verdict(sample).decisions > 100
        engine.engine.reset_prefix_cache()
        assert recorder.pool.get_num_free_blocks() == recorder.pool.num_gpu_blocks - 1
        assert all(block.block_hash is None for block in recorder.pool.blocks)


@pytest.mark.parametrize("policy, protect", [("kvpop", True), ("streaming-llm", 40)])
def test_the_same_without_sharing(case, policy, protect):
    """Without prefix caching the same tokens are retained and generated, up to rounding.

    Both runs are compared with the oracle.
    """
    forks = [TEXT[:70], TEXT[:33] + random_prompt(40, seed=2), TEXT[:20], TEXT[:65], TEXT[:65]]
    jobs, shown = [Job(new=30, prompt=prompt, scored=False) for prompt in forks], []
    found = case("qwen3", policy, protect_prompt=protect, budget=24)
    for sharing in (True, False):
        with watched(found.model, found.settings, found.judge, enable_prefix_caching=sharing) as engine:
            answers = engine.serve(jobs)
            engine.verdict(answers)
            assert any(answer.num_cached_tokens for answer in answers.values()) == sharing
            assert not engine.leaks()
            held = {answers[name].request_id: engine.recorder.held[name] for name in answers}
            shown.append(({a.request_id: a for a in answers.values()}, held))
    (shared, held), (alone, kept) = shown
    for name in shared:
        a, b = shared[name].outputs[0], alone[name].outputs[0]
        assert a.token_ids == b.token_ids
        for layer in held[name]:
            sets = {step.seen: step.positions for step in kept[name][layer]}
            assert all(sets[step.seen] == step.positions for step in held[name][layer] if step.seen in sets)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert all(abs(x[token].logprob - y[token].logprob) < 1e-4 for token in x.keys() & y.keys())
