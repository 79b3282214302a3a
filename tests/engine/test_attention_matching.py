"""An engine under `attention-matching` equals a `KVpopCache`, which tests/policies compares with the naive fit."""

import pytest
import torch
from engine.driving import BLOCK, Job, preempt_all, watched
from engine.matrix import BUDGET
from transformers import AutoModelForCausalLM

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

WINDOW, MOST = BUDGET // 4, 100
QUERIES = MOST // 4
"""Stored queries: as many as the largest window of a request."""
TEXT = random_prompt(200, seed=94)
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, BUDGET - 1, BUDGET, BUDGET + 1, 90, 150]
CLOSE = 2e-3
"""Bound on differences of log-probabilities, which go through the fits of two layers."""


@pytest.fixture(scope="module")
def served(case):
    """Yield an engine whose freed blocks are overwritten, its model in transformers, and its settings."""
    matrix_case = case("qwen3", "attention-matching")
    options = {"max_model_len": 512, "num_gpu_blocks_override": 241}
    with (
        pytest.MonkeyPatch.context() as patch,
        watched(matrix_case.model, matrix_case.settings | {"max_budget": MOST}, **options) as engine,
    ):
        engine.poison(patch)
        yield engine, AutoModelForCausalLM.from_pretrained(matrix_case.model).eval(), matrix_case.settings
        assert not engine.leaks()


@pytest.fixture(autouse=True)
def nothing_is_cached(served):
    served[0].chunk(None)
    served[0].engine.reset_prefix_cache()


def check(served, answers: dict, jobs: list[Job]) -> None:
    """Compare answers with a cache that reads the same tokens, and the blocks of all steps with the spec's counts."""
    engine, model, settings = served
    for name, answer in answers.items():
        prompt, new = answer.prompt_token_ids, answer.outputs[0]
        budget = (jobs[int(answer.request_id)].asks or {}).get("kv_budget", BUDGET)
        cache = KVpopCache(model, **settings | {"budget": budget}, prompt=len(prompt))
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *new.token_ids[:-1]]])
            exact = model(ids, past_key_values=cache).logits[0, len(prompt) - 1 :].log_softmax(-1)
        for row, entries in zip(exact, new.logprobs, strict=True):
            for token, entry in entries.items():
                assert abs(entry.logprob - float(row[token])) < CLOSE, (name, len(prompt))
        retained = cache.held()
        for layer, steps in engine.recorder.retained[name].items():
            assert steps[-1].tokens_seen == ids.shape[1] and max(map(len, steps[-1].positions)) <= budget
            assert steps[-1].positions == [head.nonzero().flatten().tolist() for head in retained[layer]]
    engine.check_blocks()


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_prompts_of_all_lengths_together(served, chunk):
    """Prompts around w and B, requests with budgets of their own, in chunks or whole."""
    engine = served[0]
    engine.chunk(chunk)
    jobs = [Job(new=70 if n in (1, 90) else 20, prompt=TEXT[:n], scored=False) for n in LENGTHS]
    jobs += [Job(new=20, prompt=TEXT[:n], scored=False, asks={"kv_budget": b}) for n, b in ((90, 33), (90, MOST))]
    answers = engine.serve(jobs)
    assert len(answers) == len(jobs)
    check(served, answers, jobs)


def test_hits_end_before_the_stored_queries(served):
    engine = served[0]
    jobs = [Job(new=30, prompt=TEXT[:n], scored=False) for n in (150, 150, 90, 40)]
    answers = engine.serve(jobs)
    hits = {answer.request_id: answer.num_cached_tokens for answer in answers.values()}
    assert hits == {"0": 0} | {str(i): (len(jobs[i].prompt) - QUERIES) // BLOCK * BLOCK for i in (1, 2, 3)}
    check(served, answers, jobs)
    again = engine.serve(jobs[:2])
    assert {answer.num_cached_tokens for answer in again.values()} == {(150 - QUERIES) // BLOCK * BLOCK}
    check(served, again, jobs)


@pytest.mark.parametrize("emptied", [True, False])
def test_preemption_makes_the_same_slots(served, emptied):
    """A preempted request makes its slots again, whether its prompt is hit or not, also in a chunk that goes beyond it."""

    def interrupt(step):
        if step in (9, 30):
            if emptied:
                served[0].engine.reset_prefix_cache(reset_running_requests=True)
            else:
                preempt_all(served[0].recorder.scheduler)

    jobs = [Job(new=60, prompt=TEXT[:n], scored=False) for n in (20, BUDGET + 1, 120)]
    answers = served[0].serve(jobs, interrupt)
    assert set(served[0].recorder.preemptions.values()) == {2}
    check(served, answers, jobs)


def test_a_small_pool_and_aborts(served):
    """Requests wait, are preempted and aborted, and all blocks come back."""
    engine = served[0]
    engine.chunk(7)
    jobs = [Job(new=40, prompt=TEXT[i : i + 90 + i], scored=False) for i in range(5)]
    with engine.small_pool(2 + 2 * engine.spec.blocks(130, engine.spec.slots(130))):
        answers = engine.serve(jobs, lambda step: engine.engine.abort_request(["1"] if step == 8 else []))
        completed = {name: answer for name, answer in answers.items() if answer.outputs[0].finish_reason == "length"}
        assert {answer.request_id for answer in completed.values()} == {"0", "2", "3", "4"}
        check(served, completed, jobs)
    assert not engine.leaks()


def test_a_request_gives_up_prompt_and_state(served):
    """In the step after the prompt's end a request holds made slots and ring only, at most a block above those of B."""
    engine = served[0]
    engine.serve([Job(new=5, prompt=TEXT[:150], scored=False)])
    block_counts = [sum(map(bool, row)) for step in engine.recorder.blocks for *_, row in step.running.values()]
    compacted_blocks = -(-(BUDGET - WINDOW) // BLOCK) + -(-WINDOW // BLOCK)
    assert (
        engine.spec.state_blocks > 0
        and block_counts[0] == -(-150 // BLOCK) + engine.spec.state_blocks + compacted_blocks
    )
    assert block_counts[-1] == compacted_blocks <= -(-BUDGET // BLOCK) + 1 < block_counts[0]
