"""The improvement of a table of shares, with losses that are known."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.cache.ranks import Shard
from kvpop_vllm.calibrate.division import Curve
from kvpop_vllm.calibrate.passes import Choice
from kvpop_vllm.calibrate.plan import FACTORS, GROUPS, ROUNDS
from kvpop_vllm.calibrate.stages import Stages
from kvpop_vllm.roles import Retention

LAYERS, SINKS, WINDOW, BUDGET = 3, 4, 8, 112
CURVES = [Curve(layer, (0,), (0.0, 1.0), (1.0, 0.0)) for layer in range(LAYERS)]
"""Curves of all layers, whose losses do not matter here."""


class KnownLosses(Stages):
    """Stages whose divergence is a function of each layer's long-range slots.

    Args:
        loss: function of ``slots [layers]``.
        start: shares ``[layers]`` of the table ``start``.
        further: shares of further tables, by name.
    """

    def __init__(self, loss, start: list[float], **further: list[float]):
        shape = SimpleNamespace(num_layers=LAYERS, num_kv_heads=1)
        budgets = {"budget": BUDGET, "budgets": [BUDGET], "shards": [Shard((0, LAYERS), (0, 1))]}
        plan = SimpleNamespace(unit="layer", decides="tova", shape=shape, rounds=ROUNDS, **budgets)
        starts = {"start": start} | further
        tables = {name: torch.tensor(shares, dtype=torch.float64).unsqueeze(1) for name, shares in starts.items()}
        passes = SimpleNamespace(tables=tables)
        super().__init__(plan, None, None, passes, None)
        self.loss, self.measured = loss, {}

    def _roles(self, budget):
        return Retention(budget, SINKS, WINDOW)

    def _choice(self, budget, table):
        return Choice("tova", budget, None, table)

    def _kl(self, choices):
        return [self._of_choice(choice) for choice in choices]

    def _of_choice(self, choice: Choice) -> float:
        table = self.passes.tables[choice.shares].squeeze(1)
        slots = table / table.mean() * self._roles(choice.budget).topk
        loss = float(self.loss(slots))
        if choice.budget == BUDGET:
            self.measured[choice.shares] = loss
        return loss

    def improved(self) -> str:
        """Return the name of the best table found from ``start`` on."""
        scores = self._measured(list(self.passes.tables))
        return self.improve(scores, CURVES)


def unlike(slots: torch.Tensor) -> torch.Tensor:
    """Return a loss in which layers need 1, 2 and 9 of 12 slots, and the worst one decides."""
    return 0.1 * (torch.tensor([1.0, 2.0, 9.0]) / slots.clamp_min(0.1)).amax()


@pytest.mark.parametrize("start", [[1.0, 1.0, 1.0], [2.0, 0.5, 0.5], [0.6, 0.6, 1.8], [0.01, 2.98, 0.01]])
def test_the_best_table_of_all_rounds_is_taken(start):
    """Rounds go on while tables get better, and a worse one of the last round is not taken."""
    stages = KnownLosses(unlike, start)
    best = stages.improved()
    assert stages.measured[best] == min(stages.measured.values()) < 0.0045, "0.004 is possible"


def test_no_table_has_more_slots_than_another():
    """A layer gets what others give, also where single changes are measured."""
    stages = KnownLosses(unlike, [0.6, 0.6, 1.8])
    stages.improved()
    means = torch.stack([table.mean() for table in stages.passes.tables.values()])
    assert len(means) > 20 and torch.allclose(means, torch.ones_like(means))


def test_each_rank_keeps_its_slots():
    stages = KnownLosses(unlike, [1.0, 1.0, 1.0])
    stages.plan.shards = [Shard((0, 2), (0, 1)), Shard((0, 2), (1, 2)), Shard((2, 3), (0, 2))]
    before = torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.5, 0.5]], dtype=torch.float64)
    after = stages._exchanged(before, [(0, (0,), 3.0), (2, (0, 1), 0.25)])
    assert after.tolist() == [[1.5, 1.0], [0.5, 2.0], [0.5, 0.5]]


def test_a_table_that_nothing_is_better_than_stays():
    """Each table but the first one loses more."""
    stages = KnownLosses(lambda slots: 0.01 + (slots - 100).abs().sum(), [1.0, 1.0, 1.0])
    assert stages.improved() == "start"
    rounds = {re.match(r"layer(-0)?-round-\d", name)[0] for name in stages.measured if name != "start"}
    assert rounds == {"layer-0-round-0", *(f"layer-round-{i}" for i in range(len(FACTORS) - 1))}, (
        "each size is tried once"
    )


def first_needs(slots: int):
    """Return a loss in which the first of three layers needs a number of 300 slots, and the others none."""
    return lambda table: 0.01 + ((table[0] - slots) / 100).pow(2)


@pytest.mark.parametrize("needed, name", [(204, ""), (152, "-damped"), (155, "-0-0-more")])
def test_changes_are_made_alone_or_together_or_half(needed, name):
    """The first layer gets 155 slots by a change of its own, and 204 with those of the other layers."""
    stages = KnownLosses(first_needs(needed), [1.0, 1.0, 1.0])
    changed, _ = stages._round("changed", FACTORS[0], "start", [[curve] for curve in CURVES])
    assert changed == f"changed{name}" and stages.measured[changed] == min(stages.measured.values())


def test_many_heads_change_in_groups(monkeypatch):
    """A round of 4,096 heads in two ranks measures no more changes than one of 16, each of neighbours in a rank."""
    layers, heads = 64, 64
    stages = KnownLosses(unlike, [1.0, 1.0, 1.0])
    stages.plan.shards = [Shard((0, layers), (0, heads // 2)), Shard((0, layers), (heads // 2, heads))]
    curves = [Curve(layer, (head,), (0.0, 1.0), (1.0, 0.0)) for layer in range(layers) for head in range(heads)]
    groups = stages._groups(curves)
    assert len(groups) == GROUPS and {len(group) for group in groups} == {layers * heads // GROUPS}
    assert all(len({curve.heads[0] < heads // 2 for curve in group}) == 1 for group in groups)
    assert sorted((curve.layer, curve.heads) for group in groups for curve in group) == [
        (c.layer, c.heads) for c in curves
    ]
    stages.passes.tables["start"] = torch.ones(layers, heads, dtype=torch.float64)
    measured = []
    monkeypatch.setattr(stages, "_kl", lambda choices: [measured.append(choice.shares) or 1.0 for choice in choices])
    stages._round("changed", 2.0, "start", groups)
    shrunk = stages.passes.tables["changed-0-0-of-256-fewer"]
    assert len(measured) == 2 * GROUPS + 1 + 3
    assert float(shrunk[0, 0] * 2) == pytest.approx(float(shrunk[63, 0])) and float(shrunk[0, 63]) == 1.0
    assert float(shrunk.mean()) == pytest.approx(1.0)


def test_small_steps_find_what_large_ones_do_not():
    """The first layer needs 104 slots of 300: it loses more with 120 and with 111, but less with 106."""
    stages = KnownLosses(first_needs(104), [1.0, 1.0, 1.0])
    best = stages.improved()
    assert re.match("layer-round-[1-9]", best) and stages.measured[best] < 0.0105


def two_valleys(slots: torch.Tensor) -> torch.Tensor:
    """Return a loss with a valley at 20 slots of the first layer, and a deeper one at 160."""
    shallow, deep = 0.02 + ((slots[0] - 20) / 100).pow(2), 0.01 + ((slots[0] - 160) / 100).pow(2)
    return torch.minimum(shallow, deep)


def test_a_table_that_is_worse_may_lead_to_a_better_one():
    """From the best start no step reaches the deeper valley."""
    near, far = [0.2, 1.4, 1.4], [1.4, 0.8, 0.8]
    alone = KnownLosses(two_valleys, near)
    assert alone.measured[alone.improved()] > 0.0199
    stages = KnownLosses(two_valleys, near, far=far)
    best = stages.improved()
    assert stages.measured["start"] < stages.measured["far"] and stages.measured[best] < 0.0105


def test_a_few_starts_are_improved():
    stages = KnownLosses(unlike, [1.0, 1.0, 1.0], **{name: [1.0, 1.0, 1.0] for name in "abcd"})
    stages.improved()
    starts = {name.split("-round")[0] for name in stages.measured if "round" in name}
    assert starts == {"layer", "layer-0", "layer-1", "layer-2"}


def test_rounds_are_bounded(monkeypatch):
    """A divergence that falls for ever ends after the last round."""
    stages, losses = KnownLosses(unlike, [1.0, 1.0, 1.0]), itertools.count(1e9, -1)
    monkeypatch.setattr(stages, "_kl", lambda choices: [next(losses) for _ in choices])
    assert stages.improved().startswith(f"layer-round-{ROUNDS - 1}")
    assert {f"layer-round-{ROUNDS}", f"layer-0-round-{ROUNDS}"}.isdisjoint(stages.passes.tables)


def test_no_rounds_take_the_best_of_the_first_tables():
    stages = KnownLosses(unlike, [1.0, 1.0, 1.0], better=[0.5, 0.5, 2.0])
    stages.plan.rounds = 0
    assert stages.improved() == "better" and len(stages.measured) == 2
