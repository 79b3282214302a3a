"""The online rule with ranks that depend on what was retained before; part of the naive oracle.

Retained sets are found query by query, because a rank may depend on the attention of earlier queries, on draws
for each eviction, or on rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

Rank = tuple[int, float]
"""Class and value of a token; tokens of a lower class are evicted first. Values of class NEW are equal."""
NEW = 2
Decisions = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""``visible``, ``margins``, ``scores``, ``lost`` of :class:`LayerDecisions`."""


class Ranking(Protocol):
    """Ranks of one KV head's tokens."""

    def ranks(self, q: int, candidates: set[int], seen: list[int]) -> dict[int, Rank]:
        """Return the ranks of ``candidates`` before query ``q`` attends; query ``q - 1`` saw ``seen``."""

    def attend(self, q: int, seen: list[int], kept: set[int]) -> float:
        """Note that query ``q`` sees ``seen``, of which the long-range tokens are ``kept``.

        Returns:
            An upper bound of the margin at the next query, ``inf`` if there is none.
        """


def retained_by_ranking(
    rankings: Sequence[Ranking],
    length: int,
    dtype: torch.dtype,
    sinks: int,
    window: int,
    topk: int,
    forced: torch.Tensor | None = None,
    bias: Sequence[tuple[int, int, float]] = (),
) -> Decisions:
    """Return the retained sets of the online rule.

    Of equal ranks the older token is evicted.

    Args:
        rankings: ranking of each KV head.
        length: ``S``.
        dtype: dtype of the scores.
        sinks: number of tokens at the beginning that are never evicted.
        window: ``w``.
        topk: ``k``.
        forced: as in :meth:`OraclePolicy.decide`.
        bias: as in :meth:`OraclePolicy.decide`.

    Returns:
        Decisions; scores are ``[H, S, 2]``, of the evicted token and of the worst retained one.

    Raises:
        ValueError: the forced sets cannot result from this budget.
    """
    heads = len(rankings)
    visible = torch.zeros(heads, length, length, dtype=torch.bool)
    margins = torch.full((heads, length), math.inf, dtype=torch.float64)
    scores = torch.full((heads, length, 2), math.nan, dtype=dtype)
    lost = torch.full((heads, length), -1)
    for h, ranking in enumerate(rankings):
        more = {token: by for head, token, by in bias if head == h}
        kept: set[int] = set()
        seen: list[int] = []
        for q in range(length):
            given = None if forced is None else torch.nonzero(forced[h, q]).flatten().tolist()
            candidates = kept | ({q - window} if q - window >= sinks else set())
            surplus, gone = max(0, len(candidates) - topk), set()
            rank = ranking.ranks(q, candidates, seen) if surplus else {}
            if given is not None:
                gone = candidates - set(given)
            elif surplus:
                gone = {min(candidates, key=lambda t: (rank[t][0], rank[t][1] + more.get(t, 0.0), t))}
            if len(gone) != surplus:
                raise ValueError(f"head {h}, query {q}: {len(gone)} tokens are lost, {surplus} must be")
            kept = candidates - gone
            for t in gone:
                lost[h, q] = t
                mine, least = rank[t], min((rank[other] for other in kept), default=(NEW, 0.0))
                if mine[0] == least[0] != NEW:
                    scores[h, q] = torch.tensor([mine[1], least[1]], dtype=dtype)
                    margins[h, q] = min(float(margins[h, q]), least[1] - mine[1])
            seen = sorted({*range(min(sinks, q + 1)), *range(max(0, q - window + 1), q + 1), *kept})
            if given is not None and seen != given:
                raise ValueError(
                    f"head {h}, query {q}: these sets see other tokens than sinks, window and what was kept"
                )
            visible[h, q, seen] = True
            margins[h, q + 1 : q + 2] = ranking.attend(q, seen, kept)
    return visible, margins, scores, lost
