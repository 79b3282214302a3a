"""Division of slots among layers and heads by marginal gain."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpop_vllm.cache.ranks import Shard


class Curve(NamedTuple):
    """Losses of some heads with each number of slots.

    Attributes:
        layer: index of their layer.
        heads: their KV heads.
        sizes: numbers of slots of a head, ascending.
        losses: a loss for each of ``sizes``, in nats per token.
    """

    layer: int
    heads: tuple[int, ...]
    sizes: tuple[float, ...]
    losses: tuple[float, ...]


def divide(curves: Sequence[Curve], mean: float) -> list[float]:
    """Return the slots of a head of each curve for which the sum of losses is smallest, if losses add up.

    Slots go to the steepest fall of any curve's lower convex hull first. A head has at least its curve's smallest size,
    and what nobody needs goes to all.

    Args:
        curves: all heads of the model, each once.
        mean: mean number of slots of a head.
    """
    falls = []
    for number, curve in enumerate(curves):
        i, sizes, losses = 0, curve.sizes, curve.losses
        while i < len(sizes) - 1:
            # the steepest chord from here: the next edge of the lower hull
            # of equal slopes the farthest size, so that an edge of the hull is one step
            slope, j = max(((losses[i] - losses[j]) / (sizes[j] - sizes[i]), j) for j in range(i + 1, len(sizes)))
            if slope <= 0:
                break
            # gain per slot, since every head of the curve gets the same number
            falls.append((slope / len(curve.heads), number, sizes[j] - sizes[i]))
            i = j
    heads = sum(len(curve.heads) for curve in curves)
    slots = [float(curve.sizes[0]) for curve in curves]
    left = mean * heads - sum(len(curve.heads) * size for curve, size in zip(curves, slots, strict=True))
    # hulls fall less and less steeply, so the falls of a curve come in their order
    for _, number, size in sorted(falls, reverse=True):
        added = min(size, left / len(curves[number].heads))
        slots[number] += added
        left -= added * len(curves[number].heads)
    return [count + left / heads for count in slots]


def curves_of(curves: Sequence[Curve], shard: Shard) -> list[Curve]:
    """Return the curves of the layers and heads of a rank.

    A layer loses as much by each of its heads as by the others, where they were not measured apart.
    """
    chosen = []
    for curve in curves:
        heads = tuple(head for head in curve.heads if shard.heads[0] <= head < shard.heads[1])
        if heads and shard.layers[0] <= curve.layer < shard.layers[1]:
            losses = tuple(loss * len(heads) / len(curve.heads) for loss in curve.losses)
            chosen.append(curve._replace(heads=heads, losses=losses))
    return chosen


def shares_from_slots(
    curves: Sequence[Curve], slots: Sequence[float], smallest: float, layers: int, heads: int
) -> torch.Tensor:
    """Return shares ``[layers, H]`` float64 with mean 1 of the slots beyond ``smallest``."""
    shares = torch.zeros(layers, heads, dtype=torch.float64)
    for curve, size in zip(curves, slots, strict=True):
        shares[curve.layer, list(curve.heads)] = size - smallest
    return shares / shares.mean()


def between(shares: torch.Tensor, baseline: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Return shares half way between these and a baseline, by default equal ones."""
    return (shares + baseline) / 2
