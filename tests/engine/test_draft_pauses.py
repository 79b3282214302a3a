"""Drafts that are refused are left out for a while on a CPU; answers are those without drafts."""

import itertools

import pytest
from engine.driving import BLOCK, preempt_all
from engine.proposer import CONFIG, DRAFTS, DrawnDrafts, drafting
from engine.test_speculation import CASES, LENGTHS, jobs_of, plain, speculating
from engine.tiny_engine import running
from vllm import SamplingParams

from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run import draft_pauses
from kvpop_vllm.vllm_glue.run.draft_pauses import LONGEST, DraftPauses


def left_out(right, drafts=None) -> list[bool]:
    """Return of which steps drafts are left out.

    Args:
        right: number of right drafts of each step, if it has as many.
        drafts: number of drafts that are proposed for each step, DRAFTS unless given.
    """
    pauses, position, steps = DraftPauses(), 100, []
    for number, proposed in zip(right, itertools.repeat(DRAFTS) if drafts is None else drafts, strict=False):
        steps.append(pauses.leaves_out(position, proposed))
        position += 1 + (0 if steps[-1] else min(number, proposed))
    return steps


def test_pauses_grow_while_drafts_are_refused():
    """After two refused steps 2 without drafts, then one with drafts and 4, 8, ... without."""
    steps = left_out(itertools.repeat(0, 200))
    lengths = [len(list(group)) for pauses, group in itertools.groupby(steps) if pauses]
    assert lengths[:7] == [2, 4, 8, 16, LONGEST, LONGEST, LONGEST]
    with_drafts = [len(list(group)) for pauses, group in itertools.groupby(steps) if not pauses]
    assert with_drafts[:7] == [2, 1, 1, 1, 1, 1, 1]


def test_an_accepted_draft_ends_pauses():
    right = [0, 0, 9, 9, 0, 9, 9, 9, 9, 1, 0, 0, 9]  # the 9s fall into pauses, in which nothing is tried
    assert left_out(right) == [False] * 2 + [True] * 2 + [False] + [True] * 4 + [False] * 3 + [True]


def test_steps_without_drafts_refuse_none():
    """N-grams are not found at every step. A step without drafts neither counts nor begins a pause."""
    assert not any(left_out(itertools.repeat(0, 40), itertools.repeat(0)))
    steps = left_out(itertools.repeat(0, 12), [DRAFTS, 0, DRAFTS, 0, *[DRAFTS] * 8])
    assert steps == [False] * 3 + [True] * 2 + [False] + [True] * 4 + [False, True]


@pytest.mark.parametrize("right", [0, DRAFTS])
def test_an_engine(case, right):
    """30 steps of which none is foreseen verify drafts in 5; drafts that are right are all verified."""
    setup, prompt = case("llama", "streaming-llm"), {"prompt_token_ids": random_prompt(90, seed=1)}
    sampling = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True, detokenize=False)
    options = {"speculative_config": CONFIG, "block_size": BLOCK, "disable_log_stats": False}
    with running(setup.model, setup.settings, **options) as llm:
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        text = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        with drafting([text], itertools.repeat(right)):
            (with_drafts,) = llm.generate([prompt], sampling, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert with_drafts.outputs[0].token_ids == answer.outputs[0].token_ids
    drafts, accepted = (counts[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    assert (drafts, accepted) == ((6, 24) if right else (5, 0))


@pytest.mark.parametrize("name", ["state, protected", "rounds, protected"])
def test_sixteen_requests(case, name):
    """Pauses begin and end at other times for each. All are preempted once, and one is aborted."""
    kind, policy, options = CASES[name]
    with speculating(case(kind, policy, **options)) as engine:
        jobs, counts = jobs_of([*LENGTHS, *LENGTHS[:6]], 40), itertools.cycle([0, 0, 0, 0, DRAFTS, 1, 0])
        managers = engine.recorder.scheduler.kv_cache_manager.coordinator.single_type_managers

        paused = []

        def disturb(step):
            paused.append(sum(pauses.left > 0 for manager in managers for pauses in manager.pauses.values()))
            if step == 15:
                preempt_all(engine.recorder.scheduler)
            if step == 20:
                engine.engine.abort_request(["3"])

        with drafting(plain(engine, jobs), counts):
            answers = engine.serve(jobs, disturb)
        assert any(1 < number < len(jobs) for number in paused)
        engine.check({name: answer for name, answer in answers.items() if answer.request_id != "3"})
        assert not any(manager.pauses for manager in managers)


def test_a_seed_gives_the_tokens_that_it_gives_without_pauses(case, monkeypatch):
    setup, config = case("llama", "streaming-llm"), CONFIG | {"model": "engine.proposer.DrawnDrafts"}
    monkeypatch.setattr(DrawnDrafts, "tokens", (3, 5))
    prompts = [{"prompt_token_ids": random_prompt(60, seed=seed)} for seed in range(4)]
    sampling = [SamplingParams(temperature=1, seed=seed, max_tokens=40, detokenize=False) for seed in range(4)]
    with running(setup.model, setup.settings, speculative_config=config, block_size=BLOCK) as llm:
        answers = []
        for longest in (LONGEST, 0):
            monkeypatch.setattr(draft_pauses, "LONGEST", longest)
            answers.append([answer.outputs[0].token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)])
    assert answers[0] == answers[1]
