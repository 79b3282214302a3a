"""Decode steps of the serving kernel alone: attention, scorer and cache of all layers."""

from __future__ import annotations

import time

import torch

from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages


class Steps:
    """Requests that are decoded together, each with ``context`` tokens of the same random keys and values.

    Every layer and request has pages of its own, with blocks in random order, so that a step reads as much
    memory as in serving.

    Args:
        resolved: the policy with its budget.
        queries: query heads of a layer.
        requests: R.
        context: tokens before the first step.
        most: maximum number of steps.
        dtype: dtype of the cache.
    """

    def __init__(
        self, resolved: ResolvedPolicy, queries: int, requests: int, context: int, most: int, dtype: torch.dtype
    ):
        shape = resolved.model
        self.draw = torch.Generator().manual_seed(0)
        self.queries, self.requests, self.position, self.dtype = queries, requests, context, dtype
        self.size, self.heads = shape.head_dim, shape.num_kv_heads
        prompt = [self._random(context, heads) for heads in (queries, self.heads, self.heads)]
        filled: dict[tuple, torch.Tensor] = {}
        self.layers = []
        for layer in range(shape.num_layers):
            rule, budgets = resolved.rules[layer], resolved.budgets(layer)
            layout = PageLayout(self.heads, self.size, dtype, state_floats=rule.state_floats(self.size))
            key = tuple(budgets.tolist())
            if key not in filled:
                filled[key] = self._prefill(rule, layout, budgets, prompt, context + most)
            self.layers.append(self._layer(rule, layout, budgets, filled[key]))

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.size, generator=self.draw).to(self.dtype)

    def _prefill(self, rule: RetentionRule, layout: PageLayout, budgets, prompt, length: int) -> torch.Tensor:
        """Return the bytes of one request's pages after the prompt."""
        blocks = layout.blocks(length, int(budgets.max()))
        raw = torch.zeros(blocks, self.heads, layout.region_bytes, dtype=torch.uint8)
        pages, table = self._pages(layout, raw, torch.arange(blocks, dtype=torch.int32)[None])
        options = {"rule": rule, "scale": self.size**-0.5, "gate_scores": self._gate_scores(rule, len(prompt[0]))}
        ops.prefill_chunk(*prompt, pages, table[0], 0, budgets, seed=0, **options)
        return raw

    def _pages(self, layout: PageLayout, pool: torch.Tensor, rows: torch.Tensor):
        """Return views of a pool, and the tables ``[R, H, P]`` of requests with blocks ``rows [R, P]``."""
        return layout.view(pool), rows[:, None].expand(-1, self.heads, -1)

    def _gate_scores(self, rule: RetentionRule, tokens: int) -> torch.Tensor | None:
        """Return random gate scores that evict nothing while there is room.

        The gate's own time is not counted.
        """
        if not rule.scorer.takes_gate_scores:
            return None
        drawn = torch.rand(tokens, self.heads, generator=self.draw)
        return drawn if rule.threshold is not None else -0.01 * drawn

    def _layer(self, rule: RetentionRule, layout: PageLayout, budgets, raw: torch.Tensor) -> tuple:
        blocks = len(raw)
        order = torch.randperm(self.requests * blocks, generator=self.draw)
        pool = torch.empty(self.requests * blocks, *raw.shape[1:], dtype=torch.uint8)
        pool[order] = raw.repeat(self.requests, 1, 1)
        pages, table = self._pages(layout, pool, order.int().view(self.requests, blocks))
        return rule, pages, table, budgets.expand(self.requests, -1).contiguous()

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of a step over ``steps`` steps."""
        tokens = [self._random(self.requests, heads) for heads in (self.queries, self.heads, self.heads)]
        spent = 0.0
        for _ in range(steps):
            positions = torch.full((self.requests,), self.position)
            begin = time.perf_counter()
            for rule, pages, table, budgets in self.layers:
                self._step(tokens, rule, pages, table, budgets, positions)
            spent += time.perf_counter() - begin
            self.position += 1
        return spent / steps

    def _step(self, tokens, rule, pages: Pages, table, budgets, positions) -> None:
        options = {"rule": rule, "scale": self.size**-0.5, "gate_scores": self._gate_scores(rule, self.requests)}
        ops.decode_step(*tokens, pages, table, positions, budgets, seeds=torch.arange(self.requests), **options)
