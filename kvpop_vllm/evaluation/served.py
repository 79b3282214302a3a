"""Attention by the kernels of serving, for whole rows and for requests that continue token by token."""

from __future__ import annotations

from typing import Protocol

import torch

from kvpop_vllm.attention.allocate import allocate_pages
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.attention.step_batch import FixedBudgetAttention, RequestSettings, StepBatch, tail_tables
from kvpop_vllm.config import ConfigError, protected_tokens
from kvpop_vllm.kernels.divided import DividedRegions
from kvpop_vllm.kernels.draws import request_seed
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.kernels.regions import divided_blocks
from kvpop_vllm.kernels.retained import held_tokens
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Gate, Signals


class Sequence:
    """Cache of one layer of one request, filled from its first token on.

    Args:
        rule: rule of the layer.
        budget: B of all heads, or of each, ``[H]`` int32.
        like: keys ``[H, ..., D]``, for sizes and dtype.
        length: tokens that it has room for.
        protected: p, tokens that are never evicted.
        shifted: True if the score given with token t + 1 is used for token t.
        seed: seed of draws.
    """

    def __init__(
        self,
        rule: RetentionRule,
        budget: int | torch.Tensor,
        like: torch.Tensor,
        *,
        length: int,
        protected: int = 0,
        shifted: bool = False,
        seed: int = 0,
    ):
        heads, size = like.shape[0], like.shape[-1]
        self.budgets = torch.as_tensor(budget, dtype=torch.int32).expand(heads).contiguous()
        self.layout = PageLayout(heads, size, like.dtype, state_floats=rule.state_floats(size))
        self.rule, self.seen, self.protected, self.shifted = rule, 0, protected, shifted
        self.seeds = torch.tensor([request_seed(0, seed)])
        self.retention = Retention(int(self.budgets.max()), rule.sinks, rule.window)
        length = None if rule.compresses else length  # the tail holds the tokens chosen from the prompt
        adaptive_head_budgets = rule.compresses and rule.votes.adaptive_head_budgets
        slots = divided_blocks(heads, self.retention.budget, self.layout.block_slots) if adaptive_head_budgets else 0
        most = max(self.retention.budget, slots * self.layout.block_slots)
        self.blocks, table = allocate_pages(self.layout, most, length=length, protected=protected)
        self.row = table[:, 0].contiguous()
        self.regions = DividedRegions(self.blocks, rule.votes, self.retention.budget) if adaptive_head_budgets else None
        self.pages = self.regions.pages if adaptive_head_budgets else self.blocks

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, gate_scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of the next tokens; a single token is a decode step.

        Args:
            q: ``[Hq, L, D]``.
            k: ``[H, L, D]``.
            v: ``[H, L, D]``.
            scale: factor on q . k.
            gate_scores: ``[H, L]`` gate scores, or None.

        Returns:
            ``[Hq, L, D]``.
        """
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        gate_scores, out, count = (
            None if gate_scores is None else gate_scores.T.contiguous(),
            torch.empty_like(q),
            len(q),
        )
        sizes = RequestSettings([self.protected], self.budgets.unsqueeze(0), None, self.seeds, self.rule.compresses)
        told = [count], torch.tensor([self.seen + count]), self.row, sizes
        batch = StepBatch.build(self.layout, self.retention, *told, self.regions)
        if self.shifted:
            gate_scores = shift(gate_scores, self.pages, batch, self.rule.sinks)
        FixedBudgetAttention(self.layout, self.rule, scale).forward(
            q, k, v, self.pages, batch, out, gate_scores, self.blocks
        )
        self.seen += count
        return out.transpose(0, 1)

    def held(self) -> torch.Tensor:
        """Return which tokens are held, ``[H, seen]`` booleans."""
        tails, budgets = tail_tables(self.row, [self.protected], self.layout), self.budgets
        compressed, tail = self.rule.compresses and self.seen >= self.protected, tails.expand(len(budgets), -1)
        if self.regions is not None:
            (budgets,), (tail,) = self.regions.place(0, tails, [compressed])
        return held_tokens(self.pages, tail, self.seen, self.rule, budgets, 0 if compressed else self.protected)

    def kept(self) -> torch.Tensor:
        """Return which tokens of ``E(q)`` are held, oldest first, as ``[H, E]`` booleans.

        q is the newest token.
        """
        first = max(self.rule.sinks, self.protected)
        return self.held()[:, first : max(first, self.seen - self.rule.window)]


class Policy(Protocol):
    """Policy in every layer of a model; :class:`kvpop_vllm.evaluation.policies.ResolvedPolicy` is one.

    Attributes:
        shifted: True if the score given with token t + 1 is used for token t.
        protect: protected tokens of a prompt, True for all.
    """

    shifted: bool
    protect: bool | int

    def rule(self, layer: int) -> RetentionRule:
        """Return the rule of all heads of a layer."""

    def budgets(self, layer: int) -> torch.Tensor:
        """Return B of each head of a layer, ``[H]`` int32."""

    def gate(self, layer: int) -> Gate | None:
        """Return the gate that scores tokens at insertion, or None if the kernels score them."""


class Gated:
    """Base class that stores the input of each layer's attention and computes gate scores."""

    def __init__(self, policy: Policy):
        self.policy, self.hidden, self.channel = policy, {}, {}

    def see(self, layer: int, hidden: torch.Tensor) -> None:
        """Store the attention's input ``[B, L, E]``, just before the layer attends.

        See :func:`kvpop_vllm.distill.hook.show_hidden_states`.
        """
        self.hidden[layer] = hidden

    def see_channel(self, layer: int, channel: torch.Tensor | None) -> None:
        """Store the borrowed channel ``[B, L, H]`` just before the layer attends, or None.

        See :func:`kvpop_vllm.distill.hook.borrow_channel`.
        """
        self.channel[layer] = channel

    def gate_scores(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """Return gate scores ``[B, H, L]`` for k, v ``[B, H, L, D]``, on the CPU; None without a gate.

        Raises:
            ConfigError: the gate reads a channel that the model does not give up.
        """
        hidden, channel, gate = self.hidden.pop(layer, None), self.channel.pop(layer, None), self.policy.gate(layer)
        if gate is None:
            return None
        if gate.borrows and channel is None:
            raise ConfigError(
                "this gate reads a query channel that the model has not given up: give --model the model it was trained with"
            )
        seen = Signals(hidden, k.transpose(1, 2), v.transpose(1, 2), channel)
        return gate.to(k.device)(seen).transpose(1, 2).detach().cpu()


class Request(Gated):
    """Caches of all layers of one request, an :class:`kvpop_vllm.distill.hook.Attend`.

    Each call continues the sequence.

    Args:
        policy: the policy to run.
        length: tokens that the caches have room for.
        protected: p, tokens that are never evicted.
    """

    def __init__(self, policy: Policy, *, length: int, protected: int = 0):
        super().__init__(policy)
        self.length, self.protected = length, protected
        self.layers: dict[int, Sequence] = {}

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of a layer's next tokens; see :class:`kvpop_vllm.distill.hook.Attend`."""
        device, gate_scores = q.device, self.gate_scores(layer, k, v)
        q, k, v = (x.detach().cpu()[0] for x in (q, k, v))
        if layer not in self.layers:
            sizes = {"length": self.length, "protected": self.protected, "shifted": self.policy.shifted}
            self.layers[layer] = Sequence(self.policy.rule(layer), self.policy.budgets(layer), k, **sizes)
        out = self.layers[layer].attend(q, k, v, scale, None if gate_scores is None else gate_scores[0])
        return out[None].to(device)

    def held(self) -> torch.Tensor:
        """Return which tokens are held, ``[layers, H, seen]`` booleans."""
        return torch.stack([self.layers[layer].held() for layer in sorted(self.layers)])


class DenseRequest:
    """Request with a cache that keeps everything, attended to by torch.

    It shares no kernel with the policies.
    """

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of a layer's next tokens; see :class:`kvpop_vllm.distill.hook.Attend`."""
        if layer in self.layers:
            k, v = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        new, past = q.shape[2], k.shape[2] - q.shape[2]
        mask = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
        seen = {"is_causal": True} if not past else {"attn_mask": mask}
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **seen)


