"""Requests served under one rule, some after protected prefixes, by any implementation."""

import functools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from kernels.exact import Exact
from kernels.factories import given_scores, poisoned_pages, random_page_table, random_rule, random_scorer

from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import masked_lse

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
REPLAYS = {
    "mlstm-short": ("mlstm", 5),
    "mlstm-no-replay": ("mlstm", 0),
    "mlstm-immediate-short": ("mlstm-immediate", 3),
}
"""Further cases, whose scorer's state begins so many tokens before the tail, less than by default."""
ROLES = 2, 5, 13
"""Sinks, window and long-range slots of most whole requests."""


class ExactRun(NamedTuple):
    """Results of a whole request in float64.

    Attributes:
        out: ``[L, Hq, D]``.
        lse: ``[L, Hq]``.
        magnitude: ``[L, Hq, D]``, weighted mean of the values' magnitudes.
        retained: ``[H, L, L]``, mask of the tokens that each head holds after each token.
        margin: smallest margin of all decisions.
    """

    out: torch.Tensor
    lse: torch.Tensor
    magnitude: torch.Tensor
    retained: torch.Tensor
    margin: float


@dataclass
class Problem:
    """Requests that start one after another, served under one rule.

    With ``unequal``, heads have their own budgets and blocks, and requests their own windows. With
    ``protected``, request r has a prefix of ``protected[r]`` tokens, whose blocks lie in the same pool, and a
    scorer's state begins ``replay`` tokens before its end. The logits of the first ``biased[r]`` of these tokens get a
    bias, a number for each KV head. With ``has_sinks`` query heads have attention sinks. With ``drafts`` the pages
    stage up to so many.
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
    protected: tuple[int, ...] = ()
    biased: tuple[int, ...] = ()
    replay: int = ops.RetentionRule.replay
    length: int = 100
    has_sinks: bool = False
    drafts: int = 0
    prefix_blocks: torch.Tensor = field(default=None, init=False)

    def prepare(self):
        kind, options = CASES[self.case]
        options = dict(options)
        correction = options.pop("correction", False)
        self.requests = len(self.protected) or self.requests
        self.generator = torch.Generator().manual_seed(self.seed)
        scorer = random_scorer(kind, self.heads, self.size, self.generator, **options)
        if self.case.startswith("mlstm-odd-widths"):
            narrow = {"q_proj": 13, "k_proj": 13, "v_proj": 23, "out_weight": 23, "norm_weight": 23}
            scorer = replace(scorer, **{n: getattr(scorer, n)[..., :width].contiguous() for n, width in narrow.items()})
        if self.case.startswith("gate_scores-threshold"):
            self.window = max(2, self.window)
        roles = self.sinks, self.window, self.generator, self.step
        self.rule = replace(random_rule(scorer, self.heads, *roles, correction), replay=self.replay)
        staged = self.drafts, self.rule.draft_query_bytes(self.group, self.size, self.q_dtype)
        floats = self.rule.state_floats(self.size)
        self.layout = PageLayout(self.heads, self.size, self.dtype, self.slots, floats, *staged)
        shape = self.requests, self.heads
        shares = torch.randint(0, self.topk + 1, shape, generator=self.generator, dtype=torch.int32)
        self.windows = torch.full((self.requests,), self.window, dtype=torch.int32)
        if self.unequal:
            self.windows += torch.randint(0, 5, (self.requests,), generator=self.generator, dtype=torch.int32)
        else:
            shares = torch.full(shape, self.topk, dtype=torch.int32)
        self.budgets = self.sinks + self.windows.unsqueeze(1) + shares
        most_tokens = self.sinks + int(self.windows.max()) + self.topk
        pages, self.table = random_page_table(self.layout, self.requests, most_tokens, self.generator)
        if self.unequal:
            width = self.layout.state_blocks + cdiv(most_tokens, self.slots)
            blocks = self.requests * self.heads * width
            self.table = torch.randperm(blocks + 3, generator=self.generator)[:blocks].int().view(*shape, width)
            pages = poisoned_pages(self.layout, blocks + 3)
        self.num_blocks, self.scale = pages.num_blocks, self.size**-0.5
        if self.protected:
            width = cdiv(max(self.protected), self.slots)
            self.prefix_blocks = self.num_blocks + torch.randperm(self.requests * width, generator=self.generator).int()
            self.prefix_table = self.prefix_blocks.view(self.requests, width)
            self.tokens = torch.tensor(self.protected)
            self.num_blocks += len(self.prefix_blocks)
        if self.biased:
            generator = torch.Generator().manual_seed(self.seed)
            self.biases = [3 * torch.randn(self.heads, n, generator=generator) for n in self.biased]
        generator = torch.Generator().manual_seed(self.seed)
        sinks = 2 + 2 * torch.randn(self.heads * self.group, generator=generator)
        self.sink_logits = sinks if self.has_sinks else None
        return self

    def inputs(self, active):
        def normal(heads, dtype):
            return torch.randn(len(active), heads, self.size, generator=self.generator).to(dtype)

        return (
            normal(self.heads * self.group, self.q_dtype),
            normal(self.heads, self.dtype),
            normal(self.heads, self.dtype),
        )

    @cached_property
    def texts(self):
        """Queries, keys and values of whole requests, each a list of ``[L, heads, D]`` by request."""
        texts = [self.inputs(range(self.length)) for _ in range(self.requests)]
        return [list(x) for x in zip(*texts, strict=True)]

    def protects(self, r) -> int:
        """Return the number of protected tokens of request r."""
        return self.protected[r] if self.protected else 0

    def prefix(self, pages, active) -> Prefix | None:
        if not self.protected:
            return None
        biased = torch.tensor(self.biased)[active] if self.biased else None
        return Prefix(pages, self.prefix_table[active], self.tokens[active], biased)

    def bias(self, r) -> torch.Tensor:
        """Return the biases of request r, ``[H, n]``."""
        return self.biases[r] if self.biased else torch.zeros(self.heads, 0)

    def write(self, pages, active, positions, k, v):
        """Write the protected tokens among these into their slots, with their biases."""
        for i, (r, t) in enumerate(zip(active, positions, strict=True)):
            if 0 <= t < self.protects(r):
                slot = self.prefix_table[r, [t // self.slots]].long(), torch.tensor([t % self.slots])
                pages.write(k[i : i + 1], v[i : i + 1], *slot)
                if t < self.bias(r).shape[1]:
                    pages.score[slot[0], :, slot[1]] = self.bias(r)[:, t]

    def begin(self, pages, active, impl):
        """Build the scorer's states after the prefixes of these requests."""
        ops.begin_tail(pages, self.table[active], self.prefix(pages, active), rule=self.rule, impl=impl)

    def exact(self, r, h):
        """Return the float64 loop of a head; protected tokens are its sinks."""
        protects, rule = self.protects(r), replace(self.rule, window=int(self.windows[r]))
        sinks = protects or rule.sinks
        budget = int(self.budgets[r, h]) - rule.sinks + sinks
        bias = tuple(self.bias(r)[h].tolist())
        begins = max(len(bias), protects - rule.replay)  # no state knows slots of cartridges
        of_sinks = () if self.sink_logits is None else tuple(self.sink_logits.view(self.heads, -1)[h].tolist())
        return Exact(replace(rule, sinks=sinks), h, budget, begins=begins, bias=bias, sinks=of_sinks)

    def exact_step(self, loops, active, positions, q, k, v):
        """Advance ``loops[r][h]`` by one token of each active request.

        Returns:
            Outputs ``[A, Hq, D]``, log-sum-exps ``[A, Hq]``, the values' magnitudes ``[A, Hq, D]``, and the
            margins by request and head.
        """
        gate_scores, steps = given_scores(self.rule, k), {}
        for i, r in enumerate(active):
            for h in range(self.heads):
                rows = slice(h * self.group, (h + 1) * self.group)
                gate_score = None if gate_scores is None else gate_scores[i, h]
                steps[r, h] = loops[r][h].step(positions[i], q[i, rows], k[i, h], v[i, h], self.scale, gate_score)
        outs, lses, sizes, margins = zip(*steps.values(), strict=True)
        wide = torch.cat(outs).view(q.shape), torch.cat(lses).view(q.shape[:2]), torch.cat(sizes).view(q.shape)
        return *wide, dict(zip(steps, margins, strict=True))

    def exact_run(self, r=0) -> ExactRun:
        """Return the results of a whole request."""
        loops, results_of_steps, margin = {r: [self.exact(r, h) for h in range(self.heads)]}, [], torch.inf
        retained = torch.zeros(self.heads, self.length, self.length, dtype=torch.bool)
        for t in range(self.length):
            *results, margins = self.exact_step(loops, [r], [t], *(x[r][t : t + 1] for x in self.texts))
            results_of_steps.append(results)
            margin = min(margin, *margins.values())
            for h, loop in enumerate(loops[r]):
                retained[h, t, list(loop.tokens)] = True
        return ExactRun(*(torch.cat(x) for x in zip(*results_of_steps, strict=True)), retained, margin)

    def lse(self, retained, r=0) -> torch.Tensor:
        """Return log-sum-exps ``[L, Hq]`` of a request in float32 over the tokens ``retained [H, L, L]``."""
        q, k, _ = (x[r].transpose(0, 1).float() for x in self.texts)
        return masked_lse(q, k, retained, self.bias(r) if self.biased else None, self.sink_logits)

    def run(self, pages, active, positions, q, k, v, impl):
        """Run a decode step; protected tokens are written first, and tails begin where they are due."""
        self.write(pages, active, positions, k, v)
        if begun := [r for r, t in zip(active, positions, strict=True) if self.protected and t == self.protected[r]]:
            self.begin(pages, begun, impl)
        step_args = self.table[active], torch.tensor(positions), self.budgets[active]
        options = dict(rule=self.rule, scale=self.scale, gate_scores=given_scores(self.rule, k), impl=impl)
        options["sink_logits"] = self.sink_logits
        return ops.decode_step(
            q, k, v, pages, *step_args, windows=self.windows[active], prefix=self.prefix(pages, active), **options
        )

    def long_range(self, pages, r, h, position):
        """Return ``{position: score}`` of the long-range slots after the step at ``position``."""
        rule, since = (
            replace(self.rule, window=int(self.windows[r])).after_prefix(self.protects(r)),
            position - self.protects(r),
        )
        row = self.table[r, h, self.layout.state_blocks :].long()
        end = min(since + 1, int(self.budgets[r, h]) - self.rule.sinks + rule.sinks)
        if self.rule.threshold is not None and since >= 0:
            end = rule.first_long + int(pages.position[row[0], h, 1])
        slots = torch.arange(rule.first_long, max(rule.first_long, end))
        places = row[slots // self.slots], h, slots % self.slots
        return dict(zip(pages.position[places].tolist(), pages.score[places].tolist(), strict=True))

    def foreign(self) -> torch.Tensor:
        """Return the mask ``[blocks]`` of blocks that belong to no request."""
        foreign = torch.ones(self.num_blocks, dtype=torch.bool)
        foreign[self.table.flatten().long()] = False
        if self.protected:
            foreign[self.prefix_blocks.long()] = False
        return foreign


def problem(case: str, *protected: int, roles: tuple[int, int, int] = ROLES, **options) -> Problem:
    """Return a problem of whole requests with these prefixes, by default of one without.

    The longest request ends 14 tokens after its tail would be full.
    """
    if case in REPLAYS:
        case, options["replay"] = REPLAYS[case]
    protected, (sinks, window, topk) = protected or (0,), roles
    options.setdefault("length", max(protected) + sum(roles) + 14)
    options.setdefault("q_dtype", options.get("dtype", torch.float32))
    return Problem(case, protected=protected, sinks=sinks, window=window, topk=topk, **options).prepare()


@functools.cache
def decided(case: str, *protected: int, close: float | None = None, **options) -> tuple[Problem, list[ExactRun]]:
    """Return a problem all of whose decisions have margins above ``close``, and exact results by request."""
    for seed in range(40):
        p = problem(case, *protected, seed=seed, **options)
        exact = [p.exact_run(r) for r in range(p.requests)]
        if min(run.margin for run in exact) > (close or (CLOSE_MASS if p.rule.coupled else CLOSE)):
            return p, exact
    raise AssertionError("no seed does")
