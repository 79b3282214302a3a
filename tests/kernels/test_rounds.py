"""Rounds: when they are due, chunks cut there, and both rankings of tokens that are easy to judge."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from policies.matrix import ROPE, made, random_statistics_folder

from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels.ops import Redundancy, RetentionRule, SampledMass
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.policies.allocators import proportional
from kvpop_vllm.roles import Retention
from kvpop_vllm.rules import rounds
from kvpop_vllm.rules.rounds import Tokens, cuts, interval, layer_rounds, sampled_mass, without_redundancy
from kvpop_vllm.testing.oracle_rounds import distances, retained_by_rounds
from kvpop_vllm.testing.oracle_statistics import read_query_statistics

HEADS, GROUP, SIZE = 2, 2, 32
LANES = torch.arange(HEADS)


def rule_of(kind: str, sinks: int = 2, window: int = 6, **options) -> RetentionRule:
    scorer = SampledMass(GROUP, LANES, **options) if kind == "vase" else Redundancy(GROUP, **options)
    return RetentionRule(sinks, window, torch.zeros(HEADS, dtype=torch.float64), rounds=scorer)


MEASURED = Path(__file__).parents[2] / "examples/scorers/smollm2-135m-kvpop/kvpop_config.json"
"""Config with measured shares of heads, one of which has no long-range slot."""
METHODS = {"sampled mass": 64, "redundancy": 128}
"""m of methods, by their names in the oracle."""


@pytest.mark.parametrize("topk, every", [(0, 1), (1, 1), (2, 1), (36, 18), (127, 63), (128, 64), (4096, 64)])
def test_interval(topk, every):
    assert interval(64, topk) == every


def test_a_chunk_is_cut_where_rounds_are_due():
    """Cuts begin at the last round before evictions; B = 48 and k = 40 give a round every 20 tokens."""
    equal = layer_rounds(64, 48, (48, 48), 2, 6, 0)
    assert equal == [(Retention(48, 2, 6), 20, None)]
    assert cuts(equal, 0, 28) == [28] and cuts(equal, 0, 40) == [40]
    assert cuts(equal, 0, 100) == [40, 60, 80, 100] and cuts(equal, 45, 101) == [60, 80, 100, 101]
    assert cuts(equal, 60, 61) == [61]
    protected = layer_rounds(64, 48, (48, 48), 2, 6, 1000)
    assert cuts(protected, 0, 1101) == [1040, 1060, 1080, 1100, 1101], "46 slots after the prefix"


def test_unequal_heads_have_rounds_by_their_own_slots():
    """With k = 40 in the mean, equal heads have a round every 20 tokens, and no head has one more often than every 10."""
    large = Retention(48, 2, 6), 20, [0, 2]
    few = layer_rounds(64, 48, (48, 34, 48, 8), 2, 6, 0)
    assert few == [large, (Retention(34, 2, 6), 10, [1])], "a head of 26 slots cannot have 20 tokens between rounds"
    few = layer_rounds(64, 48, (48, 19, 48, 18), 2, 6, 0)
    assert few == [large, (Retention(19, 2, 6), 10, [1])], "a head of 10 slots has no rounds"
    assert cuts(few, 0, 60) == [10, 20, 30, 40, 50, 60], "the head of 19 slots evicts from position 19 on"
    none = layer_rounds(64, 48, (18, 8), 2, 6, 0)
    assert none == [] and cuts(none, 0, 60) == [60]
    assert layer_rounds(64, 48, (248, 248), 2, 6, 0) == [(Retention(248, 2, 6), 20, None)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [300, 512, 1024])
def test_measured_shares_cut_a_prompt_into_few_chunks(method, budget):
    """A prompt of 7,500 tokens has at most twice the rounds of equal heads in any layer, also after a prefix.

    With a distance of half of each head's own slots there were 768 chunks at B = 300, where equal heads have 115.
    """
    shares, every = json.loads(MEASURED.read_text())["shares"], METHODS[method]
    sinks, window = 4, 64
    budgets = proportional(shares, Retention(budget, sinks, window), len(shares), len(shares[0])).tolist()
    assert min(map(min, budgets)) == sinks + window, "a head without long-range slots"
    for prefix in (0, 1000):
        end = 7500 + prefix
        equal = layer_rounds(every, budget, (budget,) * 3, sinks, window, prefix)
        unequal = [layer_rounds(every, budget, tuple(heads), sinks, window, prefix) for heads in budgets]
        largest = max(len(cuts(rounds, prefix, end)) for rounds in unequal)
        (distance,) = (roles.every for roles in equal)
        assert len(cuts(equal, prefix, end)) <= 7500 // distance + 1
        assert largest <= 2 * (7500 // distance + 2) < 320
        for heads, ranked in zip(budgets, unequal, strict=True):
            intervals = [math.inf] * 3
            for roles in ranked:
                assert roles.retention.topk > roles.every, "some ranked tokens are kept until the next round"
                for head in range(3) if roles.heads is None else roles.heads:
                    intervals[head] = roles.every
            assert intervals == distances(method, [size - sinks - window for size in heads], budget - sinks - window)


def tokens_of(keys, values, queries, sinks=0, window=4) -> Tokens:
    """Return one head's tokens from ``keys, values [n, D]`` and ``queries [c, G, D]``."""
    positions = torch.arange(len(keys)).unsqueeze(0)
    return Tokens(positions, keys.unsqueeze(0), values.unsqueeze(0), queries.unsqueeze(0), sinks, window)


