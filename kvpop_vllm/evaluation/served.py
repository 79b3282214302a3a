"""Attention by the kernels of serving: of whole rows, and of requests that go on token by token."""

from __future__ import annotations

from typing import Protocol

import torch

from kvpop_vllm.attention.fixed_budget import FixedBudgetAttention, Sizes, StepBatch, tail_tables
from kvpop_vllm.attention.fresh import fresh_pages
from kvpop_vllm.attention.shifted import shift
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
    """One request's cache of one layer, filled from its first token on.

    Args:
        rule: of the layer. budget: B of all heads, or of each, ``[H]`` int32. like: keys ``[H, ..., D]``, for the sizes and the
            dtype. length: tokens it has room for. protected: p, tokens that are never evicted.
        shifted: the score given with token t + 1 is token t's. seed: of draws.
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
        length = None if rule.compresses else length  # the tail holds what is chosen of the prompt
        divides = rule.compresses and rule.votes.divides
        slots = divided_blocks(heads, self.retention.budget, self.layout.block_slots) if divides else 0
        most = max(self.retention.budget, slots * self.layout.block_slots)
        self.blocks, table = fresh_pages(self.layout, most, length=length, protected=protected)
        self.row = table[:, 0].contiguous()
        self.regions = DividedRegions(self.blocks, rule.votes, self.retention.budget) if divides else None
        self.pages = self.regions.pages if divides else self.blocks

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, given: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next tokens: ``q [Hq, L, D]``, ``k, v [H, L, D]``, ``given [H, L]`` -> ``[Hq, L, D]``. One token is a decode step."""
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        given, out, count = None if given is None else given.T.contiguous(), torch.empty_like(q), len(q)
        sizes = Sizes([self.protected], self.budgets.unsqueeze(0), None, self.seeds, self.rule.compresses)
        told = [count], torch.tensor([self.seen + count]), self.row, sizes
        batch = StepBatch.build(self.layout, self.retention, *told, self.regions)
        if self.shifted:
            given = shift(given, self.pages, batch, self.rule.sinks)
        FixedBudgetAttention(self.layout, self.rule, scale).forward(q, k, v, self.pages, batch, out, given, self.blocks)
        self.seen += count
        return out.transpose(0, 1)

    def held(self) -> torch.Tensor:
        """``[H, seen]`` booleans: which tokens are held."""
        tails, budgets = tail_tables(self.row, [self.protected], self.layout), self.budgets
        compressed, tail = self.rule.compresses and self.seen >= self.protected, tails.expand(len(budgets), -1)
        if self.regions is not None:
            (budgets,), (tail,) = self.regions.place(0, tails, [compressed])
        return held_tokens(self.pages, tail, self.seen, self.rule, budgets, 0 if compressed else self.protected)

    def kept(self) -> torch.Tensor:
        """``[H, E]`` booleans: which tokens of ``E(q)`` are held, q being the newest token, oldest first."""
        first = max(self.rule.sinks, self.protected)
        return self.held()[:, first : max(first, self.seen - self.rule.window)]


class Policy(Protocol):
    """What runs in every layer of a model; :class:`kvpop_vllm.evaluation.contenders.Deployed` is one."""

    shifted: bool
    protect: bool | int

    def rule(self, layer: int) -> RetentionRule:
        """Of all heads."""

    def budgets(self, layer: int) -> torch.Tensor:
        """``[H]`` int32."""

    def gate(self, layer: int) -> Gate | None:
        """What scores tokens when they come in, if the kernels do not."""


class Gated:
    """Remembers what goes into a layer's attention, and what its gate says of it."""

    def __init__(self, policy: Policy):
        self.policy, self.hidden, self.channel = policy, {}, {}

    def see(self, layer: int, hidden: torch.Tensor) -> None:
        """``[B, L, E]``, just before the layer attends (:func:`kvpop_vllm.distill.hook.show_hidden_states`)."""
        self.hidden[layer] = hidden

    def see_channel(self, layer: int, channel: torch.Tensor | None) -> None:
        """``[B, L, H]``, just before the layer attends, if it gives up a channel (:func:`kvpop_vllm.distill.hook.borrow_channel`)."""
        self.channel[layer] = channel

    def given(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """``[B, H, L]`` for k, v ``[B, H, L, D]``, on the CPU; None without a gate.

        Raises:
            ConfigError: it reads a channel that the model does not give up.
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
    """The caches of all layers of one request, an :class:`kvpop_vllm.distill.hook.Attend` that goes on where it stopped.

    Args:
        policy: what runs. length: tokens it has room for. protected: p, tokens that are never evicted.
    """

    def __init__(self, policy: Policy, *, length: int, protected: int = 0):
        super().__init__(policy)
        self.length, self.protected = length, protected
        self.layers: dict[int, Sequence] = {}

    def __call__(self, layer, q, k, v, scale):
        device, given = q.device, self.given(layer, k, v)
        q, k, v = (x.detach().cpu()[0] for x in (q, k, v))
        if layer not in self.layers:
            sizes = {"length": self.length, "protected": self.protected, "shifted": self.policy.shifted}
            self.layers[layer] = Sequence(self.policy.rule(layer), self.policy.budgets(layer), k, **sizes)
        out = self.layers[layer].attend(q, k, v, scale, None if given is None else given[0])
        return out[None].to(device)

    def held(self) -> torch.Tensor:
        """``[layers, H, seen]`` booleans: which tokens are held."""
        return torch.stack([self.layers[layer].held() for layer in sorted(self.layers)])


class DenseRequest:
    """The same with a cache that keeps everything, attended to by torch: shares no kernel with the policies."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, q, k, v, scale):
        if layer in self.layers:
            k, v = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        new, past = q.shape[2], k.shape[2] - q.shape[2]
        mask = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
        seen = {"is_causal": True} if not past else {"attn_mask": mask}
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **seen)


class Served(Gated):
    """Attends to whole rows as serving does; an :class:`kvpop_vllm.distill.hook.Attend`."""

    def __call__(self, layer, q, k, v, scale):
        given, policy = self.given(layer, k, v), self.policy
        own = {"given": given, "shifted": policy.shifted, "protected": protected_tokens(policy.protect, q.shape[2])}
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
    given: torch.Tensor | None = None,
    shifted: bool = False,
    protected: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sequences ``q [B, Hq, S, D]``, ``k, v [B, H, S, D]`` as serving attends to them; ``given [B, H, S]`` from a gate.

    Returns:
        ``out [B, Hq, S, D]``, and for each of ``positions``, in their order, ``[B, H, E]`` booleans: which tokens of
        ``E(q0)`` are held at q0, oldest first.
    """
    length = q.shape[2]
    outs, stops = [], sorted({*positions, length - 1})
    found: dict[int, list[torch.Tensor]] = {q0: [] for q0 in stops}
    scores = [None] * len(q) if given is None else given
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
