"""Uniformly random evictions, drawn from seeds, layer, head, query and token, part of the naive oracle."""

import torch

from .oracle_online import Decisions, Rank, Ranking, retained_by_ranking

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """Return SplitMix64's finalizer of ``x``."""
    # words wrap at 64 bits, and Python's integers do not
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


class Draws(Ranking):
    """Draws of one KV head."""

    def __init__(self, layer: int, head: int, seeds: tuple[int, int]) -> None:
        """Keep what the draws depend on."""
        self.place = seeds, layer, head

    def ranks(self, q: int, candidates: set[int], visible: list[int]) -> dict[int, Rank]:
        """Return the draws for the eviction at ``q``."""
        return {t: (0, draw(*self.place, q, t)) for t in candidates}


def retained_by_draws(
    layer: int, heads: int, length: int, seeds: tuple[int, int], *shape: int, forced: torch.Tensor | None = None
) -> Decisions:
    """Return the retained sets of the online rule in which the token with the lowest draw is evicted.

    ``shape`` is sinks, ``w`` and ``k``. Draws are integers, so that there are no near-ties: forced sets must
    equal the sets of this rule.

    Raises:
        ValueError: the forced sets differ.
    """
    rankings = [Draws(layer, h, seeds) for h in range(heads)]
    decisions = retained_by_ranking(rankings, length, torch.float64, *shape)
    if forced is not None and not torch.equal(forced, decisions[0]):
        raise ValueError(f"layer {layer}: these are not the sets that were drawn")
    return decisions
