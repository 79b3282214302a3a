"""The online rule, query by query, part of the naive oracle.

A retained set is a boolean array ``visible [H, S, S]``: ``visible[h, q, t]`` is True if query ``q`` of KV head
``h`` sees token ``t``. Sets are found one query after another, because a rank may depend on the attention of
earlier queries, on draws for each eviction, or on rounds.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

Rank = tuple[int, float]
"""Class and value of a token. Tokens of a lower class are evicted first. Values of class NEW are equal."""
NEW = 2
Decisions = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""``visible``, ``margins``, ``scores``, ``lost`` of :class:`LayerDecisions`."""


class Ranking:
    """Ranks of one KV head's tokens.

    Attributes:
        threshold: a token whose raw score is lower is evicted when it leaves the window, None for no threshold.
    """

    threshold: float | None = None

    def ranks(self, q: int, candidates: set[int], visible: list[int]) -> dict[int, Rank]:
        """Return the ranks of ``candidates`` before query ``q`` attends. Query ``q - 1`` saw ``visible``."""
        raise NotImplementedError

    def attend(self, q: int, visible: list[int], retained: set[int]) -> float:
        """Note that query ``q`` sees ``visible``, of which the long-range tokens are ``retained``.

        Returns:
            An upper bound of the margin at the next query, ``inf`` if there is none.
        """
        return math.inf

    def below(self, t: int) -> bool:
        """Return whether a token fails the threshold."""
        return False

    def margin(
        self, q: int, rank: dict[int, Rank], retained: set[int], gone: set[int], new: set[int], full: bool
    ) -> float:
        """Return the margin of the decision at ``q``, ``inf`` where nothing was decided.

        It is the value of the worst retained candidate minus that of the best evicted one.

        Args:
            q: the query.
            rank: ranks of the candidates.
            retained: candidates that are retained.
            gone: candidates that are evicted.
            new: the candidate that leaves the window, if there is one.
            full: True if all slots are in use.
        """
        if not gone or not retained:
            return math.inf
        best, worst = max(rank[t] for t in gone), min(rank[t] for t in retained)
        return worst[1] - best[1] if best[0] == worst[0] != NEW else math.inf


class Scored(Ranking):
    """Ranking by effective scores (KVpop, eq. 18).

    Args:
        raw: ``[S]``, raw scores, NaN where a token is never ranked.
        log_gamma: decay in nats per ``step`` positions.
        step: ``n`` of the decay.
        ages: True if the effective score is the log of TRIM-KV's ``beta_t^(q - t)``. Margins are then divided by the
            age of the best evicted token, which gives the units of raw scores.
        threshold: see :class:`Ranking`.
    """

    def __init__(
        self, raw: np.ndarray, log_gamma: float, step: int = 1, ages: bool = False, threshold: float | None = None
    ) -> None:
        self.raw, self.log_gamma, self.step, self.ages = raw, log_gamma, step, ages
        self.threshold = threshold

    def ranks(self, q: int, candidates: set[int], visible: list[int]) -> dict[int, Rank]:
        """Return the effective scores at ``q``."""
        if self.ages:
            return {t: (0, (q - t) * float(self.raw[t])) for t in candidates}
        return {t: (0, float(self.raw[t]) + math.floor((q - t) / self.step) * self.log_gamma) for t in candidates}

    def below(self, t: int) -> bool:
        """Return whether the raw score is below the threshold."""
        return self.threshold is not None and float(self.raw[t]) < self.threshold

    def margin(
        self, q: int, rank: dict[int, Rank], retained: set[int], gone: set[int], new: set[int], full: bool
    ) -> float:
        """Return the margin at ``q``.

        With a threshold it is the smallest one of all decisions: that a token passed it, or that an evicted one
        failed it or was the lowest.
        """
        if self.threshold is None:
            best = max(gone, key=rank.get, default=0)
            return super().margin(q, rank, retained, gone, new, full) / (q - best if self.ages else 1)
        margins = [float(self.raw[t]) - self.threshold for t in new & retained]
        lowest = min((rank[t][1] for t in retained), default=math.inf) if full else -math.inf
        for t in gone:
            reasons = [self.threshold - float(self.raw[t])] if t in new else []
            margins.append(max([*reasons, lowest - rank[t][1]]))
        return min(margins, default=math.inf)


