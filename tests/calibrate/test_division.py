"""Slots go where they are worth most."""

import itertools

import pytest
import torch

from kvpop_vllm.cache.ranks import Shard, layers_of_stages, shards_of
from kvpop_vllm.calibrate.division import Curve, between, curves_of, divide, shares_from_slots

SIZES = [2, 4, 8, 16]


def lost(curve: Curve, slots: float) -> float:
    """Return the loss of a curve, linear between what was measured, or on the lower hull of that."""
    points = list(zip(curve.sizes, curve.losses, strict=True))
    lines = [
        a[1] + (slots - a[0]) / (b[0] - a[0]) * (b[1] - a[1])
        for a, b in itertools.combinations(points, 2)
        if a[0] <= slots <= b[0]
    ]
    return min(lines, default=points[-1][1])


def test_no_other_division_loses_less():
    """Compared with all divisions of the slots of a layer of two heads and of two heads of another."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        losses = torch.rand(3, 4, generator=draw, dtype=torch.float64).pow(3).flip(-1).cumsum(-1).flip(-1)
        curves = [Curve(0, (0, 1), SIZES, tuple(losses[0].tolist()))]
        curves += [Curve(1, (head,), SIZES, tuple(losses[1 + head].tolist())) for head in (0, 1)]
        mean = 6.5
        slots = divide(curves, mean)
        weights = [len(curve.heads) for curve in curves]
        assert sum(w * count for w, count in zip(weights, slots, strict=True)) == pytest.approx(4 * mean)
        assert min(slots) >= SIZES[0]
        smallest = sum(lost(curve, min(count, SIZES[-1])) for curve, count in zip(curves, slots, strict=True))
        grid = [2 + i / 2 for i in range(29)]
        for a, b in itertools.product(grid, grid):
            c = 4 * mean - 2 * a - b
            if SIZES[0] <= c <= SIZES[-1]:
                assert (
                    smallest <= sum(lost(curve, count) for curve, count in zip(curves, (a, b, c), strict=True)) + 1e-9
                )


def test_slots_that_nobody_needs_go_to_all():
    curves = [Curve(0, (0, 1), SIZES, (0.0,) * 4), Curve(1, (0, 1), SIZES, (1.0, 0.0, 0.0, 0.0))]
    assert divide(curves, 5.0) == [4.0, 6.0]


def test_curves_may_have_sizes_of_their_own():
    curves = [Curve(0, (0,), (1, 2, 4), (3.0, 2.0, 1.0)), Curve(0, (1,), (5, 10, 21), (4.0, 1.0, 0.0))]
    assert divide(curves, 6.5) == [3.0, 10.0]  # 1 and 5, then 1 of fall 1, 5 of fall 0.6, and 1 of fall 0.5


def test_shares_have_mean_1_and_are_of_the_slots_beyond_the_least():
    curves = [Curve(0, (0, 1), (), ()), Curve(1, (0,), (), ()), Curve(1, (1,), (), ())]
    shares = shares_from_slots(curves, [2.0, 6.0, 10.0], 2, 2, 2)
    assert shares.tolist() == [[0.0, 0.0], [4 / 3, 8 / 3]]
    assert between(shares).tolist() == [[0.5, 0.5], [pytest.approx(7 / 6), pytest.approx(11 / 6)]]


def test_parts_of_a_model_divide_their_own_slots():
    """Each of two stages of two layers, and each rank of each, has as many slots; layers are split where ranks are."""
    curves = [Curve(layer, (0, 1), SIZES, losses) for layer, losses in enumerate([(8, 4, 2, 0), (4, 0, 0, 0)] * 2)]
    alone = [Curve(1, (1,), SIZES, (2, 0, 0, 0)), Curve(2, (1,), SIZES, (4, 2, 1, 0))]
    assert curves_of(curves, Shard((1, 3), (1, 2))) == alone
    assert curves_of(curves, Shard((2, 4), (0, 2))) == curves[2:]
    for shards in (shards_of(layers_of_stages(4, 2), 2, 1), shards_of(layers_of_stages(4, 2), 2, 2)):
        by_rank = [curves_of(curves, shard) for shard in shards]
        slots = [size for group in by_rank for size in divide(group, 6)]
        shares = shares_from_slots([curve for group in by_rank for curve in group], slots, SIZES[0], 4, 2)
        for shard in shards:
            assert shares[slice(*shard.layers), slice(*shard.heads)].mean().item() == pytest.approx(1)
        assert (shares[0] > shares[1]).all() and torch.equal(shares[:2], shares[2:])
