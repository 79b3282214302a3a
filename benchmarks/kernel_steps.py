"""Decode steps of the serving kernel alone: attention, scorer and cache of all layers, without the rest of a model."""

from __future__ import annotations

import time

import torch

from kvpop_vllm.evaluation.contenders import Deployed
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages
from kvpop_vllm.roles import Retention


class Steps:
    """Requests that are decoded together, all with the same ``context`` tokens of random keys and values behind them.

    Every layer and request has pages of its own, blocks in random order, so that a step reads as much memory as in serving.

    Args:
        deployed: the policy. queries: query heads of a layer. requests: R. context: tokens before the first step.
        most: steps there is room for.
    """

    def __init__(self, deployed: Deployed, queries: int, requests: int, context: int, most: int, dtype: torch.dtype):
        shape = deployed.model
        self.draw = torch.Generator().manual_seed(0)
        self.queries, self.requests, self.position, self.dtype = queries, requests, context, dtype
        self.size, self.heads = shape.head_dim, shape.num_kv_heads
        prompt = [self._random(context, heads) for heads in (queries, self.heads, self.heads)]
        filled: dict[tuple, torch.Tensor] = {}
        self.layers = []
        for layer in range(shape.num_layers):
            rule, budgets = deployed.rule(layer), deployed.budgets(layer)
            layout = PageLayout(self.heads, self.size, dtype, state_floats=rule.state_floats(self.size))
            key = tuple(budgets.tolist())
            if key not in filled:
                filled[key] = self._prefill(rule, layout, budgets, prompt, context + most)
            self.layers.append(self._layer(rule, layout, budgets, filled[key]))

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.size, generator=self.draw).to(self.dtype)

    def _prefill(self, rule: RetentionRule, layout: PageLayout, budgets, prompt, length: int) -> torch.Tensor:
        """Bytes of one request's pages after the prompt."""
        blocks = layout.blocks(length, int(budgets.max()), rule.decide_every)
        raw = torch.zeros(blocks, self.heads, layout.region_bytes, dtype=torch.uint8)
        table = torch.arange(blocks, dtype=torch.int32).expand(self.heads, -1)
        ops.prefill_chunk(*prompt, layout.view(raw), table, 0, budgets, rule=rule, scale=self.size**-0.5)
        return raw

    def _layer(self, rule: RetentionRule, layout: PageLayout, budgets, raw: torch.Tensor) -> tuple:
        blocks = len(raw)
        order = torch.randperm(self.requests * blocks, generator=self.draw)
        pool = torch.empty(self.requests * blocks, *raw.shape[1:], dtype=torch.uint8)
        pool[order] = raw.repeat(self.requests, 1, 1)
        table = order.int().view(self.requests, 1, blocks).expand(-1, self.heads, -1)
        retentions = [Retention(b, rule.sinks, rule.window, rule.decide_every) for b in budgets.tolist()]
        return rule, layout.view(pool), table, budgets.expand(self.requests, -1).contiguous(), retentions

    def seconds(self, steps: int) -> float:
        """Of a step, mean over so many: what is done only every few steps counts."""
        tokens = [self._random(self.requests, heads) for heads in (self.queries, self.heads, self.heads)]
        spent = 0.0
        for _ in range(steps):
            positions = torch.full((self.requests,), self.position)
            valid = [self._valid(retentions) for *_, retentions in self.layers]
            begin = time.perf_counter()
            for (rule, pages, table, budgets, _), in_use in zip(self.layers, valid, strict=True):
                self._step(tokens, rule, pages, table, budgets, positions, in_use)
            spent += time.perf_counter() - begin
            self.position += 1
        return spent / steps

    def _valid(self, retentions: list[Retention]) -> torch.Tensor:
        in_use = [retention.extent(self.position, retention.budget) for retention in retentions]
        return torch.tensor(in_use, dtype=torch.int32).expand(self.requests, -1)

    def _step(self, tokens, rule, pages: Pages, table, budgets, positions, valid) -> None:
        ops.decode_step(*tokens, pages, table, positions, valid, budgets, rule=rule, scale=self.size**-0.5)
