"""Chats of several turns, whose requests go on from what earlier ones held, judged by the oracle on the whole text.

Freed blocks are overwritten unless a snapshot or the prefix cache keeps them. Other policies are in
test_snapshots_policies.py.
"""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from engine.driving import BLOCK, Job, preempt_all, serving
from engine.judge import Judge
from engine.matrix import BUDGET

from kvpop_vllm.testing import random_prompt, write_tiny_model
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

QUICK = [("kvpop", 0), ("h2o", 0), ("streaming-llm", 40)]
"""Policies, each with the number of its protected tokens."""


@contextmanager
def chats(case, policy: str, protect: int):
    """Yield an engine of a policy that protects a number of tokens."""
    one = case("qwen3", policy, protect_prompt=protect)
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 301, "enable_prefix_caching": True}
    with serving(one._replace(settings=one.settings | {"protect_prompt": protect}), **options) as engine:
        yield engine


@pytest.fixture(scope="module", params=QUICK, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def engine(request, case):
    with chats(case, *request.param) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    engine.chunk(None)
    engine.engine.reset_prefix_cache()
    yield
    assert not engine.leaks()


def ties(engine) -> bool:
    """Return whether equal tokens tie in the first layer, where rounding would decide which one is evicted."""
    return engine_policy(engine.recorder.scheduler.vllm_config).name == "kvzap"


def next_prompt(history: list[int], seed: int) -> list[int]:
    """Return the prompt of a turn: the history and new tokens."""
    return [*history, *random_prompt(25 if history else 95, seed=seed)]


def turn(engine, history: list[int], seed: int, each_step=None, fillers=(), **options):
    """Serve a turn of a chat, next to other requests, and return its answer; its prompt is the history and new tokens.

    Judged is what was held from the chat's first token on: an eviction that rounding decided changes all later tokens.
    Where equal tokens tie, texts are short and without them: other tokens are tried until the answer repeats none.
    """
    before = dict(engine.recorder.retained)
    first, later, new = (70, 25, 2) if ties(engine) else (95, 45, 20)
    while True:
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed)).tolist()
        prompt = [*history, *sorted(order, key=set(history).__contains__)[: later if history else first]]
        answers = engine.serve([Job(prompt=prompt, new=new, scored=False, **options), *fillers], each_step)
        name = engine.names["0"]
        answer = answers[name]
        if not ties(engine) or len(set(whole(answer))) == len(whole(answer)):
            break
        seed += 1000
    if history:
        earlier = next(steps for served, steps in before.items() if served.startswith("0-"))
        for layer, steps in engine.recorder.retained[name].items():
            steps[:0] = [step for step in earlier[layer] if step.tokens_seen <= answer.num_cached_tokens]
    engine.check(answers)
    return answer


def unlike(tokens: int, seed: int) -> list[int]:
    """Return different tokens."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(seed)).tolist()[:tokens]


def whole(answer) -> list[int]:
    """Return all tokens of a turn."""
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


@pytest.mark.parametrize("chunk", [None, 16, 40])
def test_each_turn_goes_on_from_the_one_before(engine, chunk):
    """All but the last token of an answer have been read when it ends. They are cached, and so are they after a preemption.

    Prompts are cut while another request runs.
    """

    def preempt(step):
        if step == 8:
            preempt_all(engine.recorder.scheduler)

    engine.chunk(chunk)
    history: list[int] = []
    for number in range(3):
        fillers = [] if chunk is None else [Job(prompt=unlike(60, 70 + number), new=40, scored=False)]
        answer = turn(engine, history, number, preempt if number == 1 else None, fillers)
        assert answer.num_cached_tokens == max(0, len(history) - 1)
        if number != 1:
            assert (max(engine.chunks(engine.names["0"])) <= (chunk or 1000)) and (
                chunk is None or len(history) > 0 or engine.chunks(engine.names["0"])[1] > 1
            )
        history = whole(answer)


def test_an_answer_in_other_tokens_costs_itself_alone(engine):
    """A snapshot of the prompt's end is found where the answer comes back changed."""
    first = turn(engine, [], seed=10)
    prompt, answer = first.prompt_token_ids, first.outputs[0].token_ids
    second = turn(engine, [*prompt, *answer[1:]], seed=11)
    assert second.num_cached_tokens == len(prompt)
    third = turn(engine, whole(first), seed=12, asks={"kv_report": 1})
    assert third.num_cached_tokens == len(prompt) + len(answer) - 1
    assert third.kv_transfer_params["kv_report"]["snapshot_tokens"] == third.num_cached_tokens