def retained_by_ranking(
    rankings: Sequence[Ranking],
    length: int,
    dtype: torch.dtype,
    sinks: int,
    window: int,
    topk: int | Sequence[int],
    forced: torch.Tensor | None = None,
    bias: Sequence[tuple[int, int, float]] = (),
    first_eviction: int = 0,
) -> Decisions:
    """Return the retained sets of the online rule: an evicted token never returns.

    Ties evict the older token.

    Args:
        rankings: ranking of each KV head.
        length: ``S``.
        dtype: dtype of the scores.
        sinks: number of tokens at the beginning that are never evicted.
        window: ``w``.
        topk: ``k``, or k of each head if they differ.
        forced: as in :meth:`OraclePolicy.decide`.
        bias: as in :meth:`OraclePolicy.decide`.
        first_eviction: query before which nothing is evicted.

    Returns:
        Decisions. Scores are ``[H, S, 2]``, of the evicted token and of the worst retained one. A margin is zero for
        a tie, *negative* where the ranks would have evicted another token, and ``inf`` where nothing was decided.
        Sets from another source can so be judged one decision at a time, and one near-tie does not affect later
        comparisons.

    Raises:
        ValueError: the forced sets cannot result from this budget (sinks or window missing, a future or evicted
            token seen, a token evicted while slots were free, too many tokens evicted at once).
    """
    rooms = np.broadcast_to(topk, len(rankings)).tolist()
    heads = []
    for h, (ranking, room) in enumerate(zip(rankings, rooms, strict=True)):
        head = _HeadDecisions(ranking, length, sinks, window, room, first_eviction, f"head {h}")
        sets = [None] * length if forced is None else [np.flatnonzero(row).tolist() for row in forced[h].cpu().numpy()]
        head.decide(sets, {token: by for number, token, by in bias if number == h})
        heads.append((head.visible, head.margins, head.scores, head.lost))
    visible, margins, scores, lost = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*heads, strict=True))
    return visible, margins, scores.to(dtype), lost


class _HeadDecisions:
    """Decisions of one KV head, as :data:`Decisions` without the head axis.

    Args:
        ranking: ranking of the head.
        length: ``S``.
        sinks: number of tokens at the beginning that are never evicted.
        window: ``w``.
        room: ``k``.
        first_eviction: query before which nothing is evicted.
        name: name of the head in errors.
    """

    def __init__(
        self, ranking: Ranking, length: int, sinks: int, window: int, room: int, first_eviction: int, name: str
    ) -> None:
        self.ranking, self.sinks, self.window, self.room = ranking, sinks, window, room
        self.first_eviction, self.name = first_eviction, name
        self.visible = np.zeros((length, length), bool)
        self.margins, self.scores = np.full(length, np.inf), np.full((length, 2), np.nan)
        self.lost = np.full(length, -1)

    def decide(self, forced: Sequence[list[int] | None], added: dict[int, float]) -> None:
        """Decide query by query.

        Args:
            forced: sorted tokens that each query must see, None where the ranks decide.
            added: what is added to the ranks of tokens.
        """
        retained: set[int] = set()
        visible_tokens: list[int] = []
        for q, forced_tokens in enumerate(forced):
            # the token that leaves the window at q
            new = {q - self.window} if q - self.window >= self.sinks else set()
            retained = self._retain(q, retained | new, new, visible_tokens, forced_tokens, added)
            recent = range(max(0, q - self.window + 1), q + 1)
            visible_tokens = sorted({*range(min(self.sinks, q + 1)), *recent, *retained})
            if forced_tokens is not None and visible_tokens != forced_tokens:
                raise ValueError(
                    f"{self.name}, query {q}: these sets see other tokens than sinks, window and what was kept"
                )
            self.visible[q, visible_tokens] = True
            # a slice, since q + 1 may lie past the end
            self.margins[q + 1 : q + 2] = self.ranking.attend(q, visible_tokens, retained)

    def _retain(
        self,
        q: int,
        candidates: set[int],
        new: set[int],
        visible_tokens: list[int],
        forced_tokens: list[int] | None,
        added: dict[int, float],
    ) -> set[int]:
        """Return the candidates that are retained at ``q``, and note the decision."""
        ranking, room = self.ranking, self.room
        surplus = max(0, len(candidates) - room) if q >= self.first_eviction else 0
        judged = surplus or ranking.threshold is not None
        rank = ranking.ranks(q, candidates, visible_tokens) if judged else {}
        if forced_tokens is None:
            gone = _evicted(ranking, rank, candidates, new, surplus, added)
        else:
            gone = candidates - set(forced_tokens)
        retained = candidates - gone
        full = len(retained) == room > 0
        # a threshold also evicts while slots are free: a new token that fails it, or as many as leave the head full
        below = ranking.threshold is not None and surplus <= len(gone) and (len(retained) == room or gone <= new)
        if len(gone) != surplus and not below:
            raise ValueError(f"{self.name}, query {q}: {len(gone)} tokens are lost, {surplus} must be")
        if judged:
            self.margins[q] = min(self.margins[q], ranking.margin(q, rank, retained, gone, new, full))
        if gone:
            # sets have no order, and of equal ranks the oldest token counts
            best, lowest = max(sorted(gone), key=rank.get), min((rank[t] for t in retained), default=(NEW, 0.0))
            self.lost[q] = best
            if rank[best][0] == lowest[0] != NEW:
                self.scores[q] = rank[best][1], lowest[1]
        return retained


