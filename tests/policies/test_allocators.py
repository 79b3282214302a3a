"""Allocators compared with their papers, and refusals."""

import functools
import json
import pickle
from dataclasses import replace

import pytest
import torch
from policies import matrix

from kvpop_vllm import policies
from kvpop_vllm.cache.ranks import layers_of_stages, shards_of
from kvpop_vllm.calibration.shares import SIZES, Calibration
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers.checkpoint import read_scorer, write_scorer
from kvpop_vllm.scorers.untrained import init_scorer
from kvpop_vllm.testing import write_tiny_model

make = functools.partial(matrix.made, budget=1024, shape=ModelShape("llama", 30, 3, 64, 8192, num_heads=9))


@pytest.mark.parametrize("name, budget", [("streaming-llm", 1024), ("tova", 333), ("h2o", 512)])
def test_pyramid_is_an_arithmetic_sequence(name, budget):
    """Long-range slots fall linearly over the layers, from 2 k - k / 20 to k / 20.

    All layers together hold as many tokens as equal ones.
    """
    policy = make(name, budget=budget, allocator="pyramid")
    shares, retention = policy.shares(), policy.retention
    assert shares.dtype == torch.int32 and shares.shape == (30, 3) and (shares == shares[:, :1]).all()
    assert int(shares.sum()) == budget * 90
    long_range = (shares[:, 0] - retention.first_long).double()
    exact = torch.linspace(2 * retention.topk - retention.topk / 20, retention.topk / 20, 30, dtype=torch.float64)
    assert (long_range - exact).abs().max() <= 1


def test_the_allocator_is_the_policys_own_or_the_one_asked_for():
    assert make("h2o").allocator == "uniform" and make("h2o").unequal_shares(slice(0, 3)) is None
    assert make("h2o", allocator="pyramid").unequal_shares(slice(1, 3)).heads == 2


def test_shares_of_a_file_are_parts_of_the_slots():
    """Sinks and window belong to every head, and rounding loses no slot."""
    small = functools.partial(matrix.made, "l2norm", 64, ModelShape("llama", 2, 2, 32, 256), sinks=4, window=10)
    policy = small(calibration=str(matrix.SHARES))
    assert (policy.shares() - 14).tolist() == [[75, 3], [47, 75]]  # of 4 x 50, by 1.51, 0.06, 0.94 and 1.51
    assert not policy.one_budget and policy.unequal_shares(slice(0, 2)).layers == 2
    assert (policy.budgets_of(policy.retention_of(39)) - 14).tolist() == [[38, 1], [23, 38]]
    assert policy.budgets_of(policy.retention_of(39)).sum() == 39 * 4
    assert small(calibration=str(matrix.SHARES), max_budget=80).max_budget == 80
    alike = policies.get("l2norm")(
        PolicySettings("l2norm", 64, calibration=str(matrix.SHARES)), policy.model, server_budget_only=True
    )
    with pytest.raises(ConfigError, match="gives all requests one budget here: leave --kv-budget out"):
        alike.retention_of(39)
    with pytest.raises(ConfigError, match="shares.json: shares must be 30 lists of 3 numbers"):
        make("h2o", calibration=str(matrix.SHARES))


@pytest.mark.parametrize("allocator", ["uniform", "pyramid"])
@pytest.mark.parametrize("name", ["h2o", "streaming-llm", "triattention"])
def test_another_allocator_takes_no_window_of_a_calibration(tmp_path, name, allocator):
    """The window was measured with the shares, so rows with equal shares have the policy's, as without a calibration."""
    shape = ModelShape("llama", 2, 2, 32, 4096, num_heads=4, rope=matrix.ROPE)
    folder = matrix.random_statistics_folder(tmp_path / "statistics", shape)
    plain = {"calibration": str(folder)} if name == "triattention" else {}
    expected = matrix.made(name, 516, shape, allocator=allocator, **plain).retention
    sizes = {size: getattr(shape, size) for size in SIZES}
    shares = ((1.5, 0.5), (1.0, 1.0))
    windows = dict.fromkeys(("h2o", "streaming-llm", "triattention"), 1 / 16)
    Calibration(**sizes, rope=shape.rope, unit="head", shares=shares, windows=windows, policy=name, budget=516).write(
        folder
    )
    calibrated = matrix.made(name, 516, shape, calibration=str(folder))
    assert calibrated.retention.window == (516 - calibrated.retention.sinks) // 16 and calibrated.unequal
    with_shares = matrix.made(name, 516, shape, calibration=str(folder), allocator=allocator)
    assert with_shares.retention == expected and with_shares.retention.window != calibrated.retention.window
    assert with_shares.retention_of(300) == matrix.made(name, 300, shape, allocator=allocator, **plain).retention
    assert with_shares.allocator == allocator and with_shares.unequal == (allocator == "pyramid")


