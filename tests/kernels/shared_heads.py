"""Requests of a layer whose heads divide its budget, what serves them, and what an oracle makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernels.factories import given_scores, random_rule, random_scorer

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import HeadRegions
from kvpop_vllm.testing import corrected_attention, masked_attention
from kvpop_vllm.testing.oracle_shared import follow_shared

GROUP, SIZE, N = 2, 32, 16


@dataclass
class Problem:
    """Requests of one layer; what its oracle ranks by. Keys of later heads are larger, so that heads differ in what they look at."""

    kind: str = "votes"
    heads: int = 3
    sinks: int = 2
    window: int = 5
    topk: int = 20
    every: int = 4
    length: int = 96
    prompt: int = 72
    corrected: bool = False
    step: int = 1
    requests: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        draw = torch.Generator().manual_seed(self.seed)
        options = {"votes": {"pool": 5}, "mass": {"mean": True}}.get(self.kind, {})
        scorer = random_scorer(self.kind, self.heads, SIZE, draw, **options)
        roles = self.sinks, self.window, draw, self.step, self.every
        rule = random_rule(scorer, self.heads, *roles, self.corrected)
        self.budget = rule.first_long + self.topk
        gamma = torch.zeros_like(rule.log_gamma) if rule.coupled else rule.log_gamma
        pages = (cdiv(self.budget, N) + 1) * self.heads
        self.rule = replace(rule, share_pages=pages, log_gamma=gamma)
        self.layout = PageLayout(self.heads, SIZE, self.dtype, N, self.rule.state_floats(SIZE))
        shape = self.requests, self.length
        self.q, self.k, self.v = (
            torch.randn(*shape, n, SIZE, generator=draw) for n in (self.heads * GROUP, self.heads, self.heads)
        )
        self.k *= (0.5 + torch.arange(self.heads)).view(-1, 1)
        self.q, self.k, self.v = (x.to(self.dtype) for x in (self.q, self.k, self.v))
        width = self.layout.state_blocks + cdiv(self.budget, N) + 1
        self.num_blocks = self.requests * width + 2
        self.blocks = (
            torch.randperm(self.num_blocks, generator=draw)[: self.requests * width].int().view(self.requests, -1)
        )

    def regions(self, device="cpu"):
        """Regions, their bytes, and the requests' rows of them, on the CPU."""
        regions = HeadRegions(self.layout, self.budget, self.num_blocks)
        raw = torch.full((self.num_blocks, self.heads, self.layout.region_bytes), 255, dtype=torch.uint8, device=device)
        return regions, raw, regions.rows(0, self.blocks)

    def pages(self):
        regions, raw, rows = self.regions()
        return regions.view(raw), rows

    def serve(self, chunks, impl, r=0, device="cpu"):
        """Outputs ``[S, Hq, D]`` of one request and, after each chunk, what each head holds. impl: also an instruction set of C++."""
        if impl not in ("reference", "triton"):
            from kvpop_vllm import _C

            _C.set_isa(impl)
            impl = "cpp"
        regions, raw, rows = self.regions(device)
        pages, row, outs, held, a = regions.view(raw), rows[r].to(device), [], [], 0
        budgets = torch.full((self.heads,), self.budget, dtype=torch.int32, device=device)
        while a < self.length:
            b = min(self.length, a + chunks[len(held) % len(chunks)])
            own = dict(
                rule=self.rule.to(device),
                scale=SIZE**-0.5,
                prompt=self.prompt,
                given=given_scores(self.rule, self.k[r, a:b].to(device)),
                impl=impl,
            )
            cut = (x[r, a:b].to(device) for x in (self.q, self.k, self.v))
            outs.append(ops.prefill_chunk(*cut, pages, row, a, budgets, **own)[0].cpu())
            held.append((b, retained(self, regions.view(raw.cpu()), rows[r], b)))
            a = b
        return torch.cat(outs), held

    def oracle(self, r=0):
        q, k, v = (x[r].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        how = {"votes": "votes", "mass": "mean mass", "key-norm": -k.norm(dim=-1), None: torch.zeros(k.shape[:2])}
        raw = linear(self.rule, k, v) if self.kind == "linear" else how[self.kind]
        shape = self.sinks, self.window, self.topk, self.every, self.prompt
        found = follow_shared(q, k, v, raw, *shape, self.rule.log_gamma.tolist(), self.step)
        out = (corrected_attention if self.corrected else masked_attention)(q, k, v, found[0])
        return out.view(self.length, -1, SIZE), found[0], found[1]


def linear(rule, k, v):
    weights = rule.scorer
    return torch.einsum("hsx,hx->hs", torch.cat([k, v], -1), weights.weight.double()) + weights.bias.double().unsqueeze(
        1
    )


def retained(p: Problem, pages, row, seen):
    """Sorted positions that each head holds after ``seen`` tokens, by the words of its share."""
    roles, found, used = p.rule.for_prompt(p.prompt), [], []
    for h in range(p.heads):
        words = pages.state[row[h, : p.layout.state_blocks].long(), h].flatten()
        capacity, filled, *table = words[p.rule.state_floats(SIZE) - p.rule.share_floats :][
            : p.rule.share_floats
        ].tolist()
        assert 0 <= filled <= capacity
        near = [t for t in range(seen) if t < roles.sinks or t >= roles.decided(seen)]
        numbers = [int(n) for n in table[: cdiv(roles.first_long + int(capacity), N)]]
        used += numbers
        for slot in range(roles.first_long, roles.first_long + int(filled)):
            n = numbers[slot // N]
            region = int(row[n % p.heads, p.layout.state_blocks + n // p.heads])
            near.append(int(pages.position[region, h, slot % N]))
        found.append(sorted(near))
    assert len(set(used)) == len(used) and max(used) < (cdiv(p.budget, N) + 1) * p.heads
    return found


CASES = {
    "votes": {},
    "votes-corrected": {"corrected": True, "seed": 1},
    "votes-late": {"every": 16, "window": 17, "topk": 40, "seed": 2},
    "more-at-once-than-fit": {"every": 32, "window": 33, "topk": 10, "seed": 13},
    "one-head": {"heads": 1, "seed": 3},
    "mass": {"kind": "mass", "every": 1, "seed": 4},
    "mass-corrected": {"kind": "mass", "every": 6, "corrected": True, "seed": 5},
    "norm": {"kind": "key-norm", "every": 1, "sinks": 0, "window": 1, "seed": 6},
    "norm-corrected": {"kind": "key-norm", "every": 7, "corrected": True, "seed": 7},
    "linear": {"kind": "linear", "every": 5, "step": 3, "seed": 8},
    "recency": {"kind": None, "every": 3, "seed": 9},
    "nothing": {"topk": 0, "seed": 10},
    "all-generated": {"prompt": 5, "seed": 11},
    "all-prompt": {"prompt": 500, "seed": 12},
}
