"""How much of what a perfect judge would keep a policy keeps, per layer and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.distill.retention import Roles, kept_at, running_cutoffs
from kvpop_vllm.distill.targets import retention_target

BLOCK = 512


@dataclass
class Recall:
    """Means over the positions asked about, each ``[H]``.

    Attributes:
        teacher: share of the teacher's top k (future attention with the policy's own decay) that is kept at the same
            position (KVpop Figure 7).
        hindsight: of the k eligible tokens that later queries attend to most, the share that is kept.
        mass: attention mass of what is kept, as a share of the mass on those k tokens, the most that k tokens can hold.
    """

    teacher: torch.Tensor
    hindsight: torch.Tensor
    mass: torch.Tensor


def later_mass(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, q0: int, roles: Roles, scale: float):
    """Attention that the queries after q0 give to the tokens eligible at q0, the largest of the group: ``[B, H, |E(q0)|]``.

    Args:
        q ``[B, Hq, S, D]``, k ``[B, H, S, D]``, lse ``[B, Hq, S]`` of dense attention.
    """
    heads = k.shape[1]
    q, lse = q.unflatten(1, (heads, -1)).float(), lse.unflatten(1, (heads, -1))
    eligible = k[:, :, None, roles.sinks : q0 - roles.window + 1].float()
    total = torch.zeros(*lse.shape[:3], eligible.shape[3], device=k.device)
    for a in range(q0 + 1, q.shape[3], BLOCK):
        cut = slice(a, a + BLOCK)
        logits = q[..., cut, :] @ eligible.transpose(-1, -2) * scale
        total += torch.exp(logits - lse[..., cut, None]).sum(-2)
    return total.amax(2)


@torch.no_grad()
def recall(
    score: torch.Tensor,
    log_gamma: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    roles: Roles,
    scale: float,
    positions: list[int],
) -> Recall:
    """One layer's recall at equal k.

    Args:
        score: ``[B, H, S]`` raw scores. log_gamma: ``[H]``. q ``[B, Hq, S, D]``, k ``[B, H, S, D]``, lse ``[B, Hq, S]`` of
            dense attention. positions: the q0 of hindsight recall, each at least ``s + w + k`` so that something had to go.
    """
    if min(positions) < roles.budget:
        raise ValueError(f"recall is asked for at {min(positions)}, where nothing has been evicted yet")
    rank, cutoff = running_cutoffs(score, log_gamma, roles)
    target = retention_target(q, k, lse, window=roles.window, scale=scale)
    teacher_rank, teacher_cutoff = running_cutoffs(target, log_gamma, roles)
    rows = []
    for q0 in positions:
        kept = kept_at(rank, cutoff, q0, roles)
        teacher = kept_at(teacher_rank, teacher_cutoff, q0, roles)
        mass = later_mass(q, k, lse, q0, roles, scale)
        best = mass.topk(roles.topk, dim=-1)
        hit = kept.gather(-1, best.indices)
        rows.append(
            torch.stack(
                [
                    (kept & teacher).sum(-1) / roles.topk,
                    hit.float().mean(-1),
                    (mass * kept).sum(-1) / best.values.sum(-1),
                ]
            )
        )
    return Recall(*torch.stack(rows).mean(dim=(0, 2)))