def test_values_of_the_widest_range_are_above_all_others():
    """The widest values rank first, whatever their attention: a quarter of the tokens before the window.

    Sinks are counted in the quarter.
    """
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(44, SIZE, generator=draw) for _ in range(2))
    wide = torch.tensor([7, 8, 20, 33])
    values[wide] *= 10
    values[38:, 0] = 100.0  # tokens 38 and 39 are the last two before the window
    mass = sampled_mass(
        tokens_of(keys, values, torch.zeros(4, GROUP, SIZE), 4), SampledMass(GROUP, LANES), 1.0, LANES[:1], 43
    )
    best = mass[0].argsort(descending=True)[:6] + 4
    assert set(best.tolist()) == {*wide.tolist(), 38, 39} and set(best[:2].tolist()) == {38, 39}
    assert bool((mass[0].sort().values[:-6] < 100).all())


def test_a_sample_is_weighted_with_attention():
    """With equal values, e times the attention gives a token odds of e to rank higher, over many seeds."""
    keys = torch.zeros(28, SIZE)
    keys[:12, 0], keys[12:24, 0] = 1.0, 0.0
    queries = torch.zeros(4, GROUP, SIZE)
    queries[..., 0] = 1.0
    kind = SampledMass(GROUP, LANES, neighbours=1, large=100)
    lanes, seeds = torch.zeros(1, dtype=torch.int64), torch.arange(1500).unsqueeze(1) * 7919
    tokens = tokens_of(keys, torch.zeros(28, SIZE), queries)
    above = [
        bool(mass[0, 3] > mass[0, 17]) for mass in (sampled_mass(tokens, kind, 1.0, lanes + seed, 27) for seed in seeds)
    ]
    expected = math.e / (1 + math.e)
    assert abs(sum(above) / len(above) - expected) < 4 * math.sqrt(expected * (1 - expected) / len(above))


def test_of_tokens_that_resemble_one_another_the_newest_is_spared():
    """Each of four equal keys spares the newest of the others.

    The newest is therefore counted by none, the one before it by two and the other two by three. Other keys
    resemble none.
    """
    keys = torch.eye(SIZE)[:28].clone()
    keys[[3, 9, 17, 21]] = keys[3].clone()
    scores = without_redundancy(tokens_of(keys, keys, torch.zeros(8, GROUP, SIZE)), Redundancy(GROUP), 1.0)[0]
    shares = torch.zeros(28)
    shares[3] = shares[9] = 3 / 28
    shares[17] = 2 / 28
    expected = 0.1 / 24 - 0.9 * shares.softmax(0)[:24]
    assert torch.allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("protected", [0, 20])
@pytest.mark.parametrize("kind", ["vase", "rkv"])
def test_nothing_is_ranked_where_there_is_nothing_to_rank(kind, protected):
    """As in the last layer of a small pyramid: no long-range slots, so the window is all."""
    k = torch.randn(HEADS, 90, SIZE, generator=torch.Generator().manual_seed(4))
    rows = LayerRows(rule_of(kind), 8, k[None], 1.0, protected=protected)
    for a, b in ((0, 50), (50, 51), (51, 90)):
        rows.append(*(x[None, :, a:b] for x in (k.repeat(2, 1, 1), k, k)))
    positions = rows.held_by_rows()[0].nonzero()[:, 1].view(HEADS, -1)
    assert positions.tolist() == [[*range(protected or 2), *range(84, 90)]] * HEADS


