"""Hundreds of requests that extend and fork each other, with options of their own, in small pools."""

import random

import pytest
from engine.driving import Job, Judges, serving
from policies.matrix import SHARES

MOST, LONGEST, TOGETHER, SAMPLED = 72, 100, 14, 25
SMALL = {"budget": 40, "protect_prompt": 20}
KVPOP = SMALL | {"window": 16, "topk": 20, "trained": ((16, 20), (8, 12))}
TIGHT = {"h2o": 1000, "snapkv": 1000}
"""Policy -> requests in the pool that holds the largest of them once; 150 otherwise."""
POLICIES = {
    "kvpop": ("qwen3", KVPOP),
    "h2o": ("qwen3", SMALL),
    "dms-query": ("llama", SMALL | {"window": 8, "topk": 28}),
    "momentkv": ("llama", SMALL),
    "vase": ("qwen3", SMALL),
    "triattention": ("qwen3", SMALL),
    "snapkv": ("qwen3", {"protect_prompt": True}),
    "adakv": ("qwen3", {"protect_prompt": True}),
    "kvpop, heads": ("qwen3", KVPOP | {"allocator": str(SHARES)}),
}


class Traffic:
    """Random requests: new prompts, turns after an earlier answer, and forks of earlier conversations."""

    def __init__(self, policy: str, seed: int):
        self.policy, self.draw = policy, random.Random(seed)
        self.histories: list[list[int]] = []

    def asks(self) -> dict | None:
        """Return random options of a request, as far as the policy takes them."""
        asks, draw = {}, self.draw
        if self.policy != "adakv" and draw.random() < 0.7:
            asks["kv_budget"] = draw.randint(30, MOST)
        if self.policy not in ("snapkv", "adakv") and draw.random() < 0.7:
            asks["kv_protect_prompt"] = draw.choice(("all", "all", 0, draw.randint(0, 130)))
        if self.policy == "vase" and draw.random() < 0.7:
            asks["kv_seed"] = draw.choice((3, 2**64 - 1))
        return asks or None

    def next(self) -> Job:
        draw = self.draw
        kind = draw.choice(("new", "turn", "turn", "fork", "same")) if self.histories else "new"
        prompt = [] if kind == "new" else list(draw.choice(self.histories[-10:]))
        if kind == "fork":
            prompt = prompt[: draw.randrange(len(prompt) + 1)]
        if kind != "same" or not prompt:
            prompt += [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        return Job(new=draw.randint(1, 24), prompt=prompt[:LONGEST], asks=self.asks(), scored=False)


def allowing(policy: str, settings: dict) -> dict:
    """Return settings with which requests may ask for what :class:`Traffic` asks for."""
    limits = {"max_budget": MOST} if policy != "adakv" else {}
    return settings | limits | ({} if policy in ("snapkv", "adakv") else {"max_protect": "all"})


@pytest.mark.parametrize("policy", ["kvpop", *(pytest.param(p, marks=pytest.mark.slow) for p in [*POLICIES][1:])])
def test_any_requests(case, policy):
    """No request waits for ever or holds more blocks than it was counted with, and nothing leaks.

    Some are aborted, some preempted, and some come after the prefix cache was emptied. The last ones are served
    from a pool that holds the largest of them once. A sample of the answers is compared with the oracle.
    """
    kind, options = POLICIES[policy]
    policy = policy.split(",")[0]
    matrix_case = case(kind, policy, **options)
    judges = Judges(policy, matrix_case)
    with serving(
        matrix_case._replace(settings=allowing(policy, matrix_case.settings)),
        max_model_len=128,
        num_gpu_blocks_override=57,
    ) as engine:
        recorder, traffic = engine.recorder, Traffic(policy, seed=11)
        most_blocks = engine.spec.most_blocks(128)
        assert most_blocks < 20
        wide = conversations(engine, traffic, judges, 250, most_blocks)
        with engine.small_pool(most_blocks):
            tight = conversations(engine, traffic, judges, TIGHT.get(policy, 150), most_blocks)
        for aborted, preempted, hit in (wide, tight):
            print(f"{aborted} aborted, {preempted} preemptions, {hit} tokens hit")
            assert aborted > 3 and preempted > 10 and hit > 100
        judges.check_near_ties()
        engine.engine.reset_prefix_cache()
        assert recorder.pool.get_num_free_blocks() == recorder.pool.num_gpu_blocks - 1
        assert all(block.block_hash is None for block in recorder.pool.blocks)


@pytest.mark.parametrize(
    "policy", ["kvpop", *(pytest.param(p, marks=pytest.mark.slow) for p in ("h2o", "snapkv", "adakv"))]
)
def test_requests_with_reserved_blocks_are_never_preempted(case, policy):
    """They hold from their first step on all blocks that they will ever hold; without, the same requests are preempted."""
    kind, options = POLICIES[policy]
    matrix_case = case(kind, policy, **options)
    preempted = {}
    for reserve in (False, True):
        judges, traffic = Judges(policy, matrix_case), Traffic(policy, seed=5)
        reserving = matrix_case._replace(settings=allowing(policy, matrix_case.settings) | {"reserve": reserve})
        with serving(reserving, max_model_len=128, num_gpu_blocks_override=57) as engine:
            assert engine.spec.reserve == reserve
            jobs = [traffic.next() for _ in range(30)]
            with engine.small_pool(2 * engine.spec.most_blocks(128)):
                engine.chunk(16)
                answers = engine.serve(jobs)
                engine.check_blocks()
            names = engine.recorder.preemptions
            preempted[reserve] = sum(names.values())
            for number, job in enumerate(jobs):
                name = engine.names[str(number)]
                assert len(answers[name].outputs[0].token_ids) == job.new
                if number % 3 == 0:
                    judges.of(job).check({name: answers[name]}, engine.recorder.retained)
            judges.check_near_ties()
    assert preempted[False] > 3 and preempted[True] == 0


def conversations(engine, traffic: Traffic, judges: Judges, requests: int, most_blocks: int) -> tuple[int, int, int]:
    """Serve this many requests, none of which may hold more than ``most_blocks`` blocks.

    Returns:
        Numbers of aborted requests, preemptions and tokens that were hit.
    """
    recorder, draw = engine.recorder, traffic.draw
    sent = finished = aborted = hit = preempted = step = 0
    sample, running, jobs = {}, {}, {}
    while sent < requests or running:
        while sent < requests and len(running) < TOGETHER and draw.random() < 0.7:
            jobs[str(sent)] = traffic.next()
            running[str(sent)] = engine.add(str(sent), jobs[str(sent)])
            sent += 1
        if running and draw.random() < 0.02:
            engine.engine.abort_request([draw.choice(sorted(running))])
        if step % 90 == 60 and not engine.withheld:
            engine.engine.reset_prefix_cache(reset_running_requests=True)
        engine.chunk(draw.choice((None, 7, 16, 33)))
        answers = engine.engine.step()
        engine.check_blocks()
        counts = [len(row) for state in recorder.blocks for *_, row in state.running.values()]
        assert max(counts, default=0) <= most_blocks
        recorder.blocks.clear()
        for answer in answers:
            if not answer.finished:
                continue
            name = running.pop(answer.request_id)
            preempted += recorder.preemptions.get(name, 0)
            if answer.outputs[0].finish_reason == "abort":
                aborted += 1
                recorder.forget(name)
                continue
            finished, hit = finished + 1, hit + answer.num_cached_tokens
            assert len(answer.outputs[0].token_ids) == jobs[answer.request_id].new
            traffic.histories.append([*answer.prompt_token_ids, *answer.outputs[0].token_ids])
            if finished % SAMPLED == 0:
                sample[name] = answer
            else:
                recorder.forget(name)
        for name in [key for key in running if key not in engine.engine.output_processor.external_req_ids]:
            aborted += 1
            recorder.forget(running.pop(name))
        step += 1
        assert step < 20_000
    assert finished + aborted == requests and sample
    for name, answer in sample.items():
        judges.of(jobs[answer.request_id]).check({name: answer}, recorder.retained)
    return aborted, preempted, hit