def test_a_scorers_shares_hold_in_every_rank(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    config = init_scorer(model, tmp_path / "scorer", sinks=2, window=6, topk=16)
    shares = [[1.0, 2.0, *[1.0] * (config.num_kv_heads - 2)]] * config.num_layers
    _, layers = read_scorer(tmp_path / "scorer")
    write_scorer(tmp_path / "scorer", replace(config, shares=shares), layers)
    shape = ModelShape.of(model, 256)
    policy = matrix.made("kvpop", 24, shape, scorer=str(tmp_path / "scorer"))
    assert policy.allocator == "the scorer's shares" and not (policy.shares() == 24).all()
    policy.check_ranks(2)
    uniform = matrix.made("kvpop", 24, shape, scorer=str(tmp_path / "scorer"), allocator="uniform")
    shards = shards_of(layers_of_stages(shape.num_layers, 2), shape.num_kv_heads, 2)
    assert uniform.division(shards) is None
    division, table = policy.division(shards), policy.shares().tolist()
    assert division == pickle.loads(pickle.dumps(division)) and hash(division) == hash(policy.division(shards))
    for shares, part in zip(division.shares(24, policy.retention.window), shards, strict=True):
        layers = table[slice(*part.layers)]
        assert [list(layer) for layer in shares.budgets] == [layer[slice(*part.heads)] for layer in layers]
        assert shares.first == part.layers[0]
    raw = json.loads((tmp_path / "scorer/kvpop_config.json").read_text())
    for bad in (None, 0, False, "", {}, [[0.0]]):
        (tmp_path / "scorer/kvpop_config.json").write_text(json.dumps(raw | {"shares": bad}))
        with pytest.raises(ConfigError, match="kvpop_config.json: shares must be"):
            read_scorer(tmp_path / "scorer")


def test_one_layer_is_no_pyramid():
    policy = make("h2o", budget=256, shape=ModelShape("llama", 1, 3, 64, 8192), allocator="pyramid")
    assert policy.shares().tolist() == [[256] * 3]


@pytest.mark.parametrize("name", ["h2o", "streaming-llm", "random", "l2norm", "momentkv"])
def test_heads_divide_by_votes_alone(name):
    message = (
        f"ada compares tokens of different heads, and scores of --kv-policy {name} mean something within a head only"
    )
    with pytest.raises(ConfigError, match=message):
        make(name, budget=256, allocator="ada")


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv"])
def test_any_votes_can_be_divided_by(name):
    policy = make(name, budget=256, allocator="ada")
    assert policy.adaptive_head_budgets and (policy.shares() == 256).all()
    assert policy.rule(0, slice(0, 3)).compression.safe == 0.2
    policy.check_ranks(1)
    with pytest.raises(
        ConfigError,
        match=f"--kv-policy {name} has all heads of a layer divide a budget: set --tensor-parallel-size 1",
    ):
        policy.check_ranks(3)


def test_shares_of_a_class_of_its_own_hold_for_all_requests(monkeypatch):
    policy = make("streaming-llm")
    unlike = torch.tensor([1023, 1024, 1025], dtype=torch.int32).repeat(30, 1)
    monkeypatch.setattr(type(policy), "shares", lambda _: unlike)
    assert policy.one_budget and policy.unequal_shares(slice(0, 3)).heads == 3
    division = policy.division(shards_of([(0, 30)], 3, 3))
    assert [shares.counts for shares in division.shares(1024, 5)] == [{1023: 30}, {1024: 30}, {1025: 30}]


def test_stages_are_those_of_vllm():
    from vllm.distributed.utils import get_pp_indices

    for layers in range(1, 14):
        for stages in range(1, layers + 1):
            assert layers_of_stages(layers, stages) == [
                get_pp_indices(layers, stage, stages) for stage in range(stages)
            ]


@pytest.mark.parametrize(
    "shares, message",
    [
        (lambda policy: torch.full((30, 2), 100, dtype=torch.int32), r"gives shares that are not \(30, 3\) int32"),
        (lambda policy: torch.full((30, 3), 1025, dtype=torch.int32), "gives shares of more than the budget"),
        (
            lambda policy: torch.full((30, 3), 5, dtype=torch.int32),
            "leaves a head 5 tokens, less than sinks and window",
        ),
    ],
)
def test_shares_of_other_packages_are_checked(monkeypatch, shares, message):
    policy = make("streaming-llm")
    monkeypatch.setattr(type(policy), "shares", shares)
    with pytest.raises(ConfigError, match=message):
        policy.check_shares()
