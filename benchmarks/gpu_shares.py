"""Heads that divide a budget, on a GPU: requests decoded together from their first tokens on, by `decode_step` alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu import Bench, within
from gpu_clock import graph_of
from kernels.problems import CLOSE_MASS
from kernels.shared_heads import CASES, SIZE, Problem, retained

from kvpop_vllm.kernels import ops

BEHIND = 5
"""Steps that a request begins after the one before it."""


class Together:
    """All requests of a problem and a row of padding, in tensors that stay where they are; pages of 255 bytes."""

    def __init__(self, p: Problem, device: str):
        self.p, self.rule = p, p.rule.to(device)
        self.regions, self.raw, self.table = p.regions(device)
        rows = torch.cat([self.table, torch.full_like(self.table[:1], 2**30)])  # padding may have anything there
        self.rows, self.pages, r = rows.to(device), self.regions.view(self.raw), p.requests + 1
        self.tokens = [torch.zeros(r, *x.shape[2:], dtype=x.dtype, device=device) for x in (p.q, p.k, p.v)]
        self.positions = torch.full((r,), -1, dtype=torch.int64, device=device)
        self.valid = torch.zeros(r, p.heads, dtype=torch.int32, device=device)
        self.budgets = torch.full((r, p.heads), p.budget, dtype=torch.int32, device=device)
        self.prompts = torch.full((r,), p.prompt, dtype=torch.int64, device=device)

    def at(self, step: int) -> dict[int, int]:
        """Request -> position of its token, of those that have one in a step."""
        places = {r: step - BEHIND * r for r in range(self.p.requests)}
        return {r: t for r, t in places.items() if 0 <= t < self.p.length}

    def fill(self, step: int) -> None:
        """The tokens of a step."""
        p, now = self.p, self.at(step)
        self.positions.copy_(torch.tensor([now.get(r, -1) for r in range(p.requests + 1)]))
        roles = p.rule.for_prompt(p.prompt)
        self.valid.copy_(torch.tensor([[roles.extent(now.get(r, 0), p.budget)] for r in range(p.requests + 1)]))
        for r, t in now.items():
            for own, whole in zip(self.tokens, (p.q, p.k, p.v), strict=True):
                own[r].copy_(whole[r, t])

    def run(self) -> None:
        """A step."""
        self.out, _ = ops.decode_step(
            *self.tokens, self.pages, self.rows, self.positions, self.valid, self.budgets, rule=self.rule,
            scale=SIZE**-0.5, prompts=self.prompts, impl="triton",
        )  # fmt: skip

    def all_steps(self, run) -> Iterator[tuple[int, torch.Tensor]]:
        """Each step by ``run``, and its outputs ``[R + 1, Hq, D]``."""
        for step in range(self.p.length + BEHIND * (self.p.requests - 1)):
            self.fill(step)
            run()
            yield step, self.out.cpu()


def shares_right(bench: Bench) -> Iterator[dict]:
    """Retained tokens after every step are the naive oracle's until one of its decisions is too close; outputs are as good as the
    reference's in the same precision, and to the bit those of the same steps out of a CUDA graph."""
    case = CASES["votes-corrected"] | {"requests": 3}
    if bench.small or bench.watched:
        case = CASES["mass-corrected"] | {"window": 2, "topk": 2, "every": 1, "heads": 2, "prompt": 7, "length": 9}
    p = Problem(**case | {"dtype": bench.dtype})
    known = [p.oracle(r) for r in range(p.requests)]
    clear = [int((margins.amin(0) > CLOSE_MASS).int().cumprod(0).sum()) for _, _, margins in known]
    assert min(clear) > p.budget + 1, f"the data have a close decision at position {min(clear)}: take another seed"
    together, steps, found = Together(p, bench.device), [], [[] for _ in known]
    for step, out in together.all_steps(together.run):
        steps.append(out)
        on_host = together.regions.view(together.raw.cpu())
        for r, t in together.at(step).items():
            if t >= clear[r]:
                continue
            expected = [known[r][1][h, t].nonzero().flatten().tolist() for h in range(p.heads)]
            held = retained(p, on_host, together.table[r], t + 1)
            assert held == expected, f"request {r}, after {t + 1} tokens: {held} are held, not {expected}"
            found[r].append(out[r])
        assert not out[p.requests].any(), "padding has an output"
    yield bench.row("steps with equal sets", sum(map(len, found)), "count")
    if bench.device == "cuda" and not bench.watched:  # a capture needs the caching allocator
        again = Together(p, bench.device)
        graph = graph_of(again.run)
        for step, out in again.all_steps(graph.replay):
            assert torch.equal(out, steps[step]), f"step {step} out of a CUDA graph differs"
    eager = [p.serve([p.length], "reference", r)[0][:n] for r, n in enumerate(clear)]
    wide = [out[:n] for (out, _, _), n in zip(known, clear, strict=True)]
    actual = torch.stack([x for own in found for x in own])
    yield from within(bench, actual, torch.cat(wide), torch.cat(eager), "out", factor=3.0)
