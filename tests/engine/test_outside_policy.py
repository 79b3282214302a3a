"""A policy of another package in the engine: one file, one entry point, and an oracle like the matrix's."""

import pytest
import torch
from engine.driving import Job, watched
from engine.judge import Judge
from engine.matrix import BUDGET
from policies.outside import importable, install

from kvpop_vllm import policies
from kvpop_vllm.config import PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import OraclePolicy


@pytest.fixture
def folder(tmp_path):
    with importable(tmp_path):
        yield tmp_path


def test_a_policy_from_outside(tiny_model, folder):
    install(folder)
    settings = {"policy": "projection", "budget": BUDGET}
    policy = policies.get("projection")(PolicySettings(**settings), ModelShape("qwen3", 2, 2, 32, 1024))
    scorer = {
        "config": {"scorer": "linear"},
        "layers": [
            {"weight": torch.nn.functional.pad(policy.weight(layer).double(), (0, 32)), "bias": torch.zeros(2).double()}
            for layer in (0, 1)
        ],
    }
    retention = policy.retention
    oracle = OraclePolicy(scorer, retention.sinks, retention.window, retention.topk, log_gamma=[[0.0, 0.0]] * 2)
    model = tiny_model("qwen3")
    with watched(model, settings, Judge(model, oracle)) as engine:
        for chunk in (7, None):
            engine.chunk(chunk)
            engine.check(engine.serve([Job(1, new=70), Job(BUDGET), Job(300, new=20)]))