def _evicted(
    ranking: Ranking,
    rank: dict[int, tuple[int, float]],
    candidates: set[int],
    new: set[int],
    surplus: int,
    added: dict[int, float],
) -> set[int]:
    """Return the tokens that the rule evicts: new ones below the threshold, then the worst until ``surplus`` are gone."""
    gone = {t for t in new if ranking.below(t)}
    if surplus <= len(gone):
        return gone
    # class, then score, then age: ties evict the older token
    worst_first = sorted(candidates - gone, key=lambda t: (rank[t][0], rank[t][1] + added.get(t, 0.0), t))
    return gone | set(worst_first[: surplus - len(gone)])


def retained_by_scores(
    scores: np.ndarray,
    log_gamma: Sequence[float],
    *shape: object,
    step: int = 1,
    ages: bool = False,
    threshold: float | None = None,
    **unused: object,
) -> Decisions:
    """Return the retained sets of the online rule with scores that do not depend on the sets.

    Args:
        scores: ``[H, S]``.
        log_gamma: decay of each head.
        shape: sinks, ``w`` and ``k``.
        step: see :class:`Scored`.
        ages: see :class:`Scored`.
        threshold: see :class:`Scored`.
        unused: ``forced`` and ``first_eviction`` of :func:`retained_by_ranking`.
    """
    heads = zip(scores.astype(np.float64), log_gamma, strict=True)
    rankings = [Scored(raw, decay, step, ages, threshold) for raw, decay in heads]
    return retained_by_ranking(rankings, scores.shape[1], torch.float64, *shape, **unused)


def retained_sets(
    scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int, step: int = 1
) -> np.ndarray:
    """Return the sets of :func:`retained_by_scores`."""
    return retained_by_scores(scores, log_gamma, sinks, window, topk, step=step)[0].numpy()


def decision_margins(
    visible: np.ndarray, scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int
) -> np.ndarray:
    """Return the margins by which scores judge given sets, ``[H, S]``. See :func:`retained_by_ranking`."""
    forced = torch.from_numpy(visible)
    return retained_by_scores(scores, log_gamma, sinks, window, topk, forced=forced)[1].numpy()


def retained_sets_static(
    scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int, step: int = 1
) -> np.ndarray:
    """Return the top k of all tokens that were ever eligible, by effective score.

    Nothing is stored from one query to the next. For ``n = 1``, where the order of two tokens never changes, this is
    a second definition of the online rule (KVpop, eqs. 19, 20 and 26). For ``n > 1`` it is *not* the definition.
    """
    heads, length = scores.shape
    visible = np.zeros((heads, length, length), dtype=bool)
    t = np.arange(length)
    for h in range(heads):
        for q in range(length):
            visible[h, q] = (t <= q) & ((t < sinks) | (t > q - window))
            eligible = np.arange(sinks, max(sinks, q - window + 1))
            effective = scores[h, eligible].astype(np.float64) + (q - eligible) // step * log_gamma[h]
            # lexsort sorts by its last key first
            order = np.lexsort((eligible, effective))[::-1]
            visible[h, q, eligible[order[:topk]]] = True
    return visible
