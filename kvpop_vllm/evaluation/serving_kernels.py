"""Attention of whole rows by the kernels of serving, driven with the q, k and v of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpop_vllm.config import protected_tokens
from kvpop_vllm.hf.devices import kernel_device
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.model_hook import GateInputs

if TYPE_CHECKING:
    from kvpop_vllm.evaluation.policies import ResolvedPolicy


class Served(GateInputs):
    """Attention of whole rows as in serving (an :class:`kvpop_vllm.model_hook.Attend`)."""

    takes_sinks = True

    def __init__(self, policy: ResolvedPolicy):
        super().__init__()
        self.policy = policy

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer. See :class:`kvpop_vllm.model_hook.Attend`."""
        gate_scores = self.policy.gate_scores(layer, self.signals(layer, k, v))
        return attend_and_keep(self.policy, layer, q, k, v, scale, [], gate_scores, sink_logits=sink_logits)[0]


def attend_and_keep(
    policy: ResolvedPolicy,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    positions: list[int],
    gate_scores: torch.Tensor | None = None,
    budgets: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the attention of sequences as in serving, and the tokens that are held.

    Args:
        policy: the policy to run.
        layer: index of the layer.
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        v: ``[B, H, S, D]``.
        scale: factor on q . k.
        positions: query positions q0.
        gate_scores: ``[B, S, H]`` gate scores, or None.
        budgets: ``[H]`` int32, B of each head, None for the policy's.
        sink_logits: ``[Hq]``, logits of the model's attention sinks, or None.

    Returns:
        ``out [B, Hq, S, D]``, and for each of ``positions``, in their order, ``[B, H, E]`` booleans: which
        tokens of ``E(q0)`` are held at q0, oldest first.
    """
    device, length, rule = q.device, q.shape[2], policy.rules[layer]
    running = kernel_device(k, rule)
    # the kernels have no gradients
    q, k, v = (x.detach().to(running) for x in (q, k, v))
    protected = min(length, protected_tokens(policy.protect, length))
    budgets = policy.budgets(layer) if budgets is None else budgets
    settings = {"protected": protected, "shifted": policy.policy.shifted, "seed": policy.spec.seed}
    settings["row_budget"] = policy.roles.budget
    rows, outs, held_at = LayerRows(rule, budgets, k, scale, **settings), [], {}
    first = max(rule.sinks, protected)
    # the last position too, so that every query is answered
    for q0 in sorted({*positions, length - 1}):
        cut = slice(rows.tokens_seen, q0 + 1)
        scores = None if gate_scores is None else gate_scores[:, cut].detach().to(running)
        outs.append(rows.append(q[:, :, cut], k[:, :, cut], v[:, :, cut], scores, sink_logits))
        if q0 in positions:
            held_at[q0] = rows.held_by_rows()[..., first : max(first, q0 + 1 - rule.window)].to(device)
    return torch.cat(outs, 2).to(device), [held_at[q0] for q0 in positions]
