"""Prompts compressed once at their end by the votes of their last queries, part of the naive oracle."""

import math

import numpy as np
import torch

QUERIES, NEIGHBOURS = 32, 5
_LEAST = 2.0**-126
"""Lower bound of a vote, so that its logarithm is finite."""


def vote_scores(
    query: torch.Tensor, key: torch.Tensor, prompt: int, window: int, sink_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``r_t [H, S]`` in the dtype of ``key``: the logarithm of the votes of prompt tokens.

    The score is 0 for the last ``window`` tokens of the prompt and for later tokens.

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        prompt: number of prompt tokens.
        window: ``w``.
        sink_logits: ``[H * G]``, logits of a further key that every query sees, None for none.
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
                if sink_logits is not None:
                    logits = torch.cat([logits, sink_logits[h * group + g].to(logits).view(1)])
                votes += logits.softmax(0)[:first] / (voters * group)
        for t in range(max(0, prompt - window)):
            # neighbours beyond the ends count as 0, since the sum is always divided by five
            near = votes[max(0, t - NEIGHBOURS // 2) : t + NEIGHBOURS // 2 + 1]
            scores[h, t] = (near.sum() / NEIGHBOURS).clamp_min(_LEAST).log()
    return scores


def divided_slots(scores: np.ndarray, prompt: int, sinks: int, window: int, topk: int) -> tuple[list[int], float]:
    """Return the long-range slots of each head if heads divide ``H * topk`` by their scores (Ada-KV).

    The second result is a margin: the score of the worst token that was selected by comparison across heads,
    minus that of the best one that was not. It is infinite if nothing is compared. A fifth of the budget is
    reserved for every head, including its sinks and window.

    Args:
        scores: ``[H, S]``, for prompt tokens the logarithms of their votes.
        prompt: number of prompt tokens.
        sinks: ``s``.
        window: ``w``.
        topk: mean ``k`` of the heads.
    """
    heads, budget = len(scores), sinks + window + topk
    tokens = range(sinks, prompt - window)
    if len(tokens) <= topk:
        return [topk] * heads, math.inf
    counts, contested = [0] * heads, []
    for h in range(heads):
        # ties keep the newer token
        ranked = sorted(tokens, key=lambda t: (-scores[h][t], -t))
        counts[h] = max(0, budget // 5 - sinks - window)
        contested += [(-scores[h][t], -t, h) for t in ranked[counts[h] :]]
    contested.sort()
    free = heads * topk - sum(counts)
    for _, _, h in contested[:free]:
        counts[h] += 1
    return counts, float(contested[free][0] - contested[free - 1][0])
