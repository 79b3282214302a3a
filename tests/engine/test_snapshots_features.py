"""Chats of several turns with features that make, distinguish or place requests: a turn goes on where it may, and there alone."""

import asyncio
from contextlib import contextmanager

import pytest
from engine.driving import Job, Judges, preempt_all, watched
from engine.judge import Judge
from engine.test_cartridges import SLOTS, Served, named, write
from engine.test_executors import a_core_for_each_of_two  # noqa: F401
from engine.test_sharing_features import adapter
from engine.test_snapshots import chats, next_prompt, turn, whole
from engine.tiny_engine import running
from policies.matrix import SHARES
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from kvpop_vllm.testing import random_prompt, write_tiny_model

pytestmark = pytest.mark.slow


def go_on(engine, seed: int = 0, **options) -> list[int]:
    """Serve three turns of a chat, each of which goes on from the one before, and return its tokens."""
    history: list[int] = []
    for number in range(3):
        answer = turn(engine, history, seed=seed + number, **options)
        assert answer.num_cached_tokens == max(0, len(history) - 1)
        history = whole(answer)
    return history


def cached(engine, job: Job) -> int:
    """Return the tokens of a request that were not computed."""
    (answer,) = engine.serve([job]).values()
    return answer.num_cached_tokens


def test_adapters(case, tmp_path):
    """A chat under an adapter goes on under it; under another adapter, or none, it begins again."""
    matrix_case = case("qwen3", "kvpop")
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with watched(matrix_case.model, matrix_case.settings, **options) as engine:
        adapters, chats_of = [], []
        for number, name in enumerate(("first", "second"), 1):
            merged, lora = adapter(matrix_case.model, tmp_path / name, seed=number)
            adapters.append(LoRARequest(name, number, str(lora)))
            engine.judge = Judge(str(merged), matrix_case.judge.policy)
            chats_of.append(go_on(engine, 10 * number, adapter=adapters[-1]))
        first, second = adapters
        for loaded in (second, None, LoRARequest("first", 3, first.lora_path)):  # the last one is loaded again
            assert cached(engine, Job(prompt=[*chats_of[0], 5], new=2, scored=False, adapter=loaded)) == 0
        assert cached(engine, Job(prompt=[*chats_of[0], 5], new=2, scored=False, adapter=first)) == len(chats_of[0]) - 1
        engine.engine.add_lora(LoRARequest("first", 1, second.lora_path, load_inplace=True))
        assert cached(engine, Job(prompt=[*chats_of[0], 6], new=2, scored=False, adapter=first)) == 0
        assert not engine.leaks()


def test_draws_of_other_seeds(case):
    """Evictions that are drawn follow a request's seed: a chat goes on under the same one."""
    with chats(case, "random", 0) as engine:
        judges = Judges("random", case("qwen3", "random", protect_prompt=0))
        for asks in ({"kv_seed": 3}, {"kv_seed": 4}):
            engine.judge = judges.of(Job(asks=asks))
            history = go_on(engine, asks=asks)
            for seeding in ({"kv_seed": 5}, {}):
                assert cached(engine, Job(prompt=[*history, 5], new=2, scored=False, asks=seeding)) == 0
        engine.judge = judges.of(Job(temperature=1.0))
        first = turn(engine, [], 30, temperature=1.0)
        assert turn(engine, whole(first), 31, temperature=1.0).num_cached_tokens == len(whole(first)) - 1
        assert cached(engine, Job(prompt=[*whole(first), 5], new=2, scored=False)) == 0


@pytest.mark.parametrize("options", [{"allocator": str(SHARES)}, {"allocator": "pyramid"}], ids=["heads", "layers"])
def test_unequal_shares(case, options):
    """A snapshot holds the blocks that heads share unequally."""
    matrix_case = case("qwen3", "kvpop", **options)
    with watched(matrix_case.model, matrix_case.settings, matrix_case.judge, num_gpu_blocks_override=301) as engine:
        go_on(engine)
        assert not engine.leaks()


def test_budgets_of_requests(case):
    """A chat under a smaller budget than the server's goes on under it."""
    with chats(case, "kvpop", 0) as engine:
        job = Job(asks={"kv_budget": 40})
        engine.judge = Judges("kvpop", case("qwen3", "kvpop", protect_prompt=0)).of(job)
        history = go_on(engine, asks=job.asks)
        assert cached(engine, Job(prompt=[*history, 5], new=2, scored=False)) == 0


