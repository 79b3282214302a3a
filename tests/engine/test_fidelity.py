"""The engine equals the naive oracle: retained tokens at every step, log-probabilities, greedy tokens.

One engine for each kind of plumbing, with options of scorers, protected prompts and the GPU's metadata builder
spread over them. tests/policies/test_product.py proves the rules of all policies.
"""

from dataclasses import replace

import pytest
from engine.driving import BLOCK, VOTERS, Job, preempt_all, serving
from engine.matrix import BUDGET

from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetBackend
from kvpop_vllm.vllm_glue.run.cuda_backend import CudaMetadataBuilder

STEPS = {"decay_step": 4, "decay_min": 0.9, "decay_max": 0.99}
EVERY = {"norm": True, "skip": True, "feature_map": "softmax", "gate_softcap": 2.0, "v_proj": False}
ALL, MOMENT, PYRAMID = {"protect_prompt": True}, {"correction": "moment"}, {"allocator": "pyramid"}
QUICK = {
    "stateless": ("qwen3", "kvpop-linear", {"sinks": 0} | STEPS),
    "state, protected, GPU": ("qwen3", "kvpop", EVERY | ALL),
    "gate": ("llama", "dms-query", {"shifted": True}),
    "prompt phase": ("qwen3", "snapkv", ALL),
    "fixed shares, protected": ("llama", "h2o-pyramid", {"protect_prompt": 2 * BLOCK}),
    "divided shares": ("qwen3", "adakv", ALL | {"budget": 64}),  # unequal heads take one block more than equal ones
    "rounds": ("qwen3", "vase", MOMENT),
    "moments": ("llama", "momentkv", {}),
}
SLOW = {
    "state, GPU": ("llama", "kvpop", {"delayed": False} | MOMENT),
    "state, fixed shares, GPU": ("qwen3", "kvpop", STEPS | PYRAMID),
    "gate, fixed shares, GPU": ("llama", "dms", {"shifted": True} | PYRAMID),
    "gate without sinks, protected": ("qwen3", "trimkv", {"sinks": 0, "window": 1, "topk": BUDGET - 1, "protect_prompt": 33}),
    "gate, moments": ("qwen3", "trimkv-kv", MOMENT),
    "gate, narrow": ("qwen3", "dms", {"shifted": True, "sinks": 0, "window": 2, "topk": BUDGET - 2}),
    "query channel, protected": ("llama", "dms-query", ALL),
    "fixed shares, moments, GPU": ("qwen3", "streaming-llm", PYRAMID | MOMENT),
    "fixed shares, protected, GPU": ("llama", "streaming-llm", PYRAMID | {"protect_prompt": 17}),
    "prompt phase, fixed shares, GPU": ("llama", "pyramidkv", ALL),
    "divided shares, GPU": ("qwen3", "adakv", ALL | {"budget": 64}),
    "rounds, fixed shares": ("qwen3", "rkv", PYRAMID),
    "rounds, protected, GPU": ("llama", "vase", ALL),
    "rounds, statistics": ("qwen3", "triattention", {}),
    "rounds, statistics, protected": ("llama", "triattention", {"protect_prompt": 33}),
    "moments, protected": ("llama", "momentkv", {"protect_prompt": 40}),
    "mass, moments": ("qwen3", "tova", MOMENT | {"sinks": 1, "window": 4}),
    "mass, other roles": ("qwen3", "h2o", {"sinks": 4, "window": 20}),
    "draws, protected": ("qwen3", "random", ALL),
    "state, protected, no sharing": ("llama", "kvpop", ALL),
}  # fmt: skip
"""Name -> kind of model, policy, and options of the case. "GPU" asks for the GPU's metadata builder, "no sharing" for no prefix cache."""
CASES = QUICK | SLOW
TEXT = random_prompt(300, seed=98)
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, VOTERS - 1, VOTERS, VOTERS + 1]
LENGTHS += [BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET, 2 * BUDGET, 130, 200, 200]
"""Around the borders of blocks, voting queries and budget. The oracle follows equal requests once."""


