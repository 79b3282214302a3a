"""Attention of one layer over a fixed-budget paged cache, for any engine: decode rows together, prefill chunks one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule, StepOrderError
from kvpop_vllm.kernels.pages import PageLayout, Pages
from kvpop_vllm.kernels.regions import RegionMap
from kvpop_vllm.roles import Retention


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens ``[first, last)`` of the flat batch belong to one request, from position ``start`` on; ``row [H, P]``."""

    first: int
    last: int
    start: int
    row: torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """One engine step, shared by all layers. Requests with one token are decoded together.

    Attributes:
        decodes: number R of requests decoded. tokens: where their tokens lie in the flat batch, a slice where they come
            first. table: ``[R, H, P]`` int32. positions: ``[R]`` int64.
        budgets: ``[H]`` int32, B of each head.
        prefills: the other requests, in order.
        starts: ``[n]`` int64, position each request with tokens goes on from, in order. slot_zero: ``[n, H]`` int64, the
            page of each head's slot 0, which knows how many tokens were seen. None where the host must not wait for them:
            each kernel then answers for its own requests.
    """

    decodes: int
    tokens: slice | torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    budgets: torch.Tensor
    prefills: tuple[PrefillChunk, ...]
    starts: torch.Tensor | None
    slot_zero: torch.Tensor | None

    @classmethod
    def build(
        cls,
        layout: PageLayout,
        retention: Retention,
        query_lens: list[int],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        regions: RegionMap | None = None,
        layer: int = 0,
    ) -> StepBatch:
        """Splits a batch into decodes and prefills.

        Args:
            retention: of all heads and layers. query_lens: tokens of each request in this step. seq_lens: ``[requests]``, lengths including them.
            block_table: ``[requests, >= P]`` int32, state blocks first.
            regions, layer: where heads hold different numbers of tokens, where their pages are, and of which layer.
        """
        heads = layout.num_kv_heads
        if regions is None:
            budgets = torch.full((heads,), retention.budget, dtype=torch.int32)
            width = layout.blocks(retention.budget, retention.budget)
            rows = block_table[:, :width].unsqueeze(1).expand(-1, heads, -1)
        else:
            budgets, rows = regions.budgets(layer), regions.rows(layer, block_table)
        lengths = seq_lens.tolist()
        singles, at, prefills, first = [], [], [], 0
        for i, count in enumerate(query_lens):
            if count == 1:
                singles.append(i)
                at.append(first)
            elif count > 1:
                prefills.append(PrefillChunk(first, first + count, lengths[i] - count, rows[i]))
            first += count
        together = at == list(range(len(at))) and singles == at
        chosen = slice(0, len(singles)) if together else torch.tensor(singles)
        positions = seq_lens[chosen].long() - 1
        tokens = chosen if together else torch.tensor(at)
        busy = torch.tensor([i for i, count in enumerate(query_lens) if count], dtype=torch.int64)
        starts = torch.tensor([lengths[i] - count for i, count in enumerate(query_lens) if count], dtype=torch.int64)
        slot_zero = rows[busy, :, layout.state_blocks].long()
        return cls(len(singles), tokens, rows[chosen], positions, budgets, tuple(prefills), starts, slot_zero)


class FixedBudgetAttention:
    """One layer's attention: writes the cache and attends, as DESIGN "The rule" and "One step" say.

    Args:
        layout: bytes of the layer's pages. rule: what is kept. scale: factor on q . k.
        impl: implementation of the kernels, see :mod:`kvpop_vllm.kernels.dispatch`.
    """

    def __init__(self, layout: PageLayout, rule: RetentionRule, scale: float, impl: str = "auto"):
        self.layout, self.rule, self.scale, self.impl = layout, rule, scale, impl

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: Pages,
        batch: StepBatch,
        out: torch.Tensor,
        given: torch.Tensor | None = None,
    ) -> None:
        """Runs one step for all requests of the batch.

        Args:
            q ``[T, Hq, D]``, k, v ``[T, H, D]``: the flat batch of tokens. out: ``[T, Hq, D]``, written in place.
            given: ``[T, H]`` float32, scores of the tokens, where the rule takes them.

        Raises:
            StepOrderError: a request's step does not start where its cache ends; nothing has been written. A step that
                starts at position 0 is a fresh start by definition, whatever its cache has seen.
        """
        # else the one kernel that runs checks all there is
        if batch.starts is not None and len(batch.prefills) + (batch.decodes > 0) > 1:
            _check_starts(pages, batch)
        if batch.decodes:
            at = batch.tokens
            out[at], _ = ops.decode_step(
                q[at],
                k[at],
                v[at],
                pages,
                batch.table,
                batch.positions,
                batch.budgets.expand(batch.decodes, -1),
                rule=self.rule,
                scale=self.scale,
                given=None if given is None else given[at],
                impl=self.impl,
            )
        for chunk in batch.prefills:
            cut = slice(chunk.first, chunk.last)
            out[cut], _ = ops.prefill_chunk(
                q[cut],
                k[cut],
                v[cut],
                pages,
                chunk.row,
                chunk.start,
                batch.budgets,
                rule=self.rule,
                scale=self.scale,
                given=None if given is None else given[cut],
                impl=self.impl,
            )


def _check_starts(pages: Pages, batch: StepBatch) -> None:
    """What each kernel checks of its own requests, for all of them before the first kernel writes.

    Raises:
        StepOrderError: a request does not go on where its cache ends.
    """
    heads = torch.arange(pages.layout.num_kv_heads, device=batch.slot_zero.device)
    seen = pages.position[batch.slot_zero, heads, 0]  # [n, H]
    wrong = (seen != batch.starts.unsqueeze(1)) & (batch.starts.unsqueeze(1) > 0)
    if wrong.any():
        r, h = wrong.nonzero()[0].tolist()
        raise StepOrderError(
            f"request {r}: step starts at position {int(batch.starts[r])}, but its cache has seen {int(seen[r, h])} tokens"
        )
