"""Eviction times of tokens that arrive one by one at k long-range slots, plain torch."""

from __future__ import annotations

import torch

NEVER = torch.iinfo(torch.int64).max


def online_topk(score, position, held, *, topk, window, log_gamma, decay_step=1):
    """See :func:`kvpop_vllm.kernels.ops.online_topk`."""
    arrivals = score.shape[-1] - held
    if arrivals <= 0 or held + arrivals <= topk:
        return torch.full(position.shape, NEVER, dtype=torch.int64)
    if decay_step == 1:
        return _static_order(score, position, held, topk, window, log_gamma)
    return _aged_order(score, position, held, topk, window, log_gamma, decay_step)


def _static_order(score, position, held, topk, window, log_gamma):
    """With n = 1 the order never changes: after each arrival the surplus worst of all that have arrived are out."""
    priority = score.double() - position.double() * log_gamma.unsqueeze(-1)
    by_age = position.argsort(dim=-1, stable=True)
    worst_first = by_age.gather(-1, priority.gather(-1, by_age).argsort(dim=-1, stable=True))
    arrivals = score.shape[-1] - held
    step = torch.arange(arrivals)
    arrived = (worst_first - held).unsqueeze(-1) <= step  # [H, T, arrivals]; those held from the start are negative
    surplus = (held + step + 1 - topk).clamp_min(0)
    evicted = arrived & (arrived.cumsum(-2) <= surplus)
    first = arrivals - evicted.sum(-1)
    at = torch.where(first < arrivals, position[:, held].unsqueeze(-1) + window + first, NEVER)
    return torch.empty_like(position).scatter_(-1, worst_first, at)


def _aged_order(score, position, held, topk, window, log_gamma, decay_step):
    """With n > 1 the order changes with q: every arrival is simulated."""
    heads, total = score.shape
    evicted_at = torch.full((heads, total), NEVER, dtype=torch.int64)
    alive = torch.zeros(heads, total, dtype=torch.bool)
    alive[:, :held] = True
    for j in range(held, total):
        alive[:, j] = True
        if j < topk:
            continue
        q = position[:, j : j + 1] + window
        effective = score.double() + ((q - position) // decay_step) * log_gamma.unsqueeze(-1)
        effective = torch.where(alive, effective, torch.inf)
        lowest = effective == effective.amin(-1, keepdim=True)
        victim = torch.where(lowest & alive, position, NEVER).argmin(-1, keepdim=True)
        evicted_at.scatter_(-1, victim, q)
        alive.scatter_(-1, victim, False)
    return evicted_at
