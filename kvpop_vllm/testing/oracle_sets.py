"""Retained sets, query by query with a sort; part of the naive oracle.

A retained set is a boolean array ``visible [H, S, S]``: ``visible[h, q, t]`` says that query ``q``
of KV head ``h`` sees token ``t``. Priorities are numpy float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def _effective(raw: np.ndarray, t: int, q: int, step: int, log_gamma: float, ages: bool = False) -> float:
    """Score of token ``t`` as query ``q`` ranks it (KVpop, eq. 18; with ``ages``, the log of TRIM-KV's ``beta_t^(q - t)``)."""
    if ages:
        return (q - t) * float(raw[t])
    return float(raw[t]) + math.floor((q - t) / step) * log_gamma


def _base_row(length: int, q: int, sinks: int, window: int) -> np.ndarray:
    """Sinks and protected window of query ``q`` as a boolean row ``[S]``."""
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
    """Make the set of tokens that each query sees under the online rule: what is evicted never returns.

    Args:
        scores: raw scores ``[H, S]``; NaN allowed where a token is never ranked.
        log_gamma: one decay per head, in nats per ``step`` positions.
        sinks, window, topk: ``s``, ``w``, ``k``; k of each head, where they differ.
        step: ``n`` of the decay.
        ages: a token's score counts as often as it is old, and nothing else decays.
        threshold: a token with a lower score is dropped when it leaves the window, whatever room there is.

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
    """The ``topk`` best candidates at ``q``; of equal scores the newer is better."""
    if len(candidates) <= topk:
        return candidates
    worst_first = sorted(candidates, key=lambda t: (_effective(raw, t, q, step, log_gamma, ages), t))
    return worst_first[len(candidates) - topk :]


def retained_sets_static(
    scores: np.ndarray, log_gamma: Sequence[float], sinks: int, window: int, topk: int
) -> np.ndarray:
    """The same for ``n = 1``, stated otherwise: top-k of all that was ever eligible.

    Ranks by the static priority ``r_t - t log gamma`` (KVpop, eqs. 19, 20 and 26) and
    keeps no memory from one query to the next.
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
    """Top-k of all that was ever eligible, by effective score: *not* the definition for ``n > 1``.

    Here only to show that the online rule is another one.
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
    """Margin of every eviction decision in given retained sets, ``[H, S]`` float64.

    At ``q`` it is the lowest effective score among the kept candidates minus the best victim's: zero
    for a tie, *negative* where ``scores`` would have evicted another token, ``inf`` where there was
    nothing to decide. So sets made elsewhere can be judged one decision after the other, without
    one near-tie spoiling every later comparison. With ``ages`` it is divided by the best victim's age, and so in the
    units of raw scores. With a ``threshold`` the smallest of all that was decided: that a token passed it, or that a
    victim either did not or was the lowest. Before query ``held`` nothing is decided.

    Raises:
        ValueError: the sets cannot come from this budget (sinks or window missing, a future or
            evicted token seen, a token lost while there was room, too many tokens lost at once).
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
    """Smallest margin of a decision with a threshold that ``new`` tokens had to pass; ``inf`` where nothing was decided."""
    margins = [float(raw[t]) - threshold for t in new & now]
    lowest = min((effective[t] for t in now), default=math.inf) if len(now) == topk and topk > 0 else -math.inf
    for t in lost:
        reasons = [threshold - float(raw[t])] if t in new else []
        margins.append(max([*reasons, lowest - effective[t]]))
    return min(margins, default=math.inf)


def best_lost(
    visible: np.ndarray, scores: np.ndarray, log_gamma: Sequence[float], step: int = 1, ages: bool = False
) -> np.ndarray:
    """Of the tokens that are seen at ``q - 1`` and no more at ``q``, the one of highest effective score; -1 where there is
    none. ``[H, S]`` int64."""
    heads, length = scores.shape
    best = np.full((heads, length), -1, dtype=np.int64)
    for h in range(heads):
        for q in range(1, length):
            lost = np.flatnonzero(visible[h, q - 1] & ~visible[h, q]).tolist()
            if lost:
                best[h, q] = max(lost, key=lambda t: _effective(scores[h], t, q, step, log_gamma[h], ages))
    return best


def _long_range(row: np.ndarray, h: int, q: int, sinks: int, window: int) -> set[int]:
    """Visible tokens of one query that are neither sink nor window; checks that those are there."""
    base = _base_row(len(row), q, sinks, window)
    if (base & ~row).any() or row[q + 1 :].any():
        raise ValueError(f"head {h}, query {q}: sinks or window missing, or the future visible")
    return set(np.flatnonzero(row & ~base).tolist())
