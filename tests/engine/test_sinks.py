"""A model with attention sinks under every policy, judged by the oracle of kinds; test_kinds.py has more requests.

An engine under `attention-matching` is compared with a `KVpopCache` instead, as in test_attention_matching.py.
"""

import pytest
from engine.driving import Job, preempt_all, serving, watched
from engine.judge import KindsJudge
from engine.kinds import BLOCK, check_made_slots
from engine.matrix import BUDGET, make_case
from policies.matrix import ROWS

from kvpop_vllm.supported import FULL
from kvpop_vllm.testing import OraclePolicy

JOBS = [Job(1, new=70), Job(57, new=40), Job(130, new=20), Job(200, new=6)]
CASES = {
    name: (name, {}) for name, row in ROWS.items() if row.scorer != "prompt matching" and row.allocator == "uniform"
}
CASES |= {
    "kvpop, moments": ("kvpop", {"correction": "moment"}),
    "h2o, pyramid": ("h2o", {"allocator": "pyramid"}),
    "h2o, protected": ("h2o", {"protect_prompt": 40}),
    "momentkv, protected": ("momentkv", {"protect_prompt": True}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if ROWS[policy].gate else pytest.mark.slow) for name, (policy, _) in CASES.items()],
)
def test_every_policy(family, tmp_path, name):
    """Retained tokens, log-probabilities and tokens are the oracle's, in chunks and after preemption."""
    policy, options = CASES[name]
    row = ROWS[policy]
    folder, oracle = family("granite_swa" if row.calibrated else "gpt_oss")  # the oracle of statistics has no YaRN
    if row.learned:
        options = options | {"layers": [i for i, kind in enumerate(oracle.kinds) if kind == FULL]}
    if row.compresses:
        options = options | {"protect_prompt": True}
    case = make_case(folder, tmp_path / "scorer", policy, judged=KindsJudge, **options)
    if row.keeps_all:
        case = case._replace(settings={"policy": policy}, judge=KindsJudge(folder, OraclePolicy.full()))
    with serving(case, block_size=BLOCK, num_gpu_blocks_override=241) as engine:
        engine.chunk(16)
        answers = engine.serve(JOBS)
        case.judge.check(answers, engine.recorder.retained)
        engine.engine.reset_prefix_cache()
        engine.chunk(None)
        jobs = [Job(57, new=40, scored=False), Job(90, new=20, scored=False)]
        answers = engine.serve(jobs, lambda step: preempt_all(engine.recorder.scheduler) if step == 9 else None)
        assert set(engine.recorder.preemptions.values()) == {1}
        case.judge.check(answers, engine.recorder.retained)
        engine.engine.reset_prefix_cache()


@pytest.mark.slow
def test_made_slots(family):
    """tests/policies/test_attention_matching.py compares the cache with a naive fit."""
    folder, _ = family("gpt_oss")
    settings = {"policy": "attention-matching", "budget": BUDGET}
    with watched(folder, settings, block_size=BLOCK, num_gpu_blocks_override=241) as engine:
        answers = engine.serve([Job(n, new=30, scored=False) for n in (20, BUDGET + 1, 130)])
    check_made_slots(folder, settings, answers)
