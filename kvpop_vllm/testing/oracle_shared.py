"""Heads that divide a layer's budget by their scores (Ada-KV); part of the naive oracle.

Heads wait for each other, so queries are followed one by one, and at each all heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from .oracle_coupled import GENERATED, _pooled_votes, _undecided
from .oracle_scores import MEAN_MASS, VOTES

FLOOR = Fraction(1, 5)
"""The part of an equal share that every head gets."""


def divided(ranked: Sequence[Sequence[tuple[float, int]]], topk: int) -> list[int] | None:
    """How many of its ranked tokens, ``(score, position)``, each head may keep, or None if all may stay.

    The heads' numbers among the ``H k`` best of all, less a fifth, and a fifth of k; fractions go to the next heads.
    """
    heads = len(ranked)
    all_of_them = sorted((score, t, h) for h in range(heads) for score, t in ranked[h])
    if len(all_of_them) <= heads * topk:
        return None
    best = [h for *_, h in all_of_them[len(all_of_them) - heads * topk :]]
    shares, given = [], 0
    for h in range(heads):
        due = sum((1 - FLOOR) * best.count(i) + FLOOR * topk for i in range(h + 1))
        shares.append(math.floor(due + Fraction(1, 2)) - given)
        given += shares[-1]
    return shares


def follow_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    how: str | torch.Tensor,
    sinks: int,
    window: int,
    topk: int,
    interval: int,
    prompt: int,
    decay: Sequence[float] | None = None,
    step: int = 1,
    forced: torch.Tensor | None = None,
    bias: Sequence[tuple[int, int, float]] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Retained sets ``[H, S, S]`` where heads divide ``H k`` long-range tokens at every decision up to query ``prompt``.

    Args:
        query, key, value, sinks, window, topk, interval, prompt, forced, bias: as for
            :func:`kvpop_vllm.testing.oracle_coupled.follow_attention`. how: VOTES, a mass as there, or raw scores ``[H, S]``.
        decay, step: ``log gamma`` of each head and n, of raw scores.

    Returns:
        ``visible``, ``margins``, ``scores``, ``lost`` of :class:`kvpop_vllm.testing.oracle_policy.Decided`.
    """
    heads, length, size = key.shape
    group = len(query) // heads
    visible, margins, scores, lost_best = _undecided(heads, length, key.dtype)
    kept: list[list[int]] = [[] for _ in range(heads)]
    shares, waiting = [topk] * heads, []
    masses: list[torch.Tensor] = []  # of each query, [H, S]
    total = torch.zeros(heads, length, dtype=key.dtype)
    frozen: list[dict[int, float]] = [{} for _ in range(heads)]
    votes = isinstance(how, str) and how == VOTES
    more = {(h, t): by for h, t, by in bias}
    for q in range(length):
        if q - window >= sinks:
            waiting.append(q - window)
        decides = (q - prompt if votes else q + 1) % interval == 0
        if decides:
            rank = []
            for h in range(heads):
                tokens = sorted(kept[h] + waiting)
                if votes and q <= prompt:
                    frozen[h] = _pooled_votes(tokens, [own[h] for own in masses[max(0, q - interval) :]])
                rank.append(
                    {
                        t: _score(how, h, t, q, (masses[-1] if masses else total, total), frozen[h], decay, step)
                        + more.get((h, t), 0.0)
                        for t in tokens
                    }
                )
            ranked = [[(score, t) for t, score in own.items()] for own in rank]
            joint = math.inf
            if q <= prompt and (new := divided(ranked, topk)) is not None:
                shares = new
                every = sorted(score for own in ranked for score, _ in own)
                joint = every[-heads * topk] - every[-heads * topk - 1] if topk else math.inf
            for h in range(heads):
                order = [t for _, t in sorted((score, t) for score, t in ranked[h])]
                surplus = max(0, len(order) - shares[h])
                lost = order[:surplus] if forced is None else [t for t in order if not forced[h, q, t]]
                kept[h] = [t for t in order if t not in lost]
                if lost:
                    best = max(lost, key=lambda t, own=rank[h]: own[t])
                    worst = min((rank[h][t] for t in kept[h]), default=math.inf)
                    lost_best[h, q] = best
                    margins[h, q] = math.inf if rank[h][best] == GENERATED else min(joint, worst - rank[h][best])
                    if kept[h]:
                        scores[h, q] = torch.tensor([rank[h][best], worst], dtype=key.dtype)
            waiting = []
        mass = torch.zeros(heads, length, dtype=key.dtype)
        for h in range(heads):
            seen = sorted({*kept[h], *waiting, *(t for t in range(q + 1) if t < sinks or t > q - window)})
            visible[h, q, seen] = True
            logits = query[h * group : (h + 1) * group, q] @ key[h, seen].T / math.sqrt(size)
            mass[h, seen] = logits.softmax(-1).mean(0)
        masses.append(mass)
        total = total + mass
    return visible, margins, scores, lost_best


def _score(how, h: int, t: int, q: int, masses, frozen, decay, step: int) -> float:
    """How token t of head h ranks at query q; masses: of the newest query, and of all of them, ``[H, S]``."""
    if not isinstance(how, str):
        return float(how[h, t]) + math.floor((q - t) / step) * decay[h]
    if how == VOTES:
        return frozen.get(t, GENERATED)
    if how == MEAN_MASS:
        return float(masses[1][h, t]) / (q - t)
    return float(masses[0][h, t])
