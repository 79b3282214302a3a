"""An engine with published gates of KVzap equals the oracle, which reads what `kvpop import` made of them.

Prompts have no token twice and answers fit into the window, because equal tokens have equal scores in a first layer.
"""

from pathlib import Path

import pytest
from engine.driving import Job, watched
from engine.judge import Judge
from hf.prompts import distinct

from kvpop_vllm.scorers.published import import_gates
from kvpop_vllm.testing import OraclePolicy, write_tiny_model

DATA = Path(__file__).parents[1] / "data" / "kvzap"
WINDOW, BUDGET = 16, 56


@pytest.mark.parametrize(
    "kind, threshold", [("mlp", None), pytest.param("linear", -0.3, marks=pytest.mark.slow)], ids=["mlp", "linear"]
)
def test_published_gates_are_served_as_they_are(tmp_path, kind, threshold):
    """The command gives a budget and a window; the folder has neither. Some tokens are below the threshold."""
    model = str(write_tiny_model(tmp_path / "model", "qwen3"))
    import_gates(DATA / kind, tmp_path / "ours", window=WINDOW, topk=BUDGET - 4 - WINDOW)
    early = {} if threshold is None else {"threshold": threshold}
    settings = {"policy": "kvzap", "scorer": str(DATA / kind), "budget": BUDGET, "window": WINDOW} | early
    judge = Judge(model, OraclePolicy.from_scorer(tmp_path / "ours", **early))
    with watched(model, settings, judge) as engine:
        for chunk in (7, None):
            engine.chunk(chunk)
            jobs = [Job(prompt=distinct(length), new=WINDOW) for length in (1, 31, 57, 90, 150, 200)]
            engine.check(engine.serve(jobs))
    assert judge.decisions > 200