@pytest.mark.parametrize("kind, budget", [("vase", 300), ("rkv", 420)])
@pytest.mark.parametrize("protected", [0, 70])
def test_at_sizes_of_serving(kind, budget, protected):
    """Rounds of 64 and 128 tokens, a window of as many tokens as queries that weigh; retained sets are the oracle's at each of their ends."""
    sinks, window = (4, 64) if kind == "vase" else (0, 8)
    length = budget + protected + 300
    draw = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(heads, length, SIZE, generator=draw) for heads in (HEADS * GROUP, HEADS, HEADS))
    topics = torch.randn(HEADS, 9, SIZE, generator=draw)
    k += (
        topics[:, torch.randint(0, 9, (length,), generator=draw)] * torch.rand(length, 1, generator=draw) * 3
    )  # some are alike
    rule, topk = rule_of(kind, sinks, window), budget - sinks - window
    assert interval(rule.rounds.every, topk) == rule.rounds.every
    how, seeds = {"vase": "sampled mass", "rkv": "redundancy"}[kind], (0, 3)
    exact = (x.double() for x in (q, k, v))
    visible, margins, _, _ = retained_by_rounds(*exact, how, 0, seeds, protected, sinks, window, topk)
    assert float(margins.min()) > 5e-9, "a near-tie: choose another seed"
    rows, start = LayerRows(rule, budget, k[None], SIZE**-0.5, protected=protected, seed=3), 0
    for count in (budget, 1, 63, 64, 1, 100, length - budget - 229):
        rows.append(*(x[None, :, start : start + count] for x in (q, k, v)))
        start += count
        assert torch.equal(rows.held_by_rows()[0], visible[:, start - 1, :start]), f"after {start} tokens"
    assert not torch.equal(visible[0, -1], visible[1, -1])


@pytest.mark.parametrize("protected, seed", [(0, 20), (70, 20)])
def test_heads_of_unequal_shares_at_sizes_of_serving(tmp_path, protected, seed):
    """One head has a round every 121 tokens, the other every 61; with these seeds rounding decides nothing."""
    shape = ModelShape("llama", 2, HEADS, SIZE, 4096, None, HEADS * GROUP, ROPE)
    folder = random_statistics_folder(tmp_path, shape)
    rule = made("triattention", 420, shape, calibration=str(folder)).layer_rule(0, slice(0, HEADS))
    budgets, length = torch.tensor([420, 330], dtype=torch.int32), 520 + protected
    topk = [budget - rule.sinks - rule.window for budget in budgets.tolist()]
    groups = layer_rounds(128, 375, tuple(budgets.tolist()), rule.sinks, rule.window, protected)
    assert [roles.every for roles in groups] == [121, 61]
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, length, SIZE, generator=draw) for heads in (HEADS * GROUP, HEADS, HEADS))
    exact, statistics = (x.double() for x in (q, k, v)), read_query_statistics(folder)[0]
    roles = protected, rule.sinks, rule.window, topk, statistics
    visible, margins, _, _ = retained_by_rounds(*exact, "expected logits", 0, (0, 0), *roles)
    assert float(margins.min()) > 1e-4, "a near-tie: choose another seed"
    rows = LayerRows(rule, budgets, k[None], SIZE**-0.5, protected=protected)
    for start, end in itertools.pairwise((0, 420, 421, 484, length)):
        rows.append(*(x[None, :, start:end] for x in (q, k, v)))
        assert torch.equal(rows.held_by_rows()[0], visible[:, end - 1, :end]), f"after {end} tokens"


def test_cosines_in_blocks_are_those_of_all_pairs(monkeypatch):
    unit = torch.nn.functional.normalize(torch.randn(100, 6, generator=torch.Generator().manual_seed(7)), dim=-1)
    expected = rounds._redundancy(unit.unsqueeze(0), 0.5)
    monkeypatch.setattr(rounds, "BLOCK", 7)
    assert torch.allclose(rounds._redundancy(unit.unsqueeze(0), 0.5), expected, atol=1e-7)
