"""Policies whose scores are recomputed every m tokens, part of the naive oracle.

The tokens that the papers evict together in a round are evicted here one by one until the next round. Papers:
VaSE (arXiv 2606.03928), R-KV (arXiv 2505.24133), TriAttention (arXiv 2604.04921).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .oracle_online import NEW, Decisions, Rank, Ranking, retained_by_ranking
from .oracle_random import draw
from .oracle_statistics import LayerStatistics

SAMPLED_MASS, REDUNDANCY, EXPECTED_LOGITS = "sampled mass", "redundancy", "expected logits"
_EVERY = {SAMPLED_MASS: 64, REDUNDANCY: 128, EXPECTED_LOGITS: 128}
_QUERIES = {SAMPLED_MASS: 64, REDUNDANCY: 8, EXPECTED_LOGITS: 0}
_DRAWN, _LARGE = 0, 1


@dataclass(frozen=True)
class Head:
    """One KV head of a layer.

    Attributes:
        query: ``[G, S, D]``.
        key: ``[S, D]``.
        value: ``[S, D]``.
        place: seeds, layer and head, which the draws depend on.
        statistics: statistics of the head's queries, None if nothing is ranked by them.
        sink_logits: ``[G]``, logits of a further key that every query sees, None for none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    place: tuple[tuple[int, int], int, int]
    statistics: LayerStatistics | None = None
    sink_logits: torch.Tensor | None = None

    def logits(self, q: int, tokens: list[int]) -> torch.Tensor:
        """Return the logits ``[G, tokens]`` of query ``q``. With sinks there is one more column, which is theirs."""
        logits = self.query[:, q] @ self.key[tokens].T / math.sqrt(self.key.shape[1])
        return (
            logits if self.sink_logits is None else torch.cat([logits, self.sink_logits.to(logits).unsqueeze(-1)], -1)
        )


