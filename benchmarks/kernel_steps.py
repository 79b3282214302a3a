"""Decode steps of the serving kernel alone: attention, scorer and cache of all layers."""

import time

import torch
from full_pages import empty_pages

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.pages import PageLayout, Pages
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule


class Steps:
    """Requests that are decoded together, each with ``context`` tokens of the same random keys and values.

    Every layer and request has pages of its own, with blocks in random order, so that a step reads as much
    memory as in serving.

    Args:
        resolved: the policy with its budget.
        queries: query heads of a layer.
        requests: R.
        context: tokens before the first step.
        steps: maximum number of steps.
        dtype: dtype of the cache.
    """

    def __init__(
        self, resolved: ResolvedPolicy, queries: int, requests: int, context: int, steps: int, dtype: torch.dtype
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
            pages, table = empty_pages(layout, requests, min(context + steps, int(budgets.max())))
            rows, key = table[:, 0].long(), tuple(budgets.tolist())
            if key not in filled:
                options = dict(rule=rule, scale=self.size**-0.5, gate_scores=self._gate_scores(rule, context))
                chunk = Chunks.of_request(0, context, budgets, rule.window)
                ops.prefill_chunk(*prompt, pages, table[:1], chunk, seeds=torch.zeros(1, dtype=torch.int64), **options)
                filled[key] = pages.raw[rows[0]]
            pages.raw[rows] = filled[key]
            self.layers.append((rule, pages, table, budgets.expand(requests, -1).contiguous()))

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.size, generator=self.draw).to(self.dtype)

    def _gate_scores(self, rule: RetentionRule, tokens: int) -> torch.Tensor | None:
        """Return random gate scores that evict nothing while there is room.

        The gate's own time is not counted.
        """
        if not rule.scorer.takes_gate_scores:
            return None
        drawn = torch.rand(tokens, self.heads, generator=self.draw)
        return drawn if rule.threshold is not None else -0.01 * drawn

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
