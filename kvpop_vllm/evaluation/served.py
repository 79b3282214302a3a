"""Attention by the kernels of serving: of whole rows, and of requests that go on token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.cache.retained import STALE, divided, slot_positions
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.kernels.regions import HeadRegions
from kvpop_vllm.roles import Retention


class Sequence:
    """One request's cache of one layer, filled from its first token on.

    Args:
        rule: of the layer. budget: B of all heads, or of each, ``[H]`` int32. like: keys ``[H, ..., D]``, for the sizes and the
            dtype. length: tokens it has room for. prompt: tokens of the prompt; what follows has been generated.
    """

    def __init__(
        self, rule: RetentionRule, budget: int | torch.Tensor, like: torch.Tensor, *, length: int, prompt: int
    ):
        heads, size = like.shape[0], like.shape[-1]
        self.budgets = torch.as_tensor(budget, dtype=torch.int32).expand(heads).contiguous()
        layout = PageLayout(heads, size, like.dtype, state_floats=rule.state_floats(size))
        blocks = layout.blocks(length, int(self.budgets.max()), rule.decide_every)
        self.rule, self.seen, self.prompt = rule, 0, prompt
        if rule.share_pages:
            blocks = max(blocks, layout.blocks(budget := int(self.budgets.max()), budget)) + HeadRegions.spare
            regions = HeadRegions(layout, budget, blocks)
            self.pages = regions.view(torch.zeros(blocks, heads, layout.region_bytes, dtype=torch.uint8))
            self.table = regions.rows(0, torch.arange(blocks, dtype=torch.int32)[None])[0]
        else:
            self.pages = layout.view(torch.zeros(blocks, heads, layout.region_bytes, dtype=torch.uint8))
            self.table = torch.arange(blocks, dtype=torch.int32).expand(heads, -1)
        roles = rule.for_prompt(prompt)
        self.retentions = [
            Retention(b, rule.sinks, rule.window, rule.decide_every, roles.phase) for b in self.budgets.tolist()
        ]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """The next tokens: ``q [Hq, L, D]``, ``k, v [H, L, D]`` -> ``[Hq, L, D]``. One token is a decode step."""
        tokens = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
        if len(tokens[0]) == 1:
            valid = torch.tensor([[r.extent(self.seen, r.budget) for r in self.retentions]], dtype=torch.int32)
            out, _ = ops.decode_step(
                *tokens,
                self.pages,
                self.table[None],
                torch.tensor([self.seen]),
                valid,
                self.budgets[None],
                rule=self.rule,
                scale=scale,
                prompts=torch.tensor([self.prompt]),
            )
        else:
            own = dict(rule=self.rule, scale=scale, prompt=self.prompt)
            out, _ = ops.prefill_chunk(*tokens, self.pages, self.table, self.seen, self.budgets, **own)
        self.seen += len(tokens[0])
        return out.transpose(0, 1)

    def held(self) -> torch.Tensor:
        """``[H, seen]`` booleans: which tokens are held."""
        found = torch.zeros(len(self.budgets), self.seen, dtype=torch.bool)
        table, filled = self.table, None
        if self.rule.share_pages:
            shares = divided(self.pages, self.table, self.rule)
            table, filled = shares.row, shares.filled
        slots: dict[int, torch.Tensor] = {}
        for head, retention in enumerate(self.retentions):
            if retention.budget not in slots:
                slots[retention.budget] = slot_positions(self.pages, table, self.seen, retention, filled)
            own = slots[retention.budget][head]
            found[head, own[own != STALE]] = True
        return found

    def kept(self) -> torch.Tensor:
        """``[H, E]`` booleans: which tokens of ``E(q)`` are held, q being the newest token, oldest first."""
        return self.held()[:, self.rule.sinks : max(self.rule.sinks, self.seen - self.rule.window)]


class Request:
    """The caches of all layers of one request, an :class:`kvpop_vllm.distill.hook.Attend` that goes on where it stopped.

    Args:
        rule: ``rule(layer) -> RetentionRule``. budgets: ``budgets(layer) -> [H]`` int32.
        length: tokens it has room for. prompt: tokens of its prompt.
    """

    def __init__(
        self,
        rule: Callable[[int], RetentionRule],
        budgets: Callable[[int], torch.Tensor],
        *,
        length: int,
        prompt: int,
    ):
        self.rule, self.budgets, self.length, self.prompt = rule, budgets, length, prompt
        self.layers: dict[int, Sequence] = {}

    def __call__(self, layer, q, k, v, scale):
        device = q.device
        q, k, v = (x.detach().cpu()[0] for x in (q, k, v))
        if layer not in self.layers:
            sizes = {"length": self.length, "prompt": self.prompt}
            self.layers[layer] = Sequence(self.rule(layer), self.budgets(layer), k, **sizes)
        return self.layers[layer].attend(q, k, v, scale)[None].to(device)

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


class Served:
    """Attends to whole rows as serving does; an :class:`kvpop_vllm.distill.hook.Attend`. The whole row counts as prompt.

    Args:
        rule: ``rule(layer) -> RetentionRule``. budgets: ``budgets(layer) -> [H]`` int32.
    """

    def __init__(self, rule: Callable[[int], RetentionRule], budgets: Callable[[int], torch.Tensor]):
        self.rule, self.budgets = rule, budgets

    def __call__(self, layer, q, k, v, scale):
        return attend_and_keep(self.rule(layer), self.budgets(layer), q, k, v, scale, [])[0]


def attend_and_keep(
    rule: RetentionRule,
    budget: int | torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    positions: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sequences ``q [B, Hq, S, D]``, ``k, v [B, H, S, D]`` as serving attends to them.

    Returns:
        ``out [B, Hq, S, D]``, and for each of ``positions``, in their order, ``[B, H, E]`` booleans: which tokens of
        ``E(q0)`` are held at q0, oldest first.
    """
    length = q.shape[2]
    outs, stops = [], sorted({*positions, length - 1})
    found: dict[int, list[torch.Tensor]] = {q0: [] for q0 in stops}
    for row in zip(*(x.detach().cpu() for x in (q, k, v)), strict=True):
        sequence, parts = Sequence(rule, budget, row[1], length=length, prompt=length), []
        for q0 in stops:
            parts.append(sequence.attend(*(x[:, sequence.seen : q0 + 1] for x in row), scale))
            if q0 in positions:
                found[q0].append(sequence.kept())
        outs.append(torch.cat(parts, 1))
    return torch.stack(outs).to(q.device), [torch.stack(found[q0]).to(q.device) for q0 in positions]