def sampled_mass(
    head: Head, last: int, candidates: list[int], sinks: int, queries: int, window: int
) -> tuple[dict, float]:
    """Return the rank ``(class, value)`` of each token after the sinks, and a margin (VaSE).

    The margin is the value range of the last token that is retained for its values, minus that of the first
    one that is not.

    Args:
        head: the KV head.
        last: newest token of the round.
        candidates: oldest first. The first ``sinks`` of them are sinks.
        sinks: number of sinks among the candidates.
        queries: number of newest queries that give weights.
        window: ``w``, not used.
    """
    weight = torch.zeros(len(candidates), dtype=head.key.dtype)
    for q in range(last - queries + 1, last + 1):
        weight += head.logits(q, candidates).softmax(-1)[:, : len(candidates)].mean(0) / queries
    # neighbours beyond the ends count as 0
    padded, ranked = torch.nn.functional.pad(weight, (2, 2)), candidates[sinks:]
    near = (sum(padded[i : i + len(candidates)] for i in range(5)) / 5).tolist()
    value = head.value[ranked]
    spread = dict(zip(ranked, (value.amax(1) - value.amin(1)).tolist(), strict=True))
    by_spread = sorted(spread, key=lambda t: (spread[t], t), reverse=True)
    # sinks are part of the quarter
    large = by_spread[: max(0, len(candidates) // 4 - sinks)]
    rank = {}
    for i, t in enumerate(ranked, start=sinks):
        uniform = (draw(*head.place, last, t) + 0.5) / 2**53
        drawn = (math.log(near[i]) if near[i] > 0 else -math.inf) - math.log(-math.log(uniform))
        rank[t] = (_LARGE, spread[t]) if t in large else (_DRAWN, drawn)
    smaller = [spread[t] for t in by_spread[len(large) :]]
    return rank, spread[large[-1]] - smaller[0] if large and smaller else math.inf


def redundancy(
    head: Head, last: int, candidates: list[int], sinks: int, queries: int, window: int
) -> tuple[dict, float]:
    """Return the rank of each token after the sinks, and a margin (R-KV).

    The margin is the smallest distance of a cosine from the threshold. Arguments are those of
    :func:`sampled_mass`. Tokens in the window count as similar tokens too.
    """
    weight = torch.zeros(len(candidates), dtype=head.key.dtype)
    for q in range(last - queries + 1, last + 1):
        weight += head.logits(q, candidates).amax(0).softmax(-1)[: len(candidates)] / queries
    weights = weight.tolist()
    importance = [max(weights[max(0, i - 3) : i + 4]) for i in range(len(candidates))]
    key = head.key[[*candidates, *range(last - window + 1, last + 1)]]
    unit = key / (key.norm(dim=1, keepdim=True) + 1e-8)
    cosine = (unit @ unit.T).fill_diagonal_(0)
    closest = float((cosine - 0.5).abs().min())
    for i, row in enumerate((cosine > 0.5).tolist()):
        similar = [j for j, above in enumerate(row) if above]
        if similar:
            # the newest of several similar tokens is spared
            cosine[i, similar[-1]] = 0
    redundant = (cosine.sum(0) / len(unit)).softmax(0).tolist()
    # redundancies of tokens in the window are left over
    value = [0.1 * mass - 0.9 * similarity for mass, similarity in zip(importance, redundant, strict=False)]
    return {t: (_DRAWN, value[i]) for i, t in enumerate(candidates) if i >= sinks}, closest


def expected_logits(
    head: Head, last: int, tokens: list[int], sinks: int, queries: int, window: int
) -> tuple[dict, float]:
    """Return the rank of each token after the sinks, and no margin (TriAttention).

    Arguments are those of :func:`sampled_mass`.
    """
    ranked = tokens[sinks:]
    values = head.statistics.values(head.key, ranked, last)
    return {t: (_DRAWN, value) for t, value in zip(ranked, values, strict=True)}, math.inf


class Rounds(Ranking):
    """Ranks of the last round of one KV head. Later tokens rank above all others."""

    def __init__(self, head: Head, kind: str, sinks: int, window: int, every: float) -> None:
        """Keep the head, the number of ranked sinks, and the distance of rounds, infinite if there are none."""
        self.head, self.sinks, self.window = head, sinks, window
        self.every, self.queries = every, min(_QUERIES[kind], window)
        self.rule = {SAMPLED_MASS: sampled_mass, REDUNDANCY: redundancy, EXPECTED_LOGITS: expected_logits}[kind]
        self.rank: dict[int, Rank] = {}

    def ranks(self, q: int, candidates: set[int], visible: list[int]) -> dict[int, Rank]:
        """Return the ranks of the last round."""
        return {t: self.rank.get(t, (NEW, 0.0)) for t in candidates}

    def attend(self, q: int, visible: list[int], retained: set[int]) -> float:
        """Run a round if it is due, and return its margin."""
        # infinity leaves a remainder, so that heads without rounds have none
        if (q + 1) % self.every or not retained:
            return math.inf
        tokens = [*range(self.sinks), *sorted(retained)]
        self.rank, apart = self.rule(self.head, q, tokens, self.sinks, self.queries, self.window)
        return apart


def distances(kind: str, topk: Sequence[int], mean_topk: int) -> list[float]:
    """Return the distance of rounds in tokens for each head of a layer, infinite if it has none.

    With k slots in every head it is the paper's, but at most k / 2. An unequal head has the distance of equal heads if
    its own k allows it, else half of that, rounded up, and none if it has no more slots than that.

    Args:
        kind: SAMPLED_MASS, REDUNDANCY or EXPECTED_LOGITS.
        topk: ``k`` of each head of the layer.
        mean_topk: mean ``k`` of all heads of the model.
    """

    def of_equal_heads(k: int) -> int:
        return min(_EVERY[kind], max(1, k // 2))

    longest = of_equal_heads(mean_topk)
    half = math.ceil(longest / 2)
    return [longest if of_equal_heads(k) >= longest else half if k > half else math.inf for k in topk]


def retained_by_rounds(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: str,
    layer: int,
    seeds: tuple[int, int],
    protect: int,
    sinks: int,
    window: int,
    topk: int | Sequence[int],
    statistics: LayerStatistics | None = None,
    mean_topk: int | None = None,
    sink_logits: torch.Tensor | None = None,
    **unused: object,
) -> Decisions:
    """Return the retained sets of a rule whose scores are recomputed in rounds.

    After every m tokens, all tokens before the window are ranked. Until the next round the lowest-ranked
    token is evicted when necessary. Tokens that have left the window since the round rank above all others.

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        kind: SAMPLED_MASS, REDUNDANCY or EXPECTED_LOGITS.
        layer: layer index.
        seeds: seeds of draws.
        protect: number of tokens at the beginning that are never evicted and not ranked.
        sinks: without protection, the number of tokens at the beginning that are never evicted but are
            ranked.
        window: ``w``.
        topk: ``k``, or k of each head if they differ.
        statistics: statistics of the layer's queries, for EXPECTED_LOGITS.
        mean_topk: mean ``k`` of all heads of the model, None for that of the layer, rounded down.
        sink_logits: ``[H * G]``, logits of a further key that every query sees, None for none.
        unused: ``forced`` and ``bias`` of :func:`retained_by_ranking`.
    """
    heads, ranked = query.unflatten(0, (len(key), -1)), 0 if protect else sinks
    slots = [topk] * len(key) if isinstance(topk, int) else topk
    every = distances(kind, slots, sum(slots) // len(slots) if mean_topk is None else mean_topk)
    rankings = []
    for h, tensors in enumerate(zip(heads, key, value, strict=True)):
        of_head = None if sink_logits is None else sink_logits.view(len(key), -1)[h]
        head = Head(*tensors, (seeds, layer, h), statistics and statistics.of_head(h, heads.shape[1]), of_head)
        rankings.append(Rounds(head, kind, ranked, window, every[h]))
    return retained_by_ranking(rankings, key.shape[1], key.dtype, protect or sinks, window, topk, **unused)
