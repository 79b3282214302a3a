"""Attention of whole sequences by the kernels of serving: for policies whose decisions depend on attention, and for corrected
outputs, which no mask of scores describes."""

from __future__ import annotations

import torch

from kvpop_vllm.cache.retained import retained_positions
from kvpop_vllm.distill.retention import Roles
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

    def kept(self, roles: Roles) -> torch.Tensor:
        """``[H, E]`` booleans: which tokens of ``E(q)`` are held, q being the newest token, oldest first."""
        end = self.seen - roles.window
        found = torch.zeros(len(self.budgets), max(0, end - roles.sinks), dtype=torch.bool)
        for head, positions in enumerate(retained_positions(self.pages, self.table, self.seen, self.retention)):
            found[head, [t - roles.sinks for t in positions if roles.sinks <= t < end]] = True
        return found


class Served:
    """Attends as serving does; an :class:`kvpop_vllm.distill.hook.Attend`.

    Args:
        rule: ``rule(layer, heads) -> RetentionRule``. budget: B.
    """

    def __init__(self, rule, budget: int):
        self.rule, self.budget = rule, budget

    def __call__(self, layer, q, k, v, scale):
        rows = zip(*(x.detach().cpu() for x in (q, k, v)), strict=True)
        rule = self.rule(layer, k.shape[1])
        outs = [Sequence(rule, self.budget, row[1]).attend(*row, scale) for row in rows]
        return torch.stack(outs).to(q.device)


def kept_at_positions(
    rule: RetentionRule, roles: Roles, q, k, v, scale: float, positions: list[int]
) -> list[torch.Tensor]:
    """Which tokens of ``E(q0)`` are held at each of ``positions``, of sequences ``q [B, Hq, S, D]``, ``k, v [B, H, S, D]``:
    ``[B, H, E]`` booleans each, in the order of ``positions``."""
    found: dict[int, list[torch.Tensor]] = {q0: [] for q0 in sorted(positions)}
    for row in zip(*(x.detach().cpu() for x in (q, k, v)), strict=True):
        sequence = Sequence(rule, roles.budget, row[1])
        for q0, kept in found.items():
            if q0 + 1 > sequence.seen:
                sequence.attend(*(x[:, sequence.seen : q0 + 1] for x in row), scale)
            kept.append(sequence.kept(roles))
    return [torch.stack(found[q0]).to(q.device) for q0 in positions]
