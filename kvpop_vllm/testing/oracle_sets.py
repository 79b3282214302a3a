"""Retained sets, query by query with a sort; part of the naive oracle.

A retained set is a boolean array ``visible [H, S, S]``: ``visible[h, q, t]`` is True if query ``q`` of KV
head ``h`` sees token ``t``. Priorities are numpy float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def _effective(raw: np.ndarray, t: int, q: int, step: int, log_gamma: float, ages: bool = False) -> float:
    """Return the effective score of token ``t`` at query ``q`` (KVpop, eq. 18).

    With ``ages`` it is the log of TRIM-KV's ``beta_t^(q - t)``.
    """
    if ages:
        return (q - t) * float(raw[t])
    return float(raw[t]) + math.floor((q - t) / step) * log_gamma


def _base_row(length: int, q: int, sinks: int, window: int) -> np.ndarray:
    """Return sinks and window of query ``q`` as a boolean row ``[S]``."""
    t = np.arange(length)
    return (t <= q) & ((t < sinks) | (t > q - window))


def retained_sets(
    scores: np.ndarray,
    log_gamma: Sequence[float],
    sinks: int,
    window: int,
    topk: int | Sequence[int],
    step: int = 1,
    ages: bool = False,
    threshold: float | None = None,
) -> np.ndarray:
    """Return the set of tokens that each query sees under the online rule: an evicted token never returns.

    Args:
        scores: raw scores ``[H, S]``; NaN allowed where a token is never ranked.
        log_gamma: one decay per head, in nats per ``step`` positions.
        sinks: ``s``.
        window: ``w``.
        topk: ``k``, or k of each head if they differ.
        step: ``n`` of the decay.
        ages: True if a token's score is multiplied by its age, without any other decay.
        threshold: a token with a lower score is evicted when it leaves the window, even if slots are free.

    Returns:
        Boolean ``[H, S, S]``.
    """
    heads, length = scores.shape
    scores = scores.astype(np.float64)
    visible, topk = np.zeros((heads, length, length), dtype=bool), np.broadcast_to(topk, heads).tolist()
    for h in range(heads):
        kept: list[int] = []
        for q in range(length):
            leaving = q - window
            if leaving >= sinks and (threshold is None or scores[h][leaving] >= threshold):
                kept = _best(scores[h], [*kept, leaving], q, topk[h], step, log_gamma[h], ages)
            visible[h, q] = _base_row(length, q, sinks, window)
            visible[h, q, kept] = True
    return visible


def _best(
    raw: np.ndarray, candidates: list[int], q: int, topk: int, step: int, log_gamma: float, ages: bool = False
) -> list[int]:
    """Return the ``topk`` best candidates at ``q``; of equal scores the newer token is better."""
    if len(candidates) <= topk:
        return candidates
    worst_first = sorted(candidates, key=lambda t: (_effective(raw, t, q, step, log_gamma, ages), t))
    return worst_first[len(candidates) - topk :]


def retained_sets_static(
    scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int
) -> np.ndarray:
    """Return the retained sets for ``n = 1`` by a second definition.

    A query sees the top k of all tokens that were ever eligible. Tokens are ranked by the static priority
    ``r_t - t log gamma`` (KVpop, eqs. 19, 20 and 26), and nothing is stored from one query to the next.
    """
    heads, length = scores.shape
    visible = np.zeros((heads, length, length), dtype=bool)
    for h in range(heads):
        priority = scores[h].astype(np.float64) - np.arange(length) * log_gamma[h]
        for q in range(length):
            visible[h, q] = _base_row(length, q, sinks, window)
            eligible = np.arange(sinks, max(sinks, q - window + 1))
            order = np.lexsort((eligible, priority[eligible]))[::-1]
            visible[h, q, eligible[order[:topk]]] = True
    return visible


def retained_sets_instantaneous(
    scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int, step: int
) -> np.ndarray:
    """Return the top k of all tokens that were ever eligible, by effective score.

    This is *not* the definition for ``n > 1``. It only serves to show that the online rule differs.
    """
    heads, length = scores.shape
    visible = np.zeros((heads, length, length), dtype=bool)
    for h in range(heads):
        raw = scores[h].astype(np.float64)
        for q in range(length):
            visible[h, q] = _base_row(length, q, sinks, window)
            eligible = list(range(sinks, max(sinks, q - window + 1)))
            visible[h, q, _best(raw, eligible, q, topk, step, log_gamma[h])] = True
    return visible


def decision_margins(
    visible: np.ndarray,
    scores: np.ndarray,
    log_gamma: Sequence[float],
    sinks: int,
    window: int,
    topk: int | Sequence[int],
    step: int = 1,
    ages: bool = False,
    threshold: float | None = None,
    held: int = 0,
) -> np.ndarray:
    """Return the margin of every eviction decision in given retained sets, ``[H, S]`` float64.

    At ``q`` it is the lowest effective score among the retained candidates minus that of the best evicted
    one. It is zero for a tie, *negative* where ``scores`` would have evicted another token, and ``inf`` where
    nothing was decided. Sets from another source can so be judged one decision at a time, and one near-tie
    does not affect later comparisons.

    With ``ages`` the margin is divided by the age of the best evicted token, which gives the units of raw
    scores. With a ``threshold`` it is the smallest margin of all decisions: that a token passed it, or that
    an evicted one failed it or was the lowest. Before query ``held`` nothing is decided.

    Raises:
        ValueError: the sets cannot result from this budget (sinks or window missing, a future or evicted
            token seen, a token evicted while slots were free, too many tokens evicted at once).
    """
    heads, length = scores.shape
    scores = scores.astype(np.float64)
    margins, shares = np.full((heads, length), math.inf), np.broadcast_to(topk, heads).tolist()
    for h, topk in enumerate(shares):
        kept: set[int] = set()
        for q in range(length):
            new = {q - window} if q - window >= sinks else set()
            candidates = kept | new
            now = _long_range(visible[h, q], h, q, sinks, window)
            if q < held:
                kept = now
                continue
            lost, surplus = candidates - now, max(0, len(candidates) - topk)
            more = threshold is not None and surplus <= len(lost) and (len(now) == topk or lost <= new)
            if now - candidates or (len(lost) != surplus and not more):
                raise ValueError(
                    f"head {h}, query {q}: long-range tokens {sorted(now)} cannot follow from "
                    f"candidates {sorted(candidates)} with k = {topk}"
                )
            effective = {t: _effective(scores[h], t, q, step, log_gamma[h], ages) for t in candidates}
            if threshold is not None:
                margins[h, q] = _threshold_margin(scores[h], effective, now, lost, new, topk, threshold)
            elif lost and now:
                best = max(lost, key=effective.__getitem__)
                margins[h, q] = (min(effective[t] for t in now) - effective[best]) / (q - best if ages else 1)
            kept = now
    return margins


def _threshold_margin(
    raw: np.ndarray,
    effective: dict[int, float],
    now: set[int],
    lost: set[int],
    new: set[int],
    topk: int,
    threshold: float,
) -> float:
    """Return the smallest margin of a decision with a threshold that ``new`` tokens had to pass.

    It is ``inf`` where nothing was decided.
    """
    margins = [float(raw[t]) - threshold for t in new & now]
    lowest = min((effective[t] for t in now), default=math.inf) if len(now) == topk and topk > 0 else -math.inf
    for t in lost:
        reasons = [threshold - float(raw[t])] if t in new else []
        margins.append(max([*reasons, lowest - effective[t]]))
    return min(margins, default=math.inf)


def best_lost(
    visible: np.ndarray, scores: np.ndarray, log_gamma: Sequence[float], step: int = 1, ages: bool = False
) -> np.ndarray:
    """Return the token with the highest effective score among those seen at ``q - 1`` but not at ``q``.

    The result is ``[H, S]`` int64, -1 where there is none.
    """
    heads, length = scores.shape
    best = np.full((heads, length), -1, dtype=np.int64)
    for h in range(heads):
        for q in range(1, length):
            lost = np.flatnonzero(visible[h, q - 1] & ~visible[h, q]).tolist()
            if lost:
                best[h, q] = max(lost, key=lambda t: _effective(scores[h], t, q, step, log_gamma[h], ages))
    return best


def _long_range(row: np.ndarray, h: int, q: int, sinks: int, window: int) -> set[int]:
    """Return the visible tokens of one query that are neither sinks nor in the window.

    Raises:
        ValueError: sinks or window tokens are missing, or a future token is visible.
    """
    base = _base_row(len(row), q, sinks, window)
    if (base & ~row).any() or row[q + 1 :].any():
        raise ValueError(f"head {h}, query {q}: sinks or window missing, or the future visible")
    return set(np.flatnonzero(row & ~base).tolist())
