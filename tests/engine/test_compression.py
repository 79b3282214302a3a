"""Prompts that are held until their end and then compressed, in ways that test_fidelity.py leaves out."""

import pytest
from engine.driving import BLOCK, VOTERS, Job, serving

from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(260, seed=94)


@pytest.fixture(scope="module", params=[pytest.param("snapkv", marks=pytest.mark.slow), "adakv"])
def engine(request, case):
    options = {"max_model_len": 512, "num_gpu_blocks_override": 181}
    with serving(case("qwen3", request.param, protect_prompt=True), **options) as engine:
        yield engine


def test_hits(engine):
    """All whole blocks before the voting queries are hit, within one step and in later ones.

    Blocks of a request that has been compressed are hit while another request still reads them.
    """
    engine.chunk(None)
    jobs = [Job(new=40, prompt=TEXT[:n], scored=False) for n in (150, 150, 150, 90, 49, 47)]
    answers = engine.serve(jobs)
    hits = {a.request_id: a.num_cached_tokens for a in answers.values()}
    assert hits["0"] == 0 and hits["1"] == hits["2"] == (150 - VOTERS) // BLOCK * BLOCK
    assert hits["3"] == (90 - VOTERS) // BLOCK * BLOCK and hits["4"] == 16 and hits["5"] == 0
    engine.check(answers)
    engine.chunk(7)
    late = {3: Job(new=9, prompt=TEXT[:200], scored=False), 14: Job(new=9, prompt=TEXT[:150], scored=False)}
    answers = engine.serve(
        [Job(1, new=60, scored=False), Job(new=20, prompt=TEXT[:150], scored=False)],
        lambda step: step in late and engine.add(f"late {step}", late[step]),
    )
    assert len(answers) == 4 and max(a.num_cached_tokens for a in answers.values()) >= 112
    engine.check(answers)


def test_a_resumed_chunk_may_cross_the_end(engine):
    """A chunk may contain the end of the prompt and all tokens that were generated after it."""

    def interrupt(step):
        if step == 30:
            engine.engine.reset_prefix_cache(reset_running_requests=True)

    engine.chunk(None)
    answers = engine.serve([Job(length=n, new=60, scored=False) for n in (20, 70, 120)], interrupt)
    assert set(engine.recorder.preemptions.values()) == {1}
    assert max(max(engine.chunks(name)) for name in answers) == 120 + 30
    engine.check(answers)
