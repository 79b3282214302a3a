"""Fit of each head's decay to the attention that is lost (DESIGN "Training").

The training loss alone says little about decays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kvpop_vllm.distill.cutoffs import running_cutoffs
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.distill.student import Student
from kvpop_vllm.kernels.ops.training import NotFinite
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Decay

POINTS = 12
QUERIES = 256
FLOOR = 1e-6
"""Lost mass below which decays count as equal; of equal decays a head gets the slowest."""


def decay_grid(decay: Decay) -> torch.Tensor:
    """Return candidates for log gamma inside the decay's range, geometric in ``-log gamma``.

    Returns:
        ``[12]`` float64, smallest gamma first.

    Raises:
        ValueError: the range is empty or reaches 1.
    """
    fast, slow = -math.log(decay.min), -math.log(decay.max)
    if not 0 < slow < fast:
        raise ValueError(f"fitted decays need min < max < 1, got {decay.min} and {decay.max}")
    exponents = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    return -fast * (slow / fast) ** exponents


def lost_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scores: Sequence[torch.Tensor],
    log_gammas: torch.Tensor,
    budgets: Sequence[Retention],
    positions: torch.Tensor,
    scale: float,
    topk: Sequence[Sequence[int] | None] | None = None,
) -> torch.Tensor:
    """Return the attention that queries give to evicted tokens, for each budget and decay.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, S]``, log-normalisers of dense attention.
        scores: raw scores ``[B, H, S]`` for each budget.
        log_gammas: ``[G]``.
        budgets: slot roles of each budget, all with the same sinks.
        positions: ``[P]``, positions of the queries.
        scale: factor on q . k.
        topk: for each budget k ``[H]`` of the heads; None for that of the roles.

    Returns:
        ``[len(budgets), G, H]``, a share of all attention: mean over sequences, positions and the query heads
        of a KV head.
    """
    heads, length = k.shape[1], k.shape[2]
    queries = q[:, :, positions].float().unflatten(1, (heads, -1))
    logits = queries @ k.float().unsqueeze(2).transpose(-1, -2) * scale
    t = torch.arange(length, device=k.device)
    # a later key, which is not in the log-normaliser, may have an infinite exponential
    logits = logits.masked_fill(t > positions.unsqueeze(-1), -torch.inf)
    mass = torch.exp(logits - lse[:, :, positions].unflatten(1, (heads, -1)).unsqueeze(-1)).mean(2)
    mass *= t >= budgets[0].sinks
    losses = []
    for roles, score, slots in zip(budgets, scores, topk or [None] * len(budgets), strict=True):
        left = mass * (t <= positions.unsqueeze(-1) - roles.window)
        for log_gamma in log_gammas:
            rank, cutoff = running_cutoffs(score, log_gamma.expand(heads), roles, slots)
            evicted = rank.unsqueeze(2) > cutoff[:, :, positions].unsqueeze(-1)
            losses.append((left * evicted).sum(-1).mean((0, 2)))
    return torch.stack(losses).view(len(budgets), len(log_gammas), heads)


def budgets_of(student: Student, prompt: int = 0) -> list[Retention]:
    """Return the slot roles of all of the recipe's budgets for a row with a prompt of so many tokens."""
    return [student.roles(row, prompt) for row in range(len(student.recipe.trained))]


class _LostMass:
    """Dense attention that adds up the lost mass of every layer."""

    takes_sinks = True

    def __init__(self, student: Student, log_gammas: torch.Tensor):
        self.student, self.log_gammas = student, log_gammas
        self.budgets = budgets_of(student)
        layers, heads = len(student.scorers), student.scorers[0].scorer.config.num_kv_heads
        self.lost = torch.zeros(layers, len(self.budgets), len(log_gammas), heads, dtype=torch.float64)

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        out, lse = dense_attention(q, k, v, scale, sink_logits)
        by_window = {r.window: self.student.score(layer, k, v, r)[0] for r in self.budgets}
        scores = [by_window[r.window] for r in self.budgets]
        first, last = max(r.budget for r in self.budgets), k.shape[2] - 1
        positions = torch.linspace(first, last, min(QUERIES, last - first + 1), device=k.device).long().unique()
        log_gammas = self.log_gammas.to(k.device)
        topk = [slots and slots[layer] for slots in map(self.student.topk, self.budgets)]
        self.lost[layer] += lost_mass(q, k, lse, scores, log_gammas, self.budgets, positions, scale, topk).cpu()
        return out


@torch.no_grad()
def fit_decays(
    student: Student, rows: Sequence[torch.Tensor], decay: Decay, prompts: Sequence[int] | None = None
) -> tuple[torch.Tensor, float]:
    """Return the decay under which each head's scorer loses least attention on ``rows``.

    Decays are those of :func:`decay_grid`. Attention is that of the dense model. The criterion is the mean of
    log lost mass over the recipe's budgets, so that no budget outweighs another. This is not in the paper,
    which learns the decay with the other parameters (KVpop section 3.3).

    Args:
        student: the model and its scorers.
        rows: ``[S]`` tokens each, the same in all processes, with S above the largest budget.
        decay: range of the decays.
        prompts: number of tokens of each row's prompt; None for 0.

    Returns:
        The parameter of the decays, ``decay_logit [layers, H]`` float32, relative to that range, and the lost
        mass under them, mean over layers, heads, budgets and rows.

    Raises:
        NotFinite: a score is infinite or NaN.
        ValueError: there are no rows, or they are too short.
    """
    prompts = prompts or [0] * len(rows)
    longest = max(roles.budget for roles in budgets_of(student))
    if not rows or min(map(len, rows)) <= longest:
        raise ValueError(f"fitting decays needs rows of more than {longest} tokens, the largest budget")
    device, log_gammas = next(student.parameters()).device, decay_grid(decay)
    observer = _LostMass(student, log_gammas)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        observer.budgets = budgets_of(student, prompt)
        student.read(row.unsqueeze(0).to(device), observer, number)
        if not student.finite():
            raise NotFinite("scores are not finite")
    lost = observer.lost / len(rows)
    if dist.is_initialized():
        shared = lost.to(device)
        dist.broadcast(shared, 0)
        lost = shared.cpu()
    judged = lost.clamp_min(FLOOR).log().mean(1)
    chosen = judged.shape[1] - 1 - judged.flip(1).argmin(1)
    low, high = math.log(decay.min), math.log(decay.max)
    logits = torch.special.logit((log_gammas[chosen] - low) / (high - low)).float()
    return logits, lost.gather(2, chosen[:, None, None, :].expand(-1, lost.shape[1], 1, -1)).mean().item()
