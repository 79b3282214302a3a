"""Chats that protect their first N tokens: N lies in a prompt, in an answer, or beyond all turns, and the oracle judges each turn.

Freed blocks are overwritten unless a snapshot or the prefix cache keeps them.
"""

import pytest
from engine.driving import BLOCK, Job, Judges, preempt_all, serving
from engine.judge import Judge
from engine.test_snapshots import live, nothing_is_left, turn, unlike, whole  # noqa: F401

from kvpop_vllm.testing import random_prompt

CASES = {"kvpop": {}, "h2o": {"reserve": True}}
SLOW = {
    "streaming-llm": {"reserve": True},
    "dms-query": {},
    "momentkv": {},
    "vase": {},
    "random": {},
    "h2o-pyramid": {},
}
POLICIES = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
FIRST, ANSWER, LATER = 95, 20, 45
"""Tokens of a first prompt, of an answer, and of what a later prompt adds."""
END = FIRST + ANSWER - 1
"""Tokens that the cache has seen when the first turn ends."""
PROTECTS = [40, FIRST, FIRST + 1, FIRST + 9, END, END + 1, END + 16, END + LATER + 9, 400]
"""They lie in the first prompt, at its end, in its answer, at its end, in the second prompt, in its answer, beyond."""


@pytest.fixture(scope="module", params=POLICIES)
def engine(request, case):
    policy, job_options = request.param, (CASES | SLOW)[request.param]
    tested = case("qwen3", policy)
    settings = tested.settings | {"protect_prompt": 0, "max_protect": "all"} | job_options
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 301, "enable_prefix_caching": True}
    with serving(tested._replace(settings=settings), **options) as engine:
        engine.case, engine.policy, engine.judges = tested, policy, {}
        yield engine
        for judge in engine.judges.values():
            judge.check_near_ties()


def judged(engine, protect: int) -> dict:
    """Have an engine judge requests that protect so many tokens, and return what they ask for."""
    plain = engine.case.judge
    engine.judge = engine.judges.setdefault(protect, Judge(engine.case.model, plain.policy, protect=protect))
    return {"kv_protect_prompt": protect, "kv_report": 1}


def check_report(answer, protect: int) -> None:
    """Check that a report counts answers among the protected tokens, and evictions after them alone."""
    report = answer.kv_transfer_params["kv_report"]
    assert report["protected_tokens"] == min(protect, report["seen_tokens"])
    if report["kept_tokens_per_head"] is not None and report["seen_tokens"] <= protect:
        assert set(report["evicted_tokens_per_head"].values()) == {0}


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("protect", PROTECTS)
def test_turns(engine, protect, chunk):
    """Each turn is the oracle's on the whole chat, and goes on from the one before, or from its protected blocks.

    The second turn is preempted while it answers.
    """

    def preempt(step):
        if step == 8:
            preempt_all(engine.recorder.scheduler)

    asks = judged(engine, protect)
    engine.chunk(chunk)
    history: list[int] = []
    for number in range(3):
        fillers = [] if chunk is None else [Job(prompt=unlike(60, 70 + number), new=40, scored=False, asks=asks)]
        answer = turn(engine, history, number, preempt if number == 1 else None, fillers, asks=asks)
        before = max(0, len(history) - 1)
        shared = min(before, protect - 1) // BLOCK * BLOCK if before else 0
        goes_on = before > protect and engine.recorder.manager.snapshots is not None
        assert answer.num_cached_tokens == (before if goes_on else shared)
        check_report(answer, protect)
        history = whole(answer)


def test_requests_of_one_batch(engine):
    """Requests that protect different numbers of tokens answer together; tails begin in different steps."""
    numbers = [0, 20, 33, 48, 50, 64, 90, 400]
    jobs = [Job(prompt=unlike(30 + 3 * i, i), new=40, asks={"kv_protect_prompt": n}) for i, n in enumerate(numbers)]
    judges = Judges(engine.policy, engine.case)
    for chunk in (None, 7):
        engine.chunk(chunk)
        answers = engine.serve(jobs)
        engine.check_blocks()
        for name, answer in answers.items():
            judges.of(jobs[int(answer.request_id)]).check({name: answer}, engine.recorder.retained)
    judges.check_near_ties()


def test_a_long_protection_leaves_room_for_snapshots(engine):
    """Requests are expected to end at their largest length, where that is below N, so that a prompt's end can be copied."""
    judged(engine, 0)
    jobs = [Job(prompt=unlike(60, 81), new=40, scored=False, asks={"kv_protect_prompt": 400})]
    jobs.append(Job(prompt=unlike(96, 82), new=6, scored=False))
    with engine.small_pool(30):
        answers = engine.serve(jobs)
        engine.check({engine.names["1"]: answers[engine.names["1"]]})
    if engine.recorder.manager.snapshots is not None:
        assert 96 in {snapshot.length for snapshot in live(engine)}


def test_a_request_may_ask_for_more_than_it_can_get(engine):
    """It ends at --max-model-len, and is counted so where blocks are reserved; more than the pool has would wait for ever."""
    judged(engine, 0)
    job = Job(prompt=random_prompt(1015, seed=83), new=8000, scored=False, asks={"kv_protect_prompt": 2**20})
    counted = []
    (answer,) = engine.serve([job], lambda step: counted.extend(engine.recorder.manager.final.values())).values()
    assert len(answer.outputs[0].token_ids) == 9 and set(counted) == {1024}


def test_an_answer_is_shared_while_it_is_written(engine):
    """A request hits the blocks of an answer that goes on, which other requests of the step write."""
    asks = judged(engine, 200)
    prompt = unlike(40, 80)
    (first,) = engine.serve([Job(prompt=prompt, new=60, scored=False, asks=asks)]).values()
    text = whole(first)
    engine.engine.reset_prefix_cache()

    def arrive(step):
        if step == 30:
            engine.add("1", Job(prompt=[*text[:69], 7], new=12, scored=False, asks=asks))

    answers = engine.serve([Job(prompt=prompt, new=60, scored=False, asks=asks)], arrive)
    engine.check(answers)
    later = answers[engine.names["1"]]
    assert later.num_cached_tokens == 64, "of 40 in the prompt"
