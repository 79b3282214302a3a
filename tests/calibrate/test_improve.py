"""The improvement of a table of shares, with losses that are known."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.cache.ranks import Shard
from kvpop_vllm.calibrate.division import Curve
from kvpop_vllm.calibrate.passes import Choice
from kvpop_vllm.calibrate.plan import ROUNDS
from kvpop_vllm.calibrate.stages import Stages
from kvpop_vllm.roles import Retention

LAYERS, SINKS, WINDOW, BUDGET = 3, 4, 8, 112


class KnownLosses(Stages):
    """Stages whose divergence is a function of each layer's long-range slots.

    Args:
        loss: function of ``slots [layers]``.
        start: shares ``[layers]`` of the table ``start``.
    """

    def __init__(self, loss, start: list[float]):
        shape = SimpleNamespace(num_layers=LAYERS, num_kv_heads=1)
        plan = SimpleNamespace(
            unit="layer",
            budget=BUDGET,
            budgets=[BUDGET],
            decides="tova",
            shape=shape,
            shards=[Shard((0, LAYERS), (0, 1))],
        )
        passes = SimpleNamespace(tables={"start": torch.tensor(start, dtype=torch.float64).unsqueeze(1)})
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
        start = self._measured(["start"])["start"]
        curves = [Curve(layer, (0,), (0.0, 1.0), (1.0, 0.0)) for layer in range(LAYERS)]
        return self.improve("start", start, curves)


def unlike(slots: torch.Tensor) -> torch.Tensor:
    """Return a loss in which layers need 1, 2 and 9 of 12 slots, and the worst one decides."""
    return 0.1 * (torch.tensor([1.0, 2.0, 9.0]) / slots.clamp_min(0.1)).amax()


@pytest.mark.parametrize("start", [[1.0, 1.0, 1.0], [2.0, 0.5, 0.5], [0.6, 0.6, 1.8]])
def test_the_best_table_of_all_rounds_is_taken(start):
    """Rounds go on while tables get better, and a worse one of the last round is not taken."""
    stages = KnownLosses(unlike, start)
    best = stages.improved()
    tables = {name: loss for name, loss in stages.measured.items() if not name.endswith(("-fewer", "-more"))}
    assert best != "start" and tables[best] == min(tables.values()) < tables["start"]
    assert torch.isclose(stages.passes.tables[best].mean(), torch.tensor(1.0, dtype=torch.float64))


def test_a_table_that_nothing_is_better_than_stays():
    """Each table but the first one loses more."""
    stages = KnownLosses(lambda slots: 0.01 + (slots - 100).abs().sum(), [1.0, 1.0, 1.0])
    assert stages.improved() == "start"
    assert {"layer-round-0", "layer-round-0-damped"} <= set(stages.measured)
    rounds = {name.split("-")[2] for name in stages.measured if name.startswith("layer-round")}
    assert rounds == {"0", "1", "2"}, "each size of steps is tried once"


def test_the_half_way_table_is_taken_where_it_is_better():
    """The first layer needs 160 slots of 300, and its measured sizes of 100 and 212 give it 200."""
    stages = KnownLosses(lambda slots: 0.01 + ((slots[0] - 160) / 100).pow(2), [1.0, 1.0, 1.0])
    assert stages.improved() == "layer-round-1-damped"
    assert stages.measured["layer-round-1-damped"] == min(stages.measured.values())


def test_small_steps_find_what_large_ones_do_not():
    """The first layer needs 115 slots of 300: it loses more with 50 and 212, and with 71 and 147, but less with 121."""
    stages = KnownLosses(lambda slots: 0.01 + ((slots[0] - 115) / 100).pow(2), [1.0, 1.0, 1.0])
    best = stages.improved()
    assert best.startswith("layer-round-2") and stages.measured[best] < 0.02


def test_rounds_are_bounded(monkeypatch):
    """A divergence that falls for ever ends after the last round."""
    stages, losses = KnownLosses(unlike, [1.0, 1.0, 1.0]), itertools.count(1e9, -1)
    monkeypatch.setattr(stages, "_kl", lambda choices: [next(losses) for _ in choices])
    assert stages.improved().startswith(f"layer-round-{ROUNDS - 1}")
    assert f"layer-round-{ROUNDS}" not in stages.passes.tables
