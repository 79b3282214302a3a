"""A prompt compressed once at its end by its last queries' votes; part of the naive oracle."""

from __future__ import annotations

import math

import numpy as np
import torch

QUERIES, NEIGHBOURS = 32, 5
_LEAST = 2.0**-126
"""A vote of 0 counts as this."""


def vote_scores(query: torch.Tensor, key: torch.Tensor, prompt: int, window: int) -> torch.Tensor:
    """``r_t [H, S]`` in the dtype of ``key``: the logarithm of the votes of a prompt's token, 0 of its last ``window`` tokens and of
    those that come later.

    Args:
        query: ``[H * G, S, D]``. key: ``[H, S, D]``.
    """
    heads, length, size = key.shape
    group, voters = len(query) // heads, min(QUERIES, window, prompt)
    scores = torch.zeros(heads, length, dtype=key.dtype)
    first = prompt - voters
    for h in range(heads):
        votes = torch.zeros(max(0, first), dtype=key.dtype)
        for g in range(group):
            for q in range(first, prompt):
                logits = key[h, : q + 1] @ query[h * group + g, q] / math.sqrt(size)
                votes += logits.softmax(0)[:first] / (voters * group)
        for t in range(max(0, prompt - window)):
            near = votes[max(0, t - NEIGHBOURS // 2) : t + NEIGHBOURS // 2 + 1]
            scores[h, t] = (near.sum() / NEIGHBOURS).clamp_min(_LEAST).log()
    return scores


def divided_slots(scores: np.ndarray, prompt: int, sinks: int, window: int, topk: int) -> tuple[list[int], float]:
    """Long-range slots of each head where heads divide ``H * topk`` by their scores (Ada-KV), and the margin of that: the score of
    the worst token that got in by comparison with other heads' less that of the best that did not, infinite where nothing is compared.

    A fifth of the budget is every head's own, that of sinks and window included.

    Args:
        scores: ``[H, S]``, of the prompt's tokens the logarithms of their votes.
    """
    heads, budget = len(scores), sinks + window + topk
    tokens = range(sinks, prompt - window)
    if len(tokens) <= topk:
        return [topk] * heads, math.inf
    own, contested = [0] * heads, []
    for h in range(heads):
        ranked = sorted(tokens, key=lambda t: (-scores[h][t], -t))
        own[h] = max(0, budget // 5 - sinks - window)
        contested += [(-scores[h][t], -t, h) for t in ranked[own[h] :]]
    contested.sort()
    free = heads * topk - sum(own)
    for _, _, h in contested[:free]:
        own[h] += 1
    return own, float(contested[free][0] - contested[free - 1][0])


def held_until(visible: torch.Tensor, prompt: int) -> torch.Tensor:
    """Retained sets ``[H, S, S]`` in which every query of the prompt sees all tokens before it."""
    length = visible.shape[-1]
    whole = torch.ones(length, length, dtype=torch.bool).tril().expand_as(visible)
    return torch.where((torch.arange(length) < prompt).view(1, -1, 1), whole, visible)
