"""Ranks and running cutoffs of a static order, row by row."""

import heapq
from itertools import cycle

import torch

from kvpop_vllm.kernels.ops.training import check_priorities


def ranks(priority: torch.Tensor) -> torch.Tensor:
    """Return ranks ``[..., S]`` int64, 0 for the highest priority.

    Of equal priorities the newer comes first.
    """
    length = priority.shape[-1]
    newest_first = priority.flip(-1)
    best_first = length - 1 - newest_first.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(length, device=priority.device).expand(priority.shape)
    return torch.empty_like(best_first).scatter_(-1, best_first, places)


def running_topk(priority, *, sinks, window, topk):
    """Implement :func:`kvpop_vllm.kernels.ops.running_topk`."""
    check_priorities(priority)
    shape, length = priority.shape, priority.shape[-1]
    rank = ranks(priority)
    rows = rank.reshape(-1, max(1, length)).tolist()
    cutoff = [_cutoffs(row, sinks, window, slots) for row, slots in zip(rows, cycle(topk), strict=False)]
    return rank.int(), torch.tensor(cutoff, dtype=torch.int32, device=priority.device).view(shape)


def _cutoffs(rank: list[int], sinks: int, window: int, topk: int) -> list[int]:
    """Return the cutoff of every query, with a heap of the k best ranks, the worst on top."""
    best: list[int] = []
    cutoff = [len(rank) - 1 if topk else -1] * len(rank)  # while slots are free every token is visible
    for q in range(sinks + window, len(rank)) if topk else ():
        # heapq has the smallest on top, and the worst rank is the largest
        heapq.heappush(best, -rank[q - window])
        if len(best) > topk:
            heapq.heappop(best)
            cutoff[q] = -best[0]
    return cutoff
