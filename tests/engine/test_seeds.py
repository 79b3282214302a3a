"""Requests with seeds among others, in chunks: the engine of vLLM 0.32 stops there on a CPU without the plugin's mend."""

import pytest
from engine.driving import Job, watched


@pytest.fixture(scope="module")
def engine(case):
    matrix_case = case("llama", "streaming-llm")
    with watched(matrix_case.model, matrix_case.settings, None, num_gpu_blocks_override=129) as engine:
        yield engine


def test_a_seed_gives_the_same_tokens_in_chunks(engine):
    """Tokens that are drawn at the end of each chunk and discarded do not count as draws."""
    jobs = [Job(60, new=16, scored=False, temperature=1.0), Job(45, new=16, scored=False)]
    tokens = []
    for chunk in (None, 7):
        engine.chunk(chunk)
        answers = engine.serve(jobs)
        tokens.append([answers[engine.names[str(i)]].outputs[0].token_ids for i in range(2)])
    assert len(engine.chunks(engine.names["0"])) > 8, "the prompt was read in chunks"
    assert tokens[0] == tokens[1] and len(set(tokens[0][0])) > 4


def test_an_abort_next_to_it_changes_no_draw(engine):
    """Rows of a step move when a request ends; each generator stays with its request."""
    engine.chunk(7)
    job, other_job = Job(60, new=16, scored=False, temperature=1.0), Job(30, new=40, scored=False)
    aborted = []

    def each_step(step: int) -> None:
        if step == 3:
            engine.engine.abort_request([engine.names["1"]], internal=True)
            aborted.append(step)

    first = engine.serve([job])[engine.names["0"]].outputs[0].token_ids
    again = engine.serve([job, other_job], each_step)[engine.names["0"]].outputs[0].token_ids
    assert aborted and first == again