def test_reserved_blocks(case):
    """A request that claims all of its blocks at once leaves those that it used, and goes on with the others."""
    matrix_case = case("qwen3", "kvpop")
    settings = matrix_case.settings | {"reserve": True}
    with watched(matrix_case.model, settings, matrix_case.judge, num_gpu_blocks_override=301) as engine:
        go_on(engine)
        assert not engine.leaks()


@pytest.mark.parametrize("protect", [0, 40])
def test_cartridges(case, tmp_path, protect):
    """A chat after a cartridge goes on after the same one; after another, or none, it begins again."""
    matrix_case = case("qwen3", "kvpop", protect_prompt=protect)
    folders = {name: write(tmp_path / name, matrix_case.model, name) for name in SLOTS}
    settings = matrix_case.settings | {"cartridge": [f"{name}={folder}" for name, folder in folders.items()]}
    with watched(matrix_case.model, settings | {"protect_prompt": protect}, num_gpu_blocks_override=321) as engine:
        served, history = Served(engine, matrix_case, folders), []
        for number in range(3):
            prompt = next_prompt(history, number)
            (answer,) = served.serve([Job(prompt=prompt, new=20, asks=named("plain", "biased"))]).values()
            assert answer.num_cached_tokens == SLOTS["plain"] + SLOTS["biased"] + max(0, len(history) - 1)
            history = [*prompt, *answer.outputs[0].token_ids]
        for asks, slots in ((named("plain"), SLOTS["plain"]), (named("later", "biased"), 192), (None, 0)):
            (answer,) = served.serve([Job(prompt=[*history, 5], new=4, asks=asks)]).values()
            assert answer.num_cached_tokens == slots


def ask(llm, prompt: list[int], new: int = 20, salt: str | None = None):
    """Return the greedy answer of an engine."""
    params = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    text = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    (answer,) = llm.generate([text], params, use_tqdm=False)
    return answer


def conversation(llm) -> list[int]:
    """Return the tokens of a chat of three turns, each of which goes on from the one before."""
    history: list[int] = []
    for number in range(3):
        answer = ask(llm, next_prompt(history, number))
        assert answer.num_cached_tokens == max(0, len(history) - 1)
        history = whole(answer)
    return history


@pytest.mark.parametrize("settings", [{"policy": "l2norm", "budget": 56, "sinks": 4}, {"policy": "full"}], ids=str)
def test_turns_have_the_tokens_of_turns_from_scratch(tmp_path, settings):
    """Policies that the oracle does not judge: each turn is asked again under another salt."""
    history: list[int] = []
    with running(str(write_tiny_model(tmp_path, "qwen3")), settings, block_size=16) as llm:
        for number in range(3):
            prompt = next_prompt(history, number)
            answer, scratch = ask(llm, prompt), ask(llm, prompt, salt=f"{number}")
            assert scratch.num_cached_tokens == 0 and (answer.num_cached_tokens > 0) == (number > 0)
            assert answer.outputs[0].token_ids == scratch.outputs[0].token_ids
            history = whole(answer)


STAGES = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
WORKERS = {
    "two ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "two stages": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"} | STAGES,
}


@pytest.fixture(scope="module")
def alone(case):
    """Return a case, and the chat of one engine of one rank, which the oracle judges."""
    matrix_case = case("qwen3", "kvpop")
    with watched(matrix_case.model, matrix_case.settings, matrix_case.judge) as engine:
        history: list[int] = []
        for number in range(3):
            answers = engine.serve([Job(prompt=next_prompt(history, number), new=20, scored=False)])
            matrix_case.judge.check(answers, engine.recorder.retained)
            (answer,) = answers.values()
            history = whole(answer)
    return matrix_case, history


@pytest.mark.parametrize("workers", WORKERS)
def test_two_workers(alone, workers):
    """Each rank or stage copies its part of a snapshot."""
    matrix_case, history = alone
    with running(matrix_case.model, matrix_case.settings, block_size=16, **WORKERS[workers]) as llm:
        assert conversation(llm) == history
        lengths, prompt = [], random_prompt(90, seed=8)
        for number in range(3):
            answer, scratch = (ask(llm, [*prompt, 250, 251], salt=salt) for salt in (None, f"{number}"))
            assert answer.outputs[0].token_ids == scratch.outputs[0].token_ids
            lengths.append(answer.num_cached_tokens)
            before, prompt = prompt, [*prompt, *answer.outputs[0].token_ids, 5, 6]
        assert lengths == [0, 0, len(before) - 22], "a prompt without the ending that its template leaves out"


