"""Uniformly random evictions, drawn from seeds, layer, head, query and token; part of the naive oracle."""

from __future__ import annotations

import math

import torch

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """Return SplitMix64's finalizer of ``x``."""
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def draw(seeds: tuple[int, int], layer: int, head: int, q: int, t: int) -> int:
    """Return the draw of token ``t`` for the eviction at ``q``, 53 bits.

    ``seeds`` are those of the server and of the request.
    """
    seed = _mix(seeds[0] + _GOLDEN) + seeds[1]
    key = _mix(_mix(seed + _GOLDEN) + (layer << 32) + head)
    return _mix(_mix(key + q) + t * _GOLDEN) >> 11


def retained_by_draws(
    layer: int,
    heads: int,
    length: int,
    seeds: tuple[int, int],
    sinks: int,
    window: int,
    topk: int,
    forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the retained sets of the online rule in which the token with the lowest draw is evicted.

    Of equal draws the older token is evicted. Draws are integers, so that there are no near-ties: forced sets
    must equal the sets of this rule.

    Returns:
        ``visible``, ``margins``, ``scores``, ``lost`` of :class:`LayerDecisions`; a margin is at least 1.

    Raises:
        ValueError: the forced sets differ.
    """
    visible = torch.zeros(heads, length, length, dtype=torch.bool)
    margins = torch.full((heads, length), math.inf, dtype=torch.float64)
    lost = torch.full((heads, length), -1)
    for h in range(heads):
        kept: list[int] = []
        for q in range(length):
            if q - window >= sinks:
                kept.append(q - window)
            if len(kept) > topk:
                drawn = sorted((draw(seeds, layer, h, q, t), t) for t in kept)
                lost[h, q] = drawn[0][1]
                kept.remove(drawn[0][1])
                if kept:
                    margins[h, q] = drawn[1][0] - drawn[0][0]
            visible[h, q, [t for t in range(q + 1) if t < sinks or t > q - window]] = True
            visible[h, q, kept] = True
    if forced is not None and not torch.equal(forced, visible):
        raise ValueError(f"layer {layer}: these are not the sets that were drawn")
    return visible, margins, torch.full((heads, length), math.nan), lost