@pytest.mark.parametrize("ending", [[250, 251], [250, 251, 252, 253, 250, 252, 254]], ids=len)
def test_a_prompt_goes_on_without_the_ending_that_its_template_leaves_out(engine, ending):
    """The first turn that leaves an ending out teaches it. From then on a turn costs what comes after the prompt before."""
    for first in (95, 94, 93):  # hashes lie before, within and after the ending
        history, before = unlike(first, seed=first), []
        for number in range(3):
            fillers = [Job(prompt=unlike(60, 70 + number), new=20, scored=False)]
            answers = engine.serve([Job(prompt=[*history, *ending], new=9, scored=False), *fillers])
            engine.check(answers)
            name = engine.names["0"]
            expected = len(before)
            if first < 95 or number > 1:
                assert answers[name].num_cached_tokens == expected
                assert engine.chunks(name)[:2] == [len(history) - expected, len(ending)]
            before, history = history, [*history, *answers[name].outputs[0].token_ids[3:], *unlike(25, 80 + number)]
    alone = [Job(prompt=[*unlike(95, seed=8), *ending], new=9, scored=False, salt="a")]
    (name,) = engine.serve(alone)
    assert engine.chunks(name)[0] == 95 + len(ending), "each salt learns its own"


def test_what_is_no_ending(engine):
    """Prompts that part before a common end teach nothing, and a turn that keeps an ending takes it back."""
    ending, seeds = [250, 251], iter(range(60, 70))

    def serve(prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the chunks of a prompt with the ending, and its answer."""
        ((name, answer),) = engine.serve([Job(prompt=[*prompt, *ending], new=9, scored=False)]).items()
        return engine.chunks(name)[:2], answer.outputs[0].token_ids

    def chat(part: list[int]) -> None:
        """Serve two turns, the second of which has a part of the first one's ending."""
        first = unlike(95, next(seeds))
        serve([*first, *part, *serve(first)[1], 5])

    for middle in ([7], [7, 8], [7, 9]):
        serve([*unlike(95, 5), *middle])
    assert serve(unlike(80, next(seeds)))[0] == [82, 1], "nothing is learned"
    chat([])
    assert serve(unlike(80, next(seeds)))[0] == [80, 2], "the ending is learned"
    chat(ending)
    assert serve(unlike(80, next(seeds)))[0] == [82, 1], "the ending is taken back"


def test_the_same_prompt_again_below_the_budget(engine):
    """Nothing was evicted yet, and its last part is all that it costs."""
    engine.chunk(16)
    length = engine.judge.protect + 40
    assert length < engine.judge.protect + BUDGET
    # prompts are cut while another request runs
    jobs = [Job(prompt=unlike(length, 5), new=2, scored=False), Job(prompt=unlike(20, 62), new=30, scored=False)]
    first, again = (engine.serve(jobs)[engine.names["0"]] for _ in range(2))
    assert 0 < length - again.num_cached_tokens <= 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("chunk, reused", [(40, 120), (64, 128), (None, 0)])
def test_the_same_prompt_again(engine, chunk, reused):
    """A prompt that was read in parts costs its last part, for another answer. Prompts are cut while another request runs."""
    engine.chunk(chunk)
    jobs = [Job(prompt=unlike(150, 5), new=9, scored=False), Job(prompt=unlike(20, 62), new=30, scored=False)]
    first = engine.serve(jobs)
    engine.check(first)
    answer = first[engine.names["0"]]
    for _ in range(2):
        again = engine.serve(jobs)[engine.names["0"]]
        assert again.num_cached_tokens == (reused or engine.judge.protect // BLOCK * BLOCK)
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids


def test_two_turns_from_one_snapshot(engine):
    """Two requests of one step go on from the same blocks, each in copies of its own."""
    history = whole(turn(engine, [], seed=20))
    prompts = [[*history, *random_prompt(30, seed=seed)] for seed in (21, 22, 21)]
    answers = engine.serve([Job(prompt=prompt, new=20, scored=False) for prompt in prompts])
    if not ties(engine):
        engine.check(answers)
    assert [answer.num_cached_tokens for answer in answers.values()] == [len(history) - 1] * 3


def snapshots_of(engine):
    return engine.recorder.manager.snapshots


def live(engine) -> set:
    return {*snapshots_of(engine).all()}


def test_other_requests_do_not_hit(engine):
    """Another salt, budget, number of protected tokens or last token."""
    first = turn(engine, [], seed=30, salt="a")
    history = whole(first)
    before = len(live(engine))
    protected = engine.judge.protect // BLOCK * BLOCK
    for options in ({"salt": "b"}, {}, {"salt": "a", "asks": {"kv_budget": 40}}):
        answers = engine.serve([Job(prompt=[*history, 5], new=2, scored=False, **options)])
        assert [answer.num_cached_tokens for answer in answers.values()] == [protected if "asks" in options else 0]
    if protected:
        protecting_less = Job(prompt=[*history, 5], new=2, scored=False, salt="a", asks={"kv_protect_prompt": BLOCK})
        (answer,) = engine.serve([protecting_less]).values()
        assert answer.num_cached_tokens <= BLOCK
    other_text = [*history[:-2], (history[-2] + 1) % 256, 5, 6]
    (answer,) = engine.serve([Job(prompt=other_text, new=2, scored=False, salt="a")]).values()
    assert answer.num_cached_tokens == len(first.prompt_token_ids), "the prompt's end"
    assert len(live(engine)) > before


def test_the_pool_takes_blocks_back(engine):
    """Snapshots are forgotten as their blocks are used again, those that were used longest ago first."""
    snapshots, lengths = snapshots_of(engine), range(80, 200, 5)
    snapshots.take_counts()
    with engine.small_pool(80):
        for number, length in enumerate(lengths):
            engine.check(engine.serve([Job(prompt=random_prompt(length, seed=100 + number), new=3, scored=False)]))
            blocks = [block for snapshot in live(engine) for block in snapshot.blocks]
            assert {block.block_id for block in blocks} == {*snapshots._by_block}
            assert len(blocks) == len(snapshots._by_block)
            assert snapshots._digests.total() == snapshots._hashed.total() == len(live(engine))
            assert all(block.block_hash for block in blocks)
        assert snapshots.counts["lost"] and snapshots.counts["taken"] == snapshots.counts["lost"] + len(live(engine))
        for number, hit in ((len(lengths) - 1, True), (0, False)):
            prompt = [*random_prompt(lengths[number], seed=100 + number), 9]
            (answer,) = engine.serve([Job(prompt=prompt, new=2, scored=False)]).values()
            assert (answer.num_cached_tokens >= lengths[number]) == hit
    engine.engine.reset_prefix_cache()
    assert not any((snapshots._by_key, snapshots._by_block, snapshots._digests, snapshots._hashed))


def test_a_look_up_costs_what_there_are_lengths_of_snapshots(engine):
    """VLLM looks in every step for the request that waits for room, whose prompt may have thousands of hashes."""
    history = whole(turn(engine, [], seed=50))
    snapshots, looked_at = snapshots_of(engine), []

    class Hashes(list):
        def __getitem__(self, i):
            looked_at.append(i)
            return super().__getitem__(i)

    def look_up(step):
        for request in engine.recorder.scheduler.running:
            request.block_hashes = Hashes(request.block_hashes)
            looked_at.clear()
            assert snapshots.longest(request).length in (len(history) - 1, len(history) + 200)
            assert len(request.block_hashes) > 9 and len(looked_at) <= 2 * len(snapshots._hashed) <= 8

    engine.serve([Job(prompt=[*history, *random_prompt(200, seed=51)], new=3, scored=False)], look_up)
    assert looked_at


def test_a_store_could_hold_a_snapshot(engine):
    """A snapshot's bytes, written to other blocks later, are a hit as it was."""
    history = whole(turn(engine, [], seed=60))
    snapshots, pool, caches = snapshots_of(engine), engine.recorder.pool, engine.recorder.runner.kv_caches
    snapshot = max(live(engine), key=lambda one: one.length)
    (blocks,) = snapshot.groups
    places = [block.block_id for block in blocks]
    stored = [cache[places].clone() for cache in caches]
    snapshots._remove(snapshot)
    for block in blocks:
        block.reset_hash()
    new_blocks = pool.get_new_blocks(len(blocks))
    new_places = [block.block_id for block in new_blocks]
    assert not {*places} & {*new_places}
    for cache, content in zip(caches, stored, strict=True):
        cache[places], cache[new_places] = 0, content
    snapshots.put(dataclasses.replace(snapshot, groups=(tuple(new_blocks),)))
    pool.free_blocks(new_blocks)
    assert turn(engine, history, seed=61).num_cached_tokens == len(history) - 1


def test_a_source_that_is_lost_while_a_request_waits(engine):
    """A request that found a snapshot and has no room is read from scratch once the blocks are gone."""
    history = whole(turn(engine, [], seed=40))
    pool, manager = engine.recorder.pool, engine.recorder.manager
    withheld = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    engine.withheld = len(withheld)
    gone = False

    def give_back(step):
        nonlocal gone
        if step == 3 and not gone:
            gone = True
            withheld.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
            engine.withheld = 0
            pool.free_blocks(withheld)

    answers = engine.serve([Job(prompt=[*history, 4, 5], new=8, scored=False)], give_back)
    engine.judge.check(answers, engine.recorder.retained)
    assert gone and all(answer.num_cached_tokens == 0 for answer in answers.values())
    assert manager.snapshots.counts["lost"]


def test_aborted_requests_and_several_samples(engine):
    """An aborted request leaves a snapshot of what it had read; each of several samples leaves its own."""
    prompt = random_prompt(110, seed=50)
    name = None

    def abort(step):
        nonlocal name
        if step == 6:
            name = engine.names["0"]
            engine.engine.abort_request([name], internal=True)

    engine.serve([Job(prompt=prompt, new=60, scored=False)], abort)
    (answer,) = engine.serve([Job(prompt=prompt, new=12, scored=False)]).values()
    text = whole(answer)
    engine.engine.reset_prefix_cache()
    engine.serve([Job(prompt=prompt, new=60, scored=False)], abort)
    later = engine.serve([Job(prompt=[*text, 3], new=6, scored=False)])
    engine.check(later)
    (cached,) = (answer.num_cached_tokens for answer in later.values())
    assert len(prompt) < cached < len(text)
    samples = engine.serve([Job(prompt=[*text, 7], new=15, samples=3)])
    engine.check(samples)
    for sample in samples.values():
        answers = engine.serve([Job(prompt=[*text, 7, *sample.outputs[0].token_ids, 8], new=4, scored=False)])
        engine.check(answers)
        assert [answer.num_cached_tokens for answer in answers.values()] == [len(text) + 15]


def test_a_prompt_that_is_copied_in_this_step_is_not_copied_again(engine):
    """A request that arrives in the step after another's prompt, and begins with it, is read on its own."""
    prompt = unlike(96, 60)

    def arrive(step):
        if step == 1:
            engine.add("1", Job(prompt=[*prompt, 201, 202, 203], new=4, scored=False))

    engine.check(engine.serve([Job(prompt=prompt, new=6, scored=False)], arrive))
    (answer,) = engine.serve([Job(prompt=[*prompt, 204], new=3, scored=False)]).values()
    assert answer.num_cached_tokens == len(prompt)


def test_a_resumed_request_is_not_taken_for_one_at_its_prompts_end(engine):
    """A request that is preempted after its first token is read in chunks, one of which passes the end of its prompt."""
    prompt = unlike(96, 61)
    engine.chunk(70)

    def preempt(step):
        if step == 2:
            preempt_all(engine.recorder.scheduler)

    jobs = [Job(prompt=prompt, new=3, scored=False), Job(prompt=unlike(20, 62), new=30, scored=False)]
    engine.serve(jobs, preempt)
    (answer,) = engine.serve([Job(prompt=[*prompt, 205, 206], new=3, scored=False)]).values()
    engine.check({engine.names["0"]: answer})
    assert answer.num_cached_tokens in (0, 70, len(prompt), engine.judge.protect // BLOCK * BLOCK)


def test_a_pool_without_room_for_copies(engine):
    """A turn takes the blocks of its snapshot over where there is no room for copies of them."""
    with engine.small_pool(engine.spec.most_blocks(200) + 2):
        history = whole(turn(engine, [], seed=63))
        answer = turn(engine, history, seed=64)
        assert answer.num_cached_tokens == len(history) - 1
        assert turn(engine, history, seed=66).num_cached_tokens < len(history) - 1, "it is gone"


def test_equal_prompts_leave_one_snapshot(engine):
    """Requests that end their equal prompts in one step copy them once."""
    prompt = unlike(90, 65)
    snapshots_of(engine).take_counts()
    engine.check(engine.serve([Job(prompt=prompt, new=4, scored=False) for _ in range(3)]))
    lengths = [snapshot.length for snapshot in live(engine)]
    assert sorted(lengths) == [90, 93] and snapshots_of(engine).take_counts()["taken"] == 2


def test_keys_of_short_texts(engine):
    """Texts of less than a hash have no digest, so that salt, adapter, numbers and seed are told apart by themselves."""
    manager, snapshots = engine.recorder.manager, snapshots_of(engine)
    slots = manager.kv_cache_spec.slots()

    def key(salt=None, lora=None, seed=None, **numbers):
        adapter = lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1], lora_int_id=lora[2])
        params = SimpleNamespace(seed=seed)
        request = SimpleNamespace(cache_salt=salt, lora_request=adapter, sampling_params=params, block_hashes=[])
        return snapshots._key(request, slots._replace(**numbers), 0)

    variants = [
        key(salt="a"),
        key(lora=("x", "one", 1)),
        key(lora=("x", "two", 1)),
        key(lora=("x", "one", 2)),
        key(budget=9),
        key(seed=1),
        key(prefix=3),
    ]
    assert key() == key() and len({key(), *variants}) == 7 + snapshots.draws


def run_without_snapshots(engine, jobs) -> int:
    """Serve jobs while the engine takes no snapshots, and return the number of preemptions."""
    manager, snapshots = engine.recorder.manager, snapshots_of(engine)
    engine.engine.reset_prefix_cache()
    manager.snapshots = None
    try:
        engine.check(engine.serve(jobs))
    finally:
        manager.snapshots = snapshots
    return sum(engine.recorder.preemptions.values())


def test_prompts_that_never_repeat_lose_nothing(engine):
    """In a pool that is too small for all, as many requests are preempted as without snapshots, and none is in vain."""
    jobs = [Job(prompt=unlike(20 + 9 * i, 80 + i), new=40, scored=False) for i in range(9)]
    with engine.small_pool(5 * engine.spec.most_blocks(100)):
        without = run_without_snapshots(engine, jobs)
        engine.check(engine.serve(jobs))
    assert 0 < sum(engine.recorder.preemptions.values()) <= without
    blocks = {block.block_id for snapshot in live(engine) for block in snapshot.blocks}
    assert blocks == {*snapshots_of(engine)._by_block} == {*engine.recorder.pool._reuse_watchers}


CHANGES = {
    "reset": lambda llm: llm.reset_prefix_cache(),
    "reload": lambda llm: llm.collective_rpc(
        "reload_weights", kwargs={"weights_path": llm.llm_engine.model_config.model}
    ),
    "function": lambda llm: llm.apply_model(lambda model: None),
    "sleep": lambda llm: (llm.sleep(level=1, mode="keep"), llm.wake_up()),
    "deep sleep": lambda llm: (llm.sleep(level=2, mode="keep"), llm.wake_up()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_weights_drop_snapshots(engine, change):
    """All are gone, and a request that runs meanwhile leaves none; a later one leaves one again.

    vLLM on a CPU keeps its memory while it sleeps, but resets its caches.
    """
    history = whole(turn(engine, [], seed=90))
    assert live(engine)

    def apply(step):
        if step == 4:
            CHANGES[change](engine.llm)
            assert not live(engine)

    job = Job(prompt=unlike(70, 91), new=12, scored=False)
    engine.serve([job], apply)
    assert not live(engine) or engine.recorder.preemptions[engine.names["0"]] == 1, "it began again after the change"
    engine.engine.reset_prefix_cache()
    later = turn(engine, history, seed=92)
    assert later.num_cached_tokens == 0
    assert turn(engine, whole(later), seed=93).num_cached_tokens == len(whole(later)) - 1


def test_other_weights(engine, tmp_path):
    """After a reload a chat goes on by the new weights alone, also where a request ran across it."""
    model = engine.llm.llm_engine.model_config.model
    other_model = str(write_tiny_model(tmp_path / "other", "qwen3", seed=7))
    history = whole(turn(engine, [], seed=95))

    def load(weights: str):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})

    job = Job(prompt=[*history, 7], new=9, scored=False)
    engine.serve([job], lambda step: load(other_model) if step == 3 else None)
    try:
        engine.engine.reset_prefix_cache()  # of protected tokens, as without a policy
        engine.recorder.clear()
        answers = engine.serve([job])
        assert [answer.num_cached_tokens for answer in answers.values()] == [0]
        engine.check(answers, Judge(other_model, engine.judge.policy, protect=engine.judge.protect))
    finally:
        load(model)
        engine.engine.reset_prefix_cache()