@pytest.fixture
def start_asynchronous(alone, asynchronous):
    """Return a function that starts an engine with asynchronous scheduling."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    @contextmanager
    def start(**options):
        matrix_case, _ = alone
        with running(matrix_case.model, matrix_case.settings, block_size=16, async_scheduling=True, **options) as llm:
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            assert isinstance(scheduler, AsyncScheduler)
            yield llm, scheduler

    return start


def test_asynchronous_scheduling(alone, start_asynchronous):
    """A step is scheduled before the one before has its token: the token in flight is part of a snapshot."""
    with start_asynchronous() as (llm, scheduler):
        assert conversation(llm) == alone[1]
        ask(llm, random_prompt(90, seed=7), new=1)
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        assert not any(manager._pending_cow_copies for manager in managers), "copies for a request that has ended"
        assert llm.reset_prefix_cache()


def test_asynchronous_scheduling_under_load(start_asynchronous):
    """Chats whose prompts are cut, preempted and have an ending of their template have the tokens of turns from scratch."""
    ending = [250, 251]
    with start_asynchronous(max_num_batched_tokens=48, num_gpu_blocks_override=301) as (llm, scheduler):
        histories, hits = [random_prompt(70 + 9 * i, seed=i) for i in range(5)], []
        for number in range(3):
            prompts = [[*history, *ending] for history in histories]
            answers = together(llm, prompts, random_prompt(100, seed=90 + number), scheduler)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                scratch = ask(llm, prompt, salt=f"{number} {i}")
                assert scratch.num_cached_tokens == 0
                assert answer.outputs[0].token_ids == scratch.outputs[0].token_ids
            hits.append([answer.num_cached_tokens for answer in answers])
            histories = [
                [*history, *answer.outputs[0].token_ids[5:], *random_prompt(25, seed=10 * number + i)]
                for i, (history, answer) in enumerate(zip(histories, answers, strict=True))
            ]
        assert hits[2] == [70 + 9 * i + 15 + 25 for i in range(5)] and llm.reset_prefix_cache()


def together(llm, prompts: list[list[int]], aborted: list[int], scheduler) -> list:
    """Return the answers to prompts that run at once, next to one that is aborted; all are preempted once."""
    engine = llm.llm_engine
    for i, prompt in enumerate([*prompts, aborted]):
        params = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
        name = engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        finished |= {int(answer.request_id): answer for answer in engine.step() if answer.finished}
        steps += 1
        if steps == 12:
            preempt_all(scheduler)
        if steps == 15:
            engine.abort_request([name], internal=True)
    return [finished[i] for i in range(len(prompts))]


def test_two_data_parallel_engines(alone):
    """A turn that goes to the other engine is computed from its first token, and has the same answer."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    matrix_case, history = alone
    sizes = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    sizes |= {"block_size": 16, "enforce_eager": True, "skip_tokenizer_init": True, "data_parallel_size": 2}
    params = {"temperature": 0, "max_tokens": 20, "detokenize": False, "ignore_eos": True}

    async def serve() -> list:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(matrix_case.model, additional_config={"kv_policy": matrix_case.settings}, **sizes)
        )

        async def turn_of(prompt: list[int], rank: int, name: str):
            final = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
            async for answer in engine.generate({"prompt_token_ids": prompt}, final, name, data_parallel_rank=rank):
                if answer.finished:
                    return answer

        try:
            first = await turn_of(next_prompt([], 0), 0, "first")
            prompt = next_prompt(whole(first), 1)
            return [await turn_of(prompt, rank, f"second of {rank}") for rank in (1, 0)]
        finally:
            engine.shutdown()

    other_answers, same = asyncio.run(serve())
    assert other_answers.num_cached_tokens == 0 and same.num_cached_tokens == len(same.prompt_token_ids) - 26
    assert [*whole(other_answers)] == [*whole(same)] == history[: len(whole(same))]
    assert random_prompt(25, seed=1) == history[115:140]
