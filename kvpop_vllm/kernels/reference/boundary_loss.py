"""Boundary loss in plain torch; other ops rank the teacher's scores."""

import torch
import torch.nn.functional as F

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.transfers import to_device


def boundary_loss(
    pred, target, log_gamma, *, sinks, window, topk, step, tau, samples, margin, balance, generator=None, order="reference"
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.boundary_loss`.

    ``topk`` has a k for each head; ``order`` is the implementation of the ops that rank scores.
    """
    length, firsts = pred.shape[-1], [sinks + window + k for k in topk]  # first queries at which heads evict
    evicting = [k > 0 and first < length for k, first in zip(topk, firsts, strict=True)]
    q = _positions(samples, pred.shape, firsts, generator, pred.device)
    if q.numel() == 0 or not any(evicting):
        return pred.sum() * 0 + log_gamma.sum().to(pred.dtype) * 0
    begin, counted = (to_device(torch.tensor(x), pred.device).unsqueeze(1) for x in (firsts, evicting))
    if isinstance(samples, torch.Tensor) and bool(((q < begin) | (q >= length)).any()):
        raise ValueError(f"samples must lie in [{max(firsts)}, {length - 1}] = [s + w + k, S - 1]")
    number = sum(evicting) * q.shape[0] * q.shape[2]
    with torch.no_grad():
        decay = log_gamma.detach().double()
        teacher = _static_teacher if step == 1 else _aged_teacher
        keeps, boundary = teacher(target.detach(), decay, q, sinks, window, topk, step, order)
        y = torch.where(keeps, 1.0, -1.0).to(pred.dtype)
        gap = _gap(target.detach().double(), decay, q, q - window, boundary, step)
        weight = _weights(y, gap, margin, balance, counted, number).to(pred.dtype)
    difference = _gap(pred.double(), log_gamma.double(), q, q - window, boundary, step).to(pred.dtype)
    return (counted * weight * F.softplus(-y * difference / tau)).sum() / number


def _positions(samples, shape, firsts, generator, device):
    """Return the query positions ``[B, H, N]``; the last one for heads that never evict."""
    batch, heads, length = shape
    if isinstance(samples, torch.Tensor):
        return samples.to(device).long().expand(batch, heads, samples.shape[-1])
    first = torch.as_tensor(firsts)
    span = (length - first).clamp_min(0).unsqueeze(1)
    source = device if generator is None else generator.device
    count = samples if min(firsts) < length else 0
    u = torch.rand(batch, heads, count, generator=generator, dtype=torch.float64, device=source)
    late = u[..., samples // 2 :].sqrt()
    u = torch.cat([u[..., : samples // 2], late], -1)
    span, first = (x.to(source) for x in (span, first.unsqueeze(1)))
    return to_device((first + (u * span).long().minimum(span - 1)).clamp_max(length - 1), device)


def _gap(score, log_gamma, q, a, b, step):
    """Return the effective score of token a minus that of token b at query q, all ``[B, H, N]``."""
    age_steps = (q - a) // step - (q - b) // step
    return score.gather(-1, a) - score.gather(-1, b) + age_steps * log_gamma.unsqueeze(-1)


def _static_teacher(target, log_gamma, q, sinks, window, topk, step, order):
    """Return whether the teacher keeps ``q - w``, and the token to compare it with, for n = 1.

    Both follow from one running top-k.
    """
    t = torch.arange(target.shape[-1], device=target.device)
    priority = target.double() - t * log_gamma.unsqueeze(-1)
    rank, cutoff = (x.long() for x in ops.running_topk(priority, sinks=sinks, window=window, topk=topk, impl=order))
    by_rank = torch.empty_like(rank).scatter_(-1, rank, t.expand_as(rank))
    new_rank, last = rank.gather(-1, q - window), cutoff.gather(-1, q).clamp_min(0)
    dropped = cutoff.gather(-1, q - 1).clamp_min(0)  # last kept token at q - 1; evicted if t_new is kept
    end = to_device(sinks + torch.tensor(topk), target.device).unsqueeze(1)
    among_first = (t >= sinks) & (t < end)  # the first k eligible tokens, which query s + w + k - 1 keeps
    all_of_them = rank.where(among_first, 0).amax(-1, keepdim=True)
    dropped = torch.where(q == window + end, all_of_them, dropped)
    return new_rank <= last, by_rank.gather(-1, torch.where(new_rank == last, dropped, last))


def _aged_teacher(target, log_gamma, q, sinks, window, topk, step, order):
    """Return whether the teacher keeps ``q - w``, and the token to compare it with, for n > 1.

    The order changes with q. Evictions are therefore simulated, then the retained token of lowest effective
    score is found at each sampled q.
    """
    batch, heads, length = target.shape
    target = target.float()  # raw scores are defined as float32
    eligible = torch.arange(sinks, length, device=target.device)
    gone = ops.online_topk(
        target[..., sinks:].reshape(batch * heads, -1).contiguous(),
        eligible.expand(batch * heads, -1).contiguous(),
        0,
        topk=topk * batch,
        window=window,
        log_gamma=log_gamma.repeat(batch),
        decay_step=step,
        impl=order,
    ).view(batch, heads, -1)
    keeps = gone.gather(-1, q - window - sinks) > q
    query, new = q.unsqueeze(-1), (q - window).unsqueeze(-1)
    effective = target[:, :, None, sinks:].double() + (query - eligible) // step * log_gamma.view(-1, 1, 1)
    retained = (eligible <= new) & (gone.unsqueeze(2) > query)
    weakest = eligible[_lowest(effective, retained)]
    leaves = eligible[(gone.unsqueeze(2) == query).int().argmax(-1)]
    return keeps, torch.where(weakest == q - window, leaves, weakest)


def _lowest(effective, retained):
    """Return the index of the lowest score among the retained tokens; of equal scores the oldest token's."""
    return effective.masked_fill(~retained, torch.inf).argmin(-1)


def _weights(y, gap, margin, balance, counted, number):
    """Return the weight of each example from the keep/drop balance and the margin.

    ``number`` examples count, those of the heads ``counted [H, 1]``.
    """
    weight = torch.ones_like(gap)
    if balance is not None:
        keep = (y > 0).double().mean(dim=(0, 2), keepdim=True)
        share = torch.where(y > 0, keep, 1 - keep)
        weight = (0.5 / share).clamp(*balance)
        weight = weight / ((counted * weight).sum() / number)
    if margin is not None:
        lowest, sharpness = margin
        weight = weight * (lowest + (1 - lowest) * torch.sigmoid(y * gap / sharpness))
    return weight
