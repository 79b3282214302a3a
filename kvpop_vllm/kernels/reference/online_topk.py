"""Eviction times of tokens that arrive one by one at k long-range slots, in plain torch."""

import torch

from kvpop_vllm.kernels.draws import draw

NEVER = torch.iinfo(torch.int64).max


def online_topk(score, position, retained, *, topk, window, log_gamma, decay_step=1, ages=False, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.online_topk`."""
    arrivals = score.shape[-1] - retained
    if arrivals <= 0 or retained + arrivals <= topk:
        return torch.full(position.shape, NEVER, dtype=torch.int64, device=score.device)
    if decay_step == 1 and not ages and keys is None:
        return _static_order(score, position, retained, topk, window, log_gamma)
    return _aged_order(score, position, retained, topk, window, log_gamma, decay_step, ages, keys)


def _static_order(score, position, retained, topk, window, log_gamma):
    """Compute eviction times for n = 1, where the order never changes.

    After each arrival, the worst tokens that have arrived are evicted, as many as exceed k. The total number
    of evictions is known. Of the tokens in the slots at the start, only that many of the worst are
    candidates.
    """
    priority = score.double() - position.double() * log_gamma.unsqueeze(-1)
    arrivals, leave = score.shape[-1] - retained, score.shape[-1] - topk
    weakest = _worst_first(priority[:, :retained], position[:, :retained])[:, :leave]
    newcomers = torch.arange(retained, score.shape[-1], device=score.device).expand(score.shape[0], -1)
    candidates = torch.cat([weakest, newcomers], -1)
    order = _worst_first(priority.gather(-1, candidates), position.gather(-1, candidates))
    candidates = candidates.gather(-1, order)
    step = torch.arange(arrivals, device=score.device)
    # [H, candidates, arrivals]; tokens in the slots at the start are negative
    arrived = (candidates - retained).unsqueeze(-1) <= step
    surplus = (retained + step + 1 - topk).clamp_min(0)
    evicted = arrived & (arrived.cumsum(-2, dtype=torch.int32) <= surplus)
    first = arrivals - evicted.sum(-1)
    eviction_time = torch.where(first < arrivals, position[:, retained].unsqueeze(-1) + window + first, NEVER)
    return torch.full_like(position, NEVER).scatter_(-1, candidates, eviction_time)


def _worst_first(priority, position):
    """Return indices ``[H, n]`` by rising priority; of equal priorities the older token comes first."""
    by_age = position.argsort(dim=-1, stable=True)
    return by_age.gather(-1, priority.gather(-1, by_age).argsort(dim=-1, stable=True))


def _aged_order(score, position, retained, topk, window, log_gamma, decay_step, ages, keys):
    """Simulate every arrival, because the order changes with q.

    This is the case with n > 1, with ages and with draws.
    """
    heads, total = score.shape
    evicted_at = torch.full((heads, total), NEVER, dtype=torch.int64, device=score.device)
    alive = torch.zeros(heads, total, dtype=torch.bool, device=score.device)
    alive[:, :retained] = True
    for j in range(retained, total):
        alive[:, j] = True
        if j < topk:
            continue
        q = position[:, j : j + 1] + window
        effective = score.double() * (q - position if ages else 1)
        if keys is not None:
            effective = draw(keys.unsqueeze(-1), q, position)
        effective = effective + ((q - position) // decay_step) * log_gamma.unsqueeze(-1)
        effective = torch.where(alive, effective, torch.inf)
        lowest = effective == effective.amin(-1, keepdim=True)
        victim = torch.where(lowest & alive, position, NEVER).argmin(-1, keepdim=True)
        evicted_at.scatter_(-1, victim, q)
        alive.scatter_(-1, victim, False)
    return evicted_at
