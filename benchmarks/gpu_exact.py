"""Serving kernels on a GPU beside the float64 loop and the reference of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu import Bench, within
from kernels.factories import given_scores, poisoned_pages
from kernels.problems import CLOSE, CLOSE_MASS, Problem

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import Pages


class Comparison:
    """Problem on the bench's device, with pages of the kernel and of the reference.

    Args:
        bench: see :class:`gpu.Bench`.
        options: fields of the problem that differ from those of all comparisons.
    """

    def __init__(self, bench: Bench, options: dict):
        common = dict(heads=2, size=64, group=2, window=3, topk=13, slots=16, dtype=bench.dtype, q_dtype=bench.dtype)
        self.bench, self.p = bench, Problem(**common | options).prepare()
        p = self.p
        self.exact = [[p.exact(r, h) for h in range(p.heads)] for r in range(p.requests)]
        self.reference, on_host = (poisoned_pages(p.layout, p.num_blocks) for _ in range(2))
        self.pages, self.rule = p.layout.view(on_host.raw.to(bench.device)), p.rule.to(bench.device)
        self.results = {"kernel": [], "exact": [], "reference": []}

    def exact_step(self, position: int, q, k, v) -> bool:
        """Take a step of all requests in float64; return whether a decision is too close to be compared."""
        p, gate_scores, outs, margins = self.p, given_scores(self.p.rule, k), [], []
        for r, heads in enumerate(self.exact):
            for h, head in enumerate(heads):
                given = None if gate_scores is None else gate_scores[r, h]
                rows = slice(h * p.group, (h + 1) * p.group)
                *out, _, margin = head.step(position, q[r, rows], k[r, h], v[r, h], p.scale, given)
                outs.append(out)
                margins.append(margin)
        out, lse = (torch.cat(parts) for parts in zip(*outs, strict=True))
        self.results["exact"].append((out.view(q.shape), lse.view(q.shape[:2])))
        return min(margins) <= (CLOSE_MASS if self.rule.coupled else CLOSE)

    def run(self, op, at, q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the kernel of an op on its own pages.

        Args:
            op: ``ops.decode_step`` or ``ops.prefill_chunk``.
            at: positions ``[R]``, or the first position of a chunk of the only request.
            q, k, v: tokens.
            options: further arguments of the op.
        """
        return self.run_on(self.pages, op, at, q, k, v, rule=self.rule, impl="triton", **options)

    def run_on(self, pages: Pages, op, at, q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """Run an op on the device of its pages; see :meth:`run`."""
        p, device = self.p, pages.raw.device
        if op is ops.decode_step:
            table, at, budgets, window = p.table, at.to(device), p.budgets, {"windows": p.windows.to(device)}
        else:
            table, budgets, window = p.table[0], p.budgets[0], {"window": int(p.windows[0])}
        if (gate_scores := given_scores(p.rule, k)) is not None:
            gate_scores = gate_scores.to(device)
        q, k, v, table, budgets = (x.to(device) for x in (q, k, v, table, budgets))
        return op(q, k, v, pages, table, at, budgets, scale=p.scale, gate_scores=gate_scores, **window, **options)

    def check_sets(self, position: int) -> None:
        """Check that the kernel holds the long-range tokens of the float64 loop after ``position``."""
        on_host = self.p.layout.view(self.pages.raw.cpu())
        for r, heads in enumerate(self.exact):
            for h, head in enumerate(heads):
                held = self.p.long_range(on_host, r, h, position).keys()
                expected = head.long_range(position).keys()
                assert held == expected, f"position {position}, request {r}, head {h}: {sorted(held ^ expected)} differ"

    def outputs(self) -> Iterator[dict]:
        """Check that outputs are as good as the reference's in the same precision; yield their errors."""
        for i, name in enumerate(("out", "lse")):
            parts = (torch.cat([each[i].cpu() for each in results]) for results in self.results.values())
            yield from within(self.bench, *parts, name, factor=3.0)
