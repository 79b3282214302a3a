"""Losses of the trainer: retention at every layer, distillation at the output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvpop_vllm.distill.cutoffs import kept_at, running_cutoffs
from kvpop_vllm.distill.listwise import listwise_loss
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.sparse_attention import Pass, dense_attention
from kvpop_vllm.distill.targets import retention_target
from kvpop_vllm.kernels import ops
from kvpop_vllm.roles import Retention

MARGIN, BALANCE = (0.1, 1.0), (0.2, 5.0)
"""Floor and clip of the weights by margin and by balance; they are ours, the paper gives none."""


class RetentionLoss:
    """Observer of a sparse pass that computes the scorers' loss and retention recall of every layer.

    Positions are drawn from a generator seeded with ``seed`` and the layer, so that a layer that activation
    checkpointing runs twice draws the same positions.

    Args:
        roles: slot roles of the budget.
        recipe: options of the boundary and listwise losses, and of their targets.
        seed: seed of the row.

    Attributes:
        losses: layer -> scalar.
        recalls: layer -> the paper's top-k retention recall half way from B to S, mean over heads. It ranks by the same
            targets as the losses, so runs of other powers do not compare by it.
    """

    def __init__(self, roles: Retention, recipe: Recipe, seed: int):
        self.roles, self.recipe, self.seed = roles, recipe, seed
        self.losses: dict[int, torch.Tensor] = {}
        self.recalls: dict[int, torch.Tensor] = {}

    def __call__(self, attention: Pass) -> None:
        """Add the loss and recall of one layer."""
        roles, recipe = self.roles, self.recipe
        q, k = attention.q.detach(), attention.k.detach()
        lse = attention.lse
        if recipe.exact_targets:  # the pass has the log-normalisers of sparse attention
            lse = dense_attention(q, k, k, attention.scale, attention.sink_logits)[1]
        # exp(power * (scale q.k - lse)) is the power of the attention
        lse, scale = recipe.target_power * lse, recipe.target_power * attention.scale
        target = retention_target(
            q,
            k,
            lse,
            window=roles.window,
            scale=scale,
            lookahead=recipe.lookahead,
            normalise=recipe.normalise,
            groups=recipe.groups,
        )
        loss = attention.score.sum() * 0  # of a row that evicts nothing
        seed = self.seed * 1000 + attention.layer
        if recipe.boundary:
            loss = recipe.boundary * ops.boundary_loss(
                attention.score,
                target,
                attention.log_gamma,
                sinks=roles.sinks,
                window=roles.window,
                topk=attention.topk,
                step=roles.step,
                tau=recipe.tau,
                samples=recipe.samples,
                margin=MARGIN if recipe.margin else None,
                balance=BALANCE if recipe.balance else None,
                generator=torch.Generator().manual_seed(seed),
            )
        begins = [roles.first_long + topk for topk in attention.topk]
        if recipe.listwise and min(begins) < target.shape[-1]:
            positions = _positions(recipe.lists, min(begins), target.shape[-1], seed)
            options = {"scale": scale, "groups": recipe.groups, "begins": begins}
            lists = listwise_loss(attention.score, attention.log_gamma, q, k, lse, positions, roles, **options)
            loss = loss + recipe.listwise * lists
        self.losses[attention.layer] = loss
        self.recalls[attention.layer] = _teacher_recall(attention, target, roles)

    def total(self) -> torch.Tensor:
        """Return the mean loss over layers."""
        return torch.stack([self.losses[layer] for layer in sorted(self.losses)]).mean()

    def recall(self) -> torch.Tensor:
        """Return the mean recall over layers and heads."""
        return torch.stack(list(self.recalls.values())).mean()


def _positions(count: int, first: int, end: int, seed: int) -> list[int]:
    """Return at most ``count`` positions from first to end, one drawn from each of as many equal parts."""
    fractions = (torch.arange(count) + torch.rand(count, generator=torch.Generator().manual_seed(seed))) / count
    return sorted({min(end - 1, first + int(fraction * (end - first))) for fraction in fractions.tolist()})


@torch.no_grad()
def _teacher_recall(attention: Pass, target, roles: Retention) -> torch.Tensor:
    rank, cutoff = running_cutoffs(target, attention.log_gamma, roles, attention.topk)
    # half way from B to the end: targets of the youngest tokens rest on few queries
    q = (roles.budget + target.shape[-1]) // 2
    if q >= target.shape[-1] or not any(attention.topk):
        return torch.ones((), device=target.device)
    teacher = kept_at(rank, cutoff, q, roles)
    agreed = (teacher & kept_at(attention.rank, attention.cutoff, q, roles)).sum(-1)
    heads = [h for h, topk in enumerate(attention.topk) if topk and roles.first_long + topk <= q]
    if not heads:
        return torch.ones((), device=target.device)
    return torch.stack([agreed[:, h] / teacher[:, h].sum(-1) for h in heads]).mean()


def top_kl(student: torch.Tensor, teacher: torch.Tensor, indices: torch.Tensor, focus: float = 0.0) -> torch.Tensor:
    """Return the forward KL of the teacher's top K tokens to the student.

    The teacher is renormalised over its top K tokens, the student over the whole vocabulary. With ``focus`` above 0 a
    position counts ``1 + focus * p (1 - q)`` times: p is the teacher's probability of its best token, q the student's
    of the same token. So positions count most whose teacher is sure and whose student is not, at most ``1 + focus``
    times. The weight carries no gradient. It is ours, after the focal loss ``(1 - q)^gamma`` (Lin et al. 2017, eq. 4).

    Args:
        student: ``[..., V]`` logits.
        teacher: ``[..., K]`` logits of the tokens ``indices``.
        indices: ``[..., K]`` ids.
        focus: see above.

    Returns:
        Mean over positions of the weighted divergence, in nats.
    """
    log_p = F.log_softmax(teacher.float(), -1)
    log_q = F.log_softmax(student.float(), -1).gather(-1, indices.long())
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    if focus:
        sure, best = log_p.exp().max(-1, keepdim=True)
        doubt = 1 - log_q.detach().gather(-1, best).exp()
        kl = kl * (1 + focus * sure * doubt).squeeze(-1)
    return kl.mean()
