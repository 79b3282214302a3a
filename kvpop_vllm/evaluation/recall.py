"""Recall of a policy, per layer and KV head: how much it keeps of what a perfect judge would keep."""

from dataclasses import dataclass
from functools import cache

import torch

from kvpop_vllm.distill.cutoffs import kept_at, running_cutoffs
from kvpop_vllm.distill.targets import retention_target
from kvpop_vllm.roles import Retention

BLOCK = 512


@dataclass
class Recall:
    """Recall of one layer, means over sequences and query positions, each ``[H]``.

    Attributes:
        teacher: share of the teacher's top k (future attention with the policy's own decay) that is kept at
            the same position (KVpop Figure 7).
        hindsight: share that is kept of the k eligible tokens that later queries attend to most. It does not
            depend on a decay, so that recency alone cannot win it.
        mass: attention mass of the kept tokens, as a share of the mass on those k tokens, which is the most
            that k tokens can have.
    """

    teacher: torch.Tensor
    hindsight: torch.Tensor
    mass: torch.Tensor


class Judge:
    """Dense attention of one layer, against which policies are judged. Results are cached for all policies.

    Args:
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, S]``, log-normalisers of dense attention.
        scale: factor on q . k.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float):
        self.q, self.k, self.lse, self.scale = q, k, lse, scale
        # caches of the instance, since those of methods would keep every judge alive
        self.target, self.later_mass = cache(self._target), cache(self._later_mass)

    def _target(self, window: int) -> torch.Tensor:
        return retention_target(self.q, self.k, self.lse, window=window, scale=self.scale)

    def _later_mass(self, q0: int, sinks: int, window: int) -> torch.Tensor:
        """Return the attention that queries after q0 give to the tokens of ``E(q0)``, ``[B, H, E]``.

        It is the largest of the group's query heads.
        """
        heads = self.k.shape[1]
        q, lse = self.q.unflatten(1, (heads, -1)).float(), self.lse.unflatten(1, (heads, -1))
        eligible = self.k[:, :, None, sinks : q0 - window + 1].float()
        total = torch.zeros(*lse.shape[:3], eligible.shape[3], device=self.k.device)
        # in blocks, because all logits at once would fill the memory
        for a in range(q0 + 1, q.shape[3], BLOCK):
            cut = slice(a, a + BLOCK)
            logits = q[..., cut, :] @ eligible.transpose(-1, -2) * self.scale
            total += torch.exp(logits - lse[..., cut, None]).sum(-2)
        # query heads of a group share the slot: the one that needs it most counts
        return total.amax(2)

    @torch.no_grad()
    def recall_of(
        self, held_masks: list[torch.Tensor], log_gamma: torch.Tensor, roles: Retention, positions: list[int]
    ) -> Recall:
        """Return the recall of given kept tokens.

        Args:
            held_masks: for each position, ``[B, H, E]`` booleans as from :func:`kept_at`.
            log_gamma: ``[H]`` of the teacher.
            roles: slot roles of the budget.
            positions: query positions q0.

        Raises:
            ValueError: nothing has been evicted yet at one of the positions, or k is 0.
        """
        if not roles.topk or min(positions) < roles.budget or max(positions) > self.k.shape[2] - 2:
            raise ValueError(
                f"recall needs k >= 1 and positions from B = {roles.budget} to S - 2, got k = {roles.topk} and {positions}"
            )
        teacher_rank, teacher_cutoff = running_cutoffs(self.target(roles.window), log_gamma, roles)
        rows = []
        for q0, held_tokens in zip(positions, held_masks, strict=True):
            teacher = kept_at(teacher_rank, teacher_cutoff, q0, roles)
            # all sequences and heads hold as many, see on_dense()
            mass, count = self.later_mass(q0, roles.sinks, roles.window), int(held_tokens[0, 0].sum())
            # the best choice of as many tokens
            best = mass.topk(count, dim=-1)
            hindsight = held_tokens.gather(-1, best.indices).float().mean(-1)
            shares = (
                (held_tokens & teacher).sum(-1) / count,
                hindsight,
                (mass * held_tokens).sum(-1) / best.values.sum(-1),
            )
            rows.append(torch.stack(shares))
        return Recall(*torch.stack(rows).mean(dim=(0, 2)))