class Served(Gated):
    """Attention of whole rows as in serving; an :class:`kvpop_vllm.distill.hook.Attend`."""

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer; see :class:`kvpop_vllm.distill.hook.Attend`."""
        gate_scores, policy = self.gate_scores(layer, k, v), self.policy
        own = {
            "gate_scores": gate_scores,
            "shifted": policy.shifted,
            "protected": protected_tokens(policy.protect, q.shape[2]),
        }
        return attend_and_keep(policy.rule(layer), policy.budgets(layer), q, k, v, scale, [], **own)[0]


def attend_and_keep(
    rule: RetentionRule,
    budget: int | torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    positions: list[int],
    *,
    gate_scores: torch.Tensor | None = None,
    shifted: bool = False,
    protected: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the attention of sequences as in serving, and the tokens that are held.

    Args:
        rule: rule of the layer.
        budget: B of all heads, or of each, ``[H]`` int32.
        q: ``[B, Hq, S, D]``.
        k: ``[B, H, S, D]``.
        v: ``[B, H, S, D]``.
        scale: factor on q . k.
        positions: query positions q0.
        gate_scores: ``[B, H, S]`` gate scores, or None.
        shifted: True if the score given with token t + 1 is used for token t.
        protected: p, tokens that are never evicted.

    Returns:
        ``out [B, Hq, S, D]``, and for each of ``positions``, in their order, ``[B, H, E]`` booleans: which
        tokens of ``E(q0)`` are held at q0, oldest first.
    """
    length = q.shape[2]
    outs, stops = [], sorted({*positions, length - 1})
    found: dict[int, list[torch.Tensor]] = {q0: [] for q0 in stops}
    scores = [None] * len(q) if gate_scores is None else gate_scores
    for score, *row in zip(scores, *(x.detach().cpu() for x in (q, k, v)), strict=True):
        sequence, parts = Sequence(rule, budget, row[1], length=length, protected=protected, shifted=shifted), []
        for q0 in stops:
            a, b = sequence.seen, q0 + 1
            own = None if score is None else score[:, a:b]
            parts.append(sequence.attend(*(x[:, a:b] for x in row), scale, own))
            if q0 in positions:
                found[q0].append(sequence.kept())
        outs.append(torch.cat(parts, 1))
    return torch.stack(outs).to(q.device), [torch.stack(found[q0]).to(q.device) for q0 in positions]
