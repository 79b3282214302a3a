"""Prompts that are held until their end and then compressed, compared with the oracle at every step."""

from __future__ import annotations

from collections import Counter

import pytest
from engine.driving import BLOCK, Job, watched
from engine.matrix import BUDGET, make_case, state_blocks
from engine.test_sharing import preempt_all

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(260, seed=94)
VOTERS = 32
LENGTHS = [1, 5, 16, 31, 32, 33, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET, 150]
POLICIES = [("snapkv", "qwen3"), ("snapkv", "llama"), ("pyramidkv", "llama"), ("adakv", "qwen3")]


@pytest.fixture(scope="module", params=POLICIES, ids="-".join)
def engine(request, tiny_model, tmp_path_factory):
    policy, kind = request.param
    found = make_case(tiny_model(kind), tmp_path_factory.mktemp("scorer"), policy, protect_prompt=True)
    options = {"max_model_len": 512, "num_gpu_blocks_override": 181}
    with pytest.MonkeyPatch.context() as patch, watched(found.model, found.settings, found.judge, **options) as made:
        made.policy = policy
        made.poison(patch)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    if "engine" in request.fixturenames:
        made = request.getfixturevalue("engine")
        made.chunk(None)
        made.engine.reset_prefix_cache()
        yield
        assert not made.leaks()
    else:
        yield


def check(engine, answers) -> None:
    """Check every answer against the oracle, and the blocks at every step.

    The blocks of the prefix must be held until the step after the one with the end of the prompt.
    """
    engine.verdict(answers)
    state, layers = state_blocks(engine.policy), engine.judge.policy.budgets(1)
    crossed: Counter[str] = Counter()
    for step in engine.recorder.blocks:
        own: list[int] = []
        for name, (tokens, row) in step.running.items():
            prompt, held = step.protected[name], [block for block in row if block]
            prefix = cdiv(prompt, BLOCK)
            pages = cdiv(sum(cdiv(min(tokens, budget), BLOCK) for budget in layers), len(layers))
            if tokens <= prompt - VOTERS:
                expected = cdiv(tokens, BLOCK)
            elif tokens <= prompt or row[0]:  # a resumed chunk may contain the prompt's end
                expected = prefix + state + pages * (tokens >= prompt)
                crossed[name] += tokens > prompt
            else:
                expected = state + pages
                assert row[:prefix] == [0] * prefix
            assert len(held) == expected, (tokens, prompt)
            own += held[-(state + pages) :] if tokens >= prompt else []
        assert len(set(own)) == len(own), "tails are shared"
    assert all(often <= engine.recorder.preemptions[name] for name, often in crossed.items()), (
        "a prefix is held too long"
    )


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_every_length_in_every_cut(engine, chunk):
    """Prompts around the budget and the number of voting queries are right, whole and in chunks of any size.

    Long answers evict the prompt. A chunk may end one token before the prompt.
    """
    engine.chunk(chunk)
    jobs = [Job(new=70 if n < 100 else 30, prompt=TEXT[:n]) for n in LENGTHS]
    answers = engine.serve(jobs)
    assert all(answer.num_cached_tokens == 0 for answer in answers.values())
    check(engine, answers)


def test_hits(engine):
    """All whole blocks before the voting queries are hit, within one step and in later ones.

    Blocks of a request that has been compressed are hit while another request still reads them.
    """
    jobs = [Job(new=40, prompt=TEXT[:n], scored=False) for n in (150, 150, 150, 90, 49, 47)]
    answers = engine.serve(jobs)
    hits = {a.request_id: a.num_cached_tokens for a in answers.values()}
    assert hits["0"] == 0 and hits["1"] == hits["2"] == (150 - VOTERS) // BLOCK * BLOCK
    assert hits["3"] == (90 - VOTERS) // BLOCK * BLOCK and hits["4"] == 16 and hits["5"] == 0
    check(engine, answers)
    engine.chunk(7)
    late = {3: Job(new=9, prompt=TEXT[:200], scored=False), 14: Job(new=9, prompt=TEXT[:150], scored=False)}
    answers = engine.serve(
        [Job(1, new=60, scored=False), Job(new=20, prompt=TEXT[:150], scored=False)],
        lambda step: step in late and engine.add(f"late {step}", late[step]),
    )
    assert len(answers) == 4 and max(a.num_cached_tokens for a in answers.values()) >= 112
    check(engine, answers)


@pytest.mark.parametrize("keep", [False, True])
def test_preemption(engine, keep):
    """Requests preempted before and behind a prompt's end are right.

    Generated tokens are read again behind the prompt, in chunks that may cross its end.
    """
    engine.chunk(7)

    def interrupt(step):
        if step in (6, 40):
            if keep:
                preempt_all(engine.recorder.scheduler)
            else:
                engine.engine.reset_prefix_cache(reset_running_requests=True)

    jobs = [Job(new=44, prompt=TEXT[:n], scored=False) for n in (3, 30, 40, 60, 61, 62, 63, 64, 90, 150)]
    answers = engine.serve(jobs, interrupt)
    assert set(engine.recorder.preemptions.values()) == {2}
    check(engine, answers)


def test_a_resumed_chunk_may_cross_the_end(engine):
    """A chunk may contain the end of the prompt and all tokens that were generated behind it."""

    def interrupt(step):
        if step == 30:
            engine.engine.reset_prefix_cache(reset_running_requests=True)

    answers = engine.serve([Job(length=n, new=60, scored=False) for n in (20, 70, 120)], interrupt)
    assert set(engine.recorder.preemptions.values()) == {1}
    assert max(max(engine.chunks(name)) for name in answers) == 120 + 30
    check(engine, answers)


def test_aborts(engine):
    engine.chunk(7)
    jobs = [Job(new=20, prompt=TEXT[:n], scored=False) for n in (40, 90, 90, 150, 150)]
    aborted = {3: ["3"], 14: ["1"], 18: ["0"]}
    answers = engine.serve(jobs, lambda step: engine.engine.abort_request(aborted.get(step, [])))
    finished = {name: a for name, a in answers.items() if a.outputs[0].finish_reason == "length"}
    assert {a.request_id for a in finished.values()} >= {"2", "4"}
    engine.verdict(finished)


def test_votes_decide(engine):
    """The oracle's votes keep neither just the newest tokens nor everything."""
    reference = engine.judge.reference(TEXT[:200], prompt=150)
    seen = reference.exact.visible[0][:, 151, : 150 - VOTERS]
    assert not seen[:, -10:].all() and seen.any(-1).all()
    assert (reference.exact.visible[0][:, 149, :150]).all()
