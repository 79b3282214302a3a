"""Positions read from pages, compared with the tokens that were put in."""

from __future__ import annotations

import pytest
from kernels.problems import Problem
from kernels.served import Pool

from kvpop_vllm.kernels.retained import slot_positions
from kvpop_vllm.roles import Retention

HEADS = 2


class Filled:
    """The second of two requests, served token by token under one rule.

    A slot's token is found by comparing its key with the keys that went in.
    """

    def __init__(self, scorer, sinks, window, budget, count):
        self.retention = Retention(budget, sinks, window)
        p = Problem(scorer, heads=HEADS, sinks=sinks, window=window, topk=budget - sinks - window, seed=3).prepare()
        pool = Pool(p)
        for _ in range(count):
            pool.decode([1], "cpp")
        self.pages, self.row, self.keys = pool.pages, p.table[1, 0], p.texts[1][1][:count]

    def stored(self, head: int, slot: int) -> int:
        """Return the token whose key lies in a slot."""
        key = self.pages.k[self.row[slot // 16], head, slot % 16]
        return int((self.keys[:, head] == key).all(-1).nonzero())


@pytest.mark.parametrize("sinks, window, budget", [(2, 5, 20), (0, 1, 17), (0, 6, 6), (3, 4, 40)])
@pytest.mark.parametrize("count", [1, 5, 7, 8, 33, 60])
@pytest.mark.parametrize("scorer", ["none", "linear"])
def test_every_slot_is_named_right(scorer, sinks, window, budget, count):
    filled = Filled(scorer, sinks, window, budget, count)
    slots = slot_positions(filled.pages, filled.row, count, filled.retention)
    assert slots.shape == (HEADS, min(count, budget))
    assert slots.tolist() == [[filled.stored(h, i) for i in range(slots.shape[1])] for h in range(HEADS)]
    for held in slots.tolist():
        near = {t for t in range(count) if t < sinks or t >= count - window}
        assert len(set(held)) == len(held) and near <= set(held)
    per_head = filled.row.expand(HEADS, -1)
    assert slot_positions(filled.pages, per_head, count, filled.retention).tolist() == slots.tolist()


def test_nothing_seen():
    filled = Filled("none", 2, 5, 20, 1)
    assert slot_positions(filled.pages, filled.row, 0, filled.retention).tolist() == [[], []]


@pytest.mark.parametrize("seen", [32, 34])
def test_another_length_is_an_error(seen):
    filled = Filled("none", 2, 5, 20, 33)
    with pytest.raises(ValueError, match=f"have seen \\[33, 33\\] tokens, not {seen}"):
        slot_positions(filled.pages, filled.row, seen, filled.retention)