@pytest.fixture(scope="module", params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def served(request, case):
    """Yield an engine of one case with room for all requests."""
    kind, policy, options = CASES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        on_gpu = request.param.endswith("GPU")
        if on_gpu:
            patch.setattr(FixedBudgetBackend, "get_builder_cls", staticmethod(lambda: CudaMetadataBuilder))
            patch.setattr(FixedBudgetBackend, "late", True)
        matrix_case = case(kind, policy, **options)
        shares = not request.param.endswith("no sharing")
        options = {"num_gpu_blocks_override": 241} | ({} if shares else {"enable_prefix_caching": False})
        with serving(matrix_case, poisoned=matrix_case.judge.protect, **options) as engine:
            engine.shares = shares
            assert engine.spec.state_blocks == matrix_case.state_blocks
            (builder,) = engine.recorder.runner.attn_groups[0][0].metadata_builders
            assert isinstance(builder, CudaMetadataBuilder) == on_gpu
            buffers = [builder.rows.table, builder.rows.positions] if on_gpu else []
            places = [tensor.data_ptr() for tensor in buffers]
            yield engine
            assert places == [tensor.data_ptr() for tensor in buffers]


@pytest.fixture(autouse=True)
def nothing_is_left(served):
    served.chunk(None)
    served.engine.reset_prefix_cache()
    yield
    assert not served.leaks()


def hits(engine, answer) -> int:
    """Return the number of tokens of a prompt that is there already: whole blocks that may be shared."""
    prompt, protect = len(answer.prompt_token_ids), engine.judge.protect
    if not engine.shares:
        return 0
    if engine.votes:
        return max(0, prompt - VOTERS) // BLOCK * BLOCK
    return max(0, (prompt if protect is True else min(protect, prompt)) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks(served, chunk):
    """Prompts in chunks give the oracle's results; some last chunks are one token long.

    vLLM does not cut the prompt of a request that is alone, so the first request generates until the last
    prompt is read.
    """
    served.chunk(chunk)
    longest = 281 if chunk > 1 else 113
    jobs = [Job(1, new=max(70, longest // chunk + 2)), Job(29), Job(33), Job(57), Job(65), Job(longest, new=4)]
    answers = served.serve(jobs)
    for name, answer in answers.items():
        full_chunks, remainder = divmod(len(answer.prompt_token_ids), chunk)
        decodes = len(answer.outputs[0].token_ids) - 1
        assert served.chunks(name) == [chunk] * full_chunks + [remainder] * (remainder > 0) + [1] * decodes
    served.check(answers)


def test_sixteen_together(served):
    """Sixteen prompts are right when they are computed and when they are hit."""
    jobs = [Job(new=70 if n in (1, 17) else 12, prompt=TEXT[:n]) for n in LENGTHS]
    answers = served.serve(jobs)
    assert len(answers) == max(len(step.running) for step in served.recorder.blocks) == 16
    assert all(served.chunks(name)[0] == len(answer.prompt_token_ids) for name, answer in answers.items())
    served.check(answers)
    first = {len(a.prompt_token_ids): a.outputs[0].token_ids for a in answers.values()}
    if served.judge.protect:
        again = served.serve([replace(job, scored=False) for job in jobs])
        for answer in again.values():
            prompt, protect = len(answer.prompt_token_ids), served.judge.protect
            shorter = [n for n in LENGTHS if protect is not True and protect < n < prompt]  # they may have snapshots
            assert answer.num_cached_tokens in (hits(served, answer), *shorter)
        served.check(again)
        assert {len(a.prompt_token_ids): a.outputs[0].token_ids for a in again.values()} == first


# Interrupted requests. With chunks of seven tokens the interruptions meet half-read prompts.


PROMPTS = [TEXT[:3], TEXT[:40], TEXT[:BUDGET], TEXT[:33] + random_prompt(57, seed=5), TEXT[:90], TEXT[:130]]


def few(engine) -> list[Job]:
    """Return six requests. After wholly protected prompts only answers are evicted, so the first one is long.

    Long answers repeat themselves, and equal tokens of a first layer tie, so it is short elsewhere.
    """
    new = [70 if engine.judge.protect is True else 30] + [16] * 5
    return [Job(new=tokens, prompt=prompt, scored=False) for tokens, prompt in zip(new, PROMPTS, strict=True)]


def test_forced_preemption(served):
    """Requests are right that are preempted with an emptied prefix cache, as by vLLM, and with a kept one."""

    def preempt(step):
        if step == 4:
            served.engine.reset_prefix_cache(reset_running_requests=True)
        if step == 22:
            preempt_all(served.recorder.scheduler)

    served.chunk(7)
    answers = served.serve(few(served), preempt)
    assert [served.recorder.preemptions[name] for name in answers] == [2] * 6
    served.check(answers)


def test_aborts(served):
    served.chunk(7)
    aborted = {3: ["2", "4"], 12: ["0"]}
    answers = served.serve(few(served), lambda step: served.engine.abort_request(aborted.get(step, [])))
    finished = {name: answer for name, answer in answers.items() if answer.outputs[0].finish_reason == "length"}
    assert {answer.request_id for answer in finished.values()} == {"1", "3", "5"}
    served.check(finished)


def test_sleep_and_wake(served):
    """Requests go on after light and deeper sleep, and hit nothing of before.

    From level 1 on the KV cache is discarded. A CPU worker does not do that by itself, so the test overwrites
    it.
    """
    step_counts, preempted = [], []

    def sleep(step):
        for level, start in ((0, 5), (1, 10)):
            if step == start:
                served.llm.sleep(level, mode="keep")
            if step in (start, start + 3):
                step_counts.append(sum(len(layers[0]) for layers in served.recorder.retained.values()))
            if step == start + 3:
                preempted.append(sum(served.recorder.preemptions.values()))
                if level > 0:
                    served.fill_pool(255)
                served.llm.wake_up(None if level > 0 else ["scheduling"])

    served.chunk(7)
    answers = served.serve(few(served), sleep)
    assert 0 < step_counts[0] == step_counts[1] < step_counts[2] == step_counts[3], "it worked while asleep"
    assert preempted[0] == 0 and set(served.recorder.preemptions.values()) == {1}
    served.check(answers)


def test_reloaded_weights(served):
    """Requests go on after weights were reloaded between two steps: neither scorer nor cache are lost."""

    def reload(step):
        if step in (3, 12):
            served.llm.collective_rpc("reload_weights")

    served.chunk(7)
    served.check(served.serve(few(served), reload))


def test_a_pool_too_small_for_all(served):
    """Six requests are admitted with few blocks each and outgrow a pool for two requests."""
    jobs = [Job(9 + i, new=60, scored=False) for i in range(6)]
    with served.small_pool(2 * (2 + served.spec.blocks(BUDGET))):
        answers = served.serve(jobs)
        assert sum(served.recorder.preemptions.values()) > 0 and len(answers) == 6
        served.check(answers)


def observed(engine) -> tuple[list, set]:
    """Return everything that two requests show, to the bit, and the blocks they held."""
    answers = engine.serve([Job(130, new=70), Job(5, new=70)])
    shown = []
    for name, answer in answers.items():
        out = answer.outputs[0]
        logprobs = [
            {t: e.logprob for t, e in entries.items()} for entries in [*answer.prompt_logprobs[1:], *out.logprobs]
        ]
        shown.append((out.token_ids, logprobs, dict(engine.recorder.retained[name])))
    return shown, blocks_of(engine)


def blocks_of(engine) -> set:
    return {b for step in engine.recorder.blocks for *_, row in step.running.values() for b in row}


def test_a_reused_block_shows_nothing_of_its_former_request(served, monkeypatch):
    """Results are the same in a pool of zeros, of other requests' bytes, and of NaN."""
    monkeypatch.setattr(served, "poisons", False)
    served.chunk(7)
    with served.small_pool(10 + 4 * served.spec.blocks(BUDGET)):
        served.fill_pool(0)
        fresh, _ = observed(served)
        served.serve(few(served))
        former = blocks_of(served)
        served.serve([replace(job, prompt=job.prompt[::-1]) for job in few(served)])
        former |= blocks_of(served)
        after_others, blocks = observed(served)
        assert blocks <= former
        served.fill_pool(255)
        poisoned, _ = observed(served)
    assert fresh == after_others == poisoned
