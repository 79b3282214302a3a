"""Requests behind protected prefixes, served under one rule by any implementation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from kernels.exact import Exact
from kernels.factories import given_scores
from kernels.problems import Problem

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import Prefix, cdiv


@dataclass
class Behind(Problem):
    """Requests behind ``protected[r]`` tokens, whose blocks lie in the same pool.

    A scorer's state begins ``replay`` tokens before the tail.
    """

    protected: tuple[int, ...] = (0, 20)
    replay: int = 1024
    prefix_blocks: torch.Tensor = field(default=None)

    def prepare(self):
        self.requests = len(self.protected)
        super().prepare()
        self.rule, most = replace(self.rule, replay=self.replay), cdiv(max(self.protected), self.slots)
        count = self.requests * most
        self.prefix_blocks = self.num_blocks + torch.randperm(count, generator=self.generator).int()
        self.prefix_table, self.tokens = self.prefix_blocks.view(self.requests, most), torch.tensor(self.protected)
        self.num_blocks += count
        return self

    def exact(self, r, h):
        own = self.rule.behind(self.protected[r])
        rule = replace(own, first=0, sinks=self.protected[r] + own.sinks)
        budget = int(self.budgets[r, h]) - self.rule.sinks + rule.sinks
        return Exact(rule, h, budget, begins=max(0, self.protected[r] - self.replay))

    def prefix(self, pages, active) -> Prefix:
        return Prefix(pages, self.prefix_table[active], self.tokens[active])

    def write(self, pages, active, positions, k, v):
        """Write the protected tokens among these into their slots."""
        for i, (r, t) in enumerate(zip(active, positions, strict=True)):
            if 0 <= t < self.protected[r]:
                self.prefix(pages, [r]).write(
                    k[i : i + 1],
                    v[i : i + 1],
                    self.prefix_table[r, [t // self.slots]].long(),
                    torch.tensor([t % self.slots]),
                )

    def begin(self, pages, active, impl):
        own = dict(rule=self.rule, impl=impl)
        ops.begin_tail(pages, self.table[active], self.prefix(pages, active), **own)

    def run(self, pages, active, positions, q, k, v, impl):
        self.write(pages, active, positions, k, v)
        begun = [r for r, t in zip(active, positions, strict=True) if t == self.protected[r]]
        self.begin(pages, begun, impl)
        at = self.table[active], torch.tensor(positions), self.budgets[active]
        own = dict(rule=self.rule, scale=self.scale, gate_scores=given_scores(self.rule, k), impl=impl)
        return ops.decode_step(q, k, v, pages, *at, prefix=self.prefix(pages, active), **own)

    def long_range(self, pages, r, h, position):
        own, since = self.rule.behind(self.protected[r]), position - self.protected[r]
        end = min(since + 1, int(self.budgets[r, h]) - self.rule.sinks + own.sinks)
        row = self.table[r, h, self.layout.state_blocks :].long()
        if self.rule.threshold is not None and since >= 0:
            end = own.first_long + int(pages.position[row[0], h, 1])
        slots = torch.arange(own.first_long, max(own.first_long, end))
        at = row[slots // self.slots], h, slots % self.slots
        return dict(zip(pages.position[at].tolist(), pages.score[at].tolist(), strict=True))
