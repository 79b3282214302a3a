"""Ranks and running cutoffs of a static order in plain torch.

All heads process the queries together.
"""

from __future__ import annotations

import torch


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
    shape, length = priority.shape, priority.shape[-1]
    rank = ranks(priority)
    cutoff = torch.full(shape, length - 1 if topk else -1, dtype=torch.int32, device=priority.device)
    if topk and length > sinks + window + topk:
        flat = cutoff.view(-1, length)
        _fill_cutoffs(rank.reshape(-1, length), flat, sinks, window, topk)
    return rank.int(), cutoff


def _fill_cutoffs(rank, cutoff, sinks, window, topk):
    """Write the cutoffs with a Fenwick tree over ranks for each row.

    The tree is 1-based: node i counts the eligible ranks in ``(i - lowbit(i), i]``.
    """
    rows, length = rank.shape
    depth = length.bit_length()
    size = 1 << depth
    tree = torch.zeros(rows, size + 1, dtype=torch.int32, device=rank.device)
    ones = torch.ones(rows, 1, dtype=torch.int32, device=rank.device)
    for q in range(sinks + window, length):
        node = rank[:, q - window : q - window + 1] + 1
        for _ in range(depth + 1):  # a node past the end is clamped to `size`, which no search reads
            tree.scatter_add_(1, node, ones)
            node = (node + (node & -node)).clamp_max(size)
        if q - window - sinks + 1 > topk:
            cutoff[:, q] = _find(tree, topk, depth)


def _find(tree, count, depth):
    """Return the rank ``[rows]`` of the ``count``-th best inserted token, found by binary lifting."""
    at = torch.zeros(tree.shape[0], 1, dtype=torch.int64, device=tree.device)
    left = torch.full_like(at, count)
    for bit in reversed(range(depth)):
        ahead = tree.gather(1, at + (1 << bit))
        step = ahead < left
        at, left = torch.where(step, at + (1 << bit), at), torch.where(step, left - ahead, left)
    return at.squeeze(1).int()
