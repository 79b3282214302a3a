"""Requests served under one rule, by any implementation of the decode step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kernels.exact import Exact
from kernels.factories import given_scores, poisoned_pages, random_page_table, random_rule, random_scorer

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv

CLOSE, CLOSE_MASS = 1e-4, 1e-6
"""Margins below which a decision may fall either way, for scores and for attention masses.

Tests leave such decisions out and count them.
"""

CASES = {
    "none": (None, {}),
    "key-norm": ("key-norm", {}),
    "mass-newest": ("mass", {"mean": False}),
    "mass-mean": ("mass", {"mean": True}),
    "moment": ("moment", {}),
    "gate_scores": ("gate_scores", {}),
    "gate_scores-ages": ("gate_scores", {"ages": True}),
    "gate_scores-threshold": ("gate_scores", {"threshold": -0.5}),
    "linear": ("linear", {}),
    "mlp": ("mlp", {}),
    "mlstm": ("mlstm", {}),
    "mlstm-norm-skip": ("mlstm", {"norm": True, "skip": True}),
    "mlstm-softmax-cap": ("mlstm", {"feature_map": "softmax", "gate_softcap": 3.0}),
    "mlstm-direct-values": ("mlstm", {"value_projection": False, "skip": True}),
    "mlstm-immediate": ("mlstm", {"delayed": False, "norm": True}),
    "mlstm-odd-widths": ("mlstm", {"norm": True}),
}
CASES |= {f"{name}-corrected": (kind, options | {"correction": True}) for name, (kind, options) in CASES.items()}
CORRECTED = {"none", "moment", "mass-mean", "mlstm"}
SOME_CASES = {
    name: case
    for name, case in CASES.items()
    if not name.startswith("mlstm-odd-widths")
    and (not name.endswith("-corrected") or name.removesuffix("-corrected") in CORRECTED)
}
"""Cases for tests of whole requests: each scorer, and the correction with a scorer of each kind."""


@dataclass
class Problem:
    """Requests that start one after another, served under one rule.

    With ``unequal``, heads have their own budgets and blocks, and requests their own windows.
    """

    case: str = "mlstm"
    requests: int = 2
    heads: int = 2
    group: int = 2
    size: int = 32
    slots: int = 16
    sinks: int = 2
    window: int = 5
    topk: int = 9
    beyond: int = 6
    step: int = 1
    dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    unequal: bool = False
    seed: int = 0

    def prepare(self):
        kind, options = CASES[self.case]
        options = dict(options)
        correction = options.pop("correction", False)
        self.generator = torch.Generator().manual_seed(self.seed)
        scorer = random_scorer(kind, self.heads, self.size, self.generator, **options)
        if self.case.startswith("mlstm-odd-widths"):
            narrow = {"q_proj": 13, "k_proj": 13, "v_proj": 23, "out_weight": 23, "norm_weight": 23}
            scorer = replace(scorer, **{n: getattr(scorer, n)[..., :width].contiguous() for n, width in narrow.items()})
        if self.case.startswith("gate_scores-threshold"):
            self.window = max(2, self.window)
        roles = self.sinks, self.window, self.generator, self.step
        self.rule = random_rule(scorer, self.heads, *roles, correction)
        self.layout = PageLayout(self.heads, self.size, self.dtype, self.slots, self.rule.state_floats(self.size))
        shape = self.requests, self.heads
        shares = torch.randint(0, self.topk + 1, shape, generator=self.generator, dtype=torch.int32)
        self.windows = torch.full((self.requests,), self.window, dtype=torch.int32)
        if self.unequal:
            self.windows += torch.randint(0, 5, (self.requests,), generator=self.generator, dtype=torch.int32)
        else:
            shares = torch.full(shape, self.topk, dtype=torch.int32)
        self.budgets = self.sinks + self.windows.unsqueeze(1) + shares
        most = self.sinks + int(self.windows.max()) + self.topk
        pages, self.table = random_page_table(self.layout, self.requests, most, self.generator)
        if self.unequal:
            width = self.layout.state_blocks + cdiv(most, self.slots)
            blocks = self.requests * self.heads * width
            self.table = torch.randperm(blocks + 3, generator=self.generator)[:blocks].int().view(*shape, width)
            pages = poisoned_pages(self.layout, blocks + 3)
        self.num_blocks, self.scale = pages.num_blocks, self.size**-0.5
        return self

    def inputs(self, active):
        def normal(heads, dtype):
            return torch.randn(len(active), heads, self.size, generator=self.generator).to(dtype)

        return (
            normal(self.heads * self.group, self.q_dtype),
            normal(self.heads, self.dtype),
            normal(self.heads, self.dtype),
        )

    def exact(self, r, h):
        return Exact(replace(self.rule, window=int(self.windows[r])), h, int(self.budgets[r, h]))

    def run(self, pages, active, positions, q, k, v, impl):
        at = self.table[active], torch.tensor(positions), self.budgets[active]
        own = dict(rule=self.rule, scale=self.scale, gate_scores=given_scores(self.rule, k), impl=impl)
        return ops.decode_step(q, k, v, pages, *at, windows=self.windows[active], **own)

    def long_range(self, pages, r, h, position):
        """Return ``{position: score}`` of the long-range slots after the step at ``position``."""
        first = self.rule.sinks + int(self.windows[r])
        end = min(position + 1, int(self.budgets[r, h]))
        if self.rule.threshold is not None:
            end = first + int(pages.position[self.table[r, h, self.layout.state_blocks], h, 1])
        slots = torch.arange(first, max(first, end))
        at = self.table[r, h, self.layout.state_blocks + slots // self.slots].long(), h, slots % self.slots
        return dict(zip(pages.position[at].tolist(), pages.score[at].tolist(), strict=True))
