"""Requests with their own budgets, windows, protection and seeds in one step, each compared with its own oracle."""

import pytest
from engine.driving import BLOCK, Job, Judges, serving
from engine.test_traffic import POLICIES
from policies.matrix import MILD_SHARES, SHARES

from kvpop_vllm.testing import random_prompt

TEXT = random_prompt(150, seed=96)
ASKS = (
    None,
    {"kv_budget": 26},
    {"kv_budget": 72},
    {"kv_budget": 33, "kv_protect_prompt": 0},
    {"kv_protect_prompt": 50},
    {"kv_budget": 64, "kv_protect_prompt": 7},
)
SEEDS = ({"kv_seed": 3}, {"kv_seed": 2**64 - 1, "kv_budget": 30})
HEADS, LAYERS = {"allocator": str(SHARES)}, {"allocator": "pyramid"}
QUICK = ("kvpop", {}), ("kvpop", HEADS)
SLOW = [(policy, {}) for policy in ("h2o", "dms-query", "momentkv", "vase", "triattention", "random")]
SLOW += [("h2o", LAYERS), ("triattention", {"allocator": str(MILD_SHARES)})]


@pytest.mark.parametrize(
    "policy, case_options", [*QUICK, *(pytest.param(*values, marks=pytest.mark.slow) for values in SLOW)]
)
def test_sixteen_of_all_kinds(case, policy, case_options):
    """Sixteen requests of one batch keep their own options, in chunks or whole, with hits or without.

    Where heads have unequal shares, the k of each is scaled to the request's budget.
    """
    kind, options = POLICIES.get(policy, POLICIES["h2o"])
    matrix_case = case(kind, policy, **options | case_options)
    settings = matrix_case.settings | {"max_budget": 72, "max_protect": 50}
    asks = ASKS + (SEEDS if policy in ("vase", "random") else ())
    lengths = (3, BLOCK, 41, 60, 90)
    jobs = [Job(new=40, prompt=TEXT[: lengths[i % 5]], asks=asks[i % len(asks)], scored=i % 3 == 0) for i in range(16)]
    judges = Judges(policy, matrix_case)
    with serving(matrix_case._replace(settings=settings), max_model_len=512, num_gpu_blocks_override=121) as engine:
        for chunk in (7, None):
            engine.chunk(chunk)
            answers = engine.serve(jobs)
            assert len(answers) == 16 and max(len(step.running) for step in engine.recorder.blocks) > 8
            engine.check_blocks()
            for name, answer in answers.items():
                judges.of(jobs[int(answer.request_id)]).check({name: answer}, engine.recorder.retained)
        assert len({answer.num_cached_tokens for answer in answers.values()}) > 2, "hits of what each protects"
    assert len(judges.by_options) == len(asks)
    judges.check_near_ties()
