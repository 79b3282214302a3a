"""Attention of whole sequences by the kernels of serving: for policies whose decisions depend on attention, and for corrected
outputs, which no mask of scores describes."""

from __future__ import annotations

import torch

from kvpop_vllm.cache.retained import retained_positions
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.roles import Retention


class Sequence:
    """One row's cache of one layer, filled from its first token on.

    Args:
        rule: of the layer. budget: B. k: ``[H, S, D]``, for the sizes and the dtype.
    """

    def __init__(self, rule: RetentionRule, budget: int, k: torch.Tensor):
        heads, length, size = k.shape
        layout = PageLayout(heads, size, k.dtype, state_floats=rule.state_floats(size))
        blocks = layout.blocks(length, budget, rule.decide_every)
        raw = torch.zeros(blocks, heads, layout.region_bytes, dtype=torch.uint8)
        self.rule, self.pages, self.seen = rule, layout.view(raw), 0
        self.table = torch.arange(blocks, dtype=torch.int32).expand(heads, -1)
        self.budgets = torch.full((heads,), budget, dtype=torch.int32)
        self.retention = Retention(budget, rule.sinks, rule.window, rule.decide_every)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """The next tokens: ``q [Hq, L, D]``, ``k, v [H, L, D]`` -> ``[Hq, L, D]``."""
        tokens = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        out, _ = ops.prefill_chunk(
            *tokens, self.pages, self.table, self.seen, self.budgets, rule=self.rule, scale=scale
        )
        self.seen += q.shape[1]
        return out.transpose(0, 1)

    def kept(self) -> torch.Tensor:
        """``[H, E]`` booleans: which tokens of ``E(q)`` are held, q being the newest token, oldest first."""
        sinks, end = self.rule.sinks, self.seen - self.rule.window
        found = torch.zeros(len(self.budgets), max(0, end - sinks), dtype=torch.bool)
        for head, positions in enumerate(retained_positions(self.pages, self.table, self.seen, self.retention)):
            found[head, [t - sinks for t in positions if sinks <= t < end]] = True
        return found


class Served:
    """Attends as serving does; an :class:`kvpop_vllm.distill.hook.Attend`.

    Args:
        rule: ``rule(layer, heads) -> RetentionRule``. budget: B.
    """

    def __init__(self, rule, budget: int):
        self.rule, self.budget = rule, budget

    def __call__(self, layer, q, k, v, scale):
        return attend_and_keep(self.rule(layer, k.shape[1]), self.budget, q, k, v, scale, [])[0]


def attend_and_keep(
    rule: RetentionRule,
    budget: int,
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
    outs, stops = [], sorted({*positions, q.shape[2] - 1})
    found: dict[int, list[torch.Tensor]] = {q0: [] for q0 in stops}
    for row in zip(*(x.detach().cpu() for x in (q, k, v)), strict=True):
        sequence, parts = Sequence(rule, budget, row[1]), []
        for q0 in stops:
            parts.append(sequence.attend(*(x[:, sequence.seen : q0 + 1] for x in row), scale))
            if q0 in positions:
                found[q0].append(sequence.kept())
        outs.append(torch.cat(parts, 1))
    return torch.stack(outs).to(q.device), [torch.stack(found[q0]).to(q.device) for q0 in positions]
