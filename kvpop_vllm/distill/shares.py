"""Measurement of how the heads of a model should share the long-range slots (DESIGN "Unequal shares").

Some heads lose little by eviction and others much. What a head loses with so many slots is measured on rows of
text; the slots then go where they reduce the sum most. It is measured once and holds for all requests, as in
BaKlaVa (Gulhan et al. 2025, arXiv:2502.13176); the measure is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kvpop_vllm.distill.cutoffs import running_cutoffs
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.distill.student import Student
from kvpop_vllm.kernels import ops

PARTS = (0.0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 3 / 2, 2.0, 3.0)
"""Numbers of slots at which heads are measured, over the mean number k."""


class _Errors:
    """Dense attention that adds up what each head would lose with each number of slots.

    Attributes:
        errors: ``[layers, H, len(PARTS)]``, squared error of the head's outputs over the squared size of the
            layer's, from position B on.
        budget: slot roles of the row.
    """

    def __init__(self, student: Student):
        self.student, self.budget = student, student.roles(0)
        config = student.scorers[0].scorer.config
        self.errors = torch.zeros(config.num_layers, config.num_kv_heads, len(PARTS), dtype=torch.float64)

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        out, _ = dense_attention(q, k, v, scale)
        score, log_gamma = self.student.score(layer, k, v, self.budget)
        first, size = self.budget.budget, out[:, :, self.budget.budget :].float().square().sum()
        for i, part in enumerate(PARTS):
            slots = min(round(part * self.budget.topk), k.shape[2])
            roles = replace(self.budget, budget=self.budget.first_long + slots)
            rank, cutoff = running_cutoffs(score, log_gamma, roles)
            kept, _ = ops.sparse_attention(q, k, v, rank, cutoff, sinks=roles.sinks, window=roles.window, scale=scale)
            error = (kept - out)[:, :, first:].float().square().unflatten(1, (k.shape[1], -1))
            self.errors[layer, :, i] += (error.sum((0, 2, 3, 4)) / size).double().cpu()
        return out


@torch.no_grad()
def measure_errors(student: Student, rows: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return what each head of the dense model loses with each number of slots of :data:`PARTS`.

    Args:
        student: the model, its scorers and the budget, the first of its recipe.
        rows: tokens ``[S]``, S above the budget, and the length of their prompt.

    Returns:
        ``[layers, H, len(PARTS)]`` float64: squared error of the head's attention outputs from position B on over the
        squared size of all outputs of the layer, sum over rows.
    """
    observer = _Errors(student)
    for tokens, prompt in rows:
        observer.budget = student.roles(0, prompt)
        student.read(tokens.unsqueeze(0).to(next(student.parameters()).device), observer, 0)
    return observer.errors


def divide_slots(errors: torch.Tensor) -> torch.Tensor:
    """Return shares whose sum of errors is smallest, for heads whose error is linear between what was measured.

    Slots go to the steepest fall of any head's lower convex hull first.

    Args:
        errors: ``[layers, H, len(PARTS)]``, from :func:`measure_errors`.

    Returns:
        ``[layers, H]`` float64 with mean 1: slots over the mean number k.
    """
    flat, falls = errors.flatten(0, 1), []
    for head, curve in enumerate(flat.tolist()):
        at = 0
        while at < len(PARTS) - 1:
            slope, end = max(((curve[at] - curve[j]) / (PARTS[j] - PARTS[at]), j) for j in range(at + 1, len(PARTS)))
            if slope <= 0:
                break
            falls.append((slope, head, PARTS[end] - PARTS[at]))
            at = end
    shares, left = torch.zeros(len(flat), dtype=torch.float64), float(len(flat))
    for _, head, size in sorted(falls, reverse=True):
        taken = min(size, left)
        shares[head] += taken
        left -= taken
    return (shares + left / len(flat)).view(errors.shape[:2])  # slots that nobody needs go to all


def expected_error(errors: torch.Tensor, shares: torch.Tensor) -> float:
    """Return the sum of errors under shares ``[layers, H]``, linear between what was measured."""
    parts = torch.tensor(PARTS, dtype=torch.float64)
    at = shares.clamp(max=PARTS[-1])
    after = torch.searchsorted(parts, at.contiguous()).clamp(1, len(PARTS) - 1)
    weight = (at - parts[after - 1]) / (parts[after] - parts[after - 1])
    low, high = (errors.gather(-1, i.unsqueeze(-1)).squeeze(-1) for i in (after - 1, after))
    return float((low + weight * (high - low)).sum())
