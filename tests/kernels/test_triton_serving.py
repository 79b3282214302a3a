"""Triton's decode step: run by its interpreter on the CPU, and compiled for GPUs that need not be there.

As in test_triton_training, classes are collected in a process with TRITON_INTERPRET=1 only. The interpreter runs programs one
after another and cannot multiply bfloat16 matrices: races are not found here, and bfloat16 is only compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernels.factories import given_scores, poisoned_pages
from kernels.problems import CLOSE, CLOSE_MASS, Problem

from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.testing import assert_within_budget

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]
F16 = torch.float16

SERVED = {
    "recency, unequal heads, no sinks, window 1": dict(case="none", group=1, sinks=0, window=1, heads=2, unequal=True),
    "key norm": dict(case="key-norm", group=4, size=64, dtype=F16),
    "three query heads": dict(case="given", group=3, step=3),
    "own decays": dict(case="given-ages", every=3),
    "threshold": dict(case="given-threshold", every=2),
    "threshold, corrected": dict(case="given-threshold-corrected", dtype=F16),
    "linear": dict(case="linear", sinks=0, dtype=F16),
    "mlp": dict(case="mlp", every=2),
    "mlstm": dict(case="mlstm-norm-skip", group=3),
    "mlstm, float16": dict(case="mlstm-softmax-cap", dtype=F16),
    "mlstm on a grid": dict(case="mlstm-direct-values", every=4),
    "mlstm read at once on a grid": dict(case="mlstm-immediate", every=3),
    "mlstm of odd widths": dict(case="mlstm-odd-widths"),
    "mlstm in several state blocks": dict(case="mlstm-corrected", size=64, group=1, topk=20),
    "newest mass": dict(case="mass-newest", group=3),
    "mean mass": dict(case="mass-mean", every=3),
    "moments": dict(case="moment-corrected", every=2),
    "moments, float16": dict(case="moment", dtype=F16),
    "votes": dict(case="votes", every=3),
    "unequal heads, k from 0 on, corrected": dict(case="none-corrected", heads=2, unequal=True, topk=4),
}
STARTS = (0, 9, 22)
"""Tokens that each request has been given by the reference before the kernels go on."""


@pytest.fixture
def poisoned():
    """torch.empty gives NaN, and the largest of an integer type."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
class Interpreted:
    __test__ = INTERPRETED


def problem(dtype=torch.float32, **options) -> Problem:
    sizes = dict(requests=1, heads=1, group=2, size=32, slots=16, sinks=2, window=3, topk=13, beyond=9)
    return Problem(**(sizes | options), dtype=dtype, q_dtype=dtype).prepare()


class Replay:
    """Requests that the reference and the float64 loop have followed from the start; the kernels' pages begin as theirs."""

    def __init__(self, p: Problem, starts: tuple):
        self.p, self.positions = p, [0] * p.requests
        self.reference = poisoned_pages(p.layout, p.num_blocks)
        self.exact = [[p.exact(r, h) for h in range(p.heads)] for r in range(p.requests)]
        for r, start in enumerate(starts):
            for _ in range(start):
                self.advance([r])
        self.pages = p.layout.view(self.reference.raw.clone())

    def advance(self, active):
        """Inputs, the reference's and the exact results, and the margins by request and head."""
        p, now = self.p, [self.positions[r] for r in active]
        inputs = p.inputs(active)
        eager = p.run(self.reference, active, now, *inputs, "reference")
        q, k, v = inputs
        given, rows = given_scores(p.rule, k), [slice(h * p.group, (h + 1) * p.group) for h in range(p.heads)]
        steps = [
            self.exact[r][h].step(
                now[i], q[i, rows[h]], k[i, h], v[i, h], p.scale, None if given is None else given[i, h]
            )
            for i, r in enumerate(active)
            for h in range(p.heads)
        ]
        for r in active:
            self.positions[r] += 1
        wide = torch.cat([s[0] for s in steps]).view(q.shape), torch.cat([s[1] for s in steps]).view(q.shape[:2])
        return inputs, eager, wide, [s[3] for s in steps]

    def step(self, active):
        """The next token of each; the kernels hold what the exact loop holds. Returns their outputs, the exact and the eager."""
        p, now = self.p, [self.positions[r] for r in active]
        inputs, eager, wide, margins = self.advance(active)
        found = p.run(self.pages, active, now, *inputs, "triton")
        for i, r in enumerate(active):
            for h in range(p.heads):
                held = p.long_range(self.pages, r, h, now[i])
                margin = margins[i * p.heads + h]
                assert margin > (CLOSE_MASS if p.rule.coupled else CLOSE), "another seed: a decision is too close"
                assert held.keys() == self.exact[r][h].long_range(now[i]).keys(), (r, h, now[i], margin)
        return found, wide, eager

    def check(self, steps):
        """Retained tokens at every step, and outputs, log-sum-exps and scores within budget of the whole."""
        p, active, results = self.p, list(range(self.p.requests)), []
        for _ in range(steps):
            results.append(self.step(active))
        for i, name in enumerate(("out", "lse")):
            actual, wide, eager = (torch.stack([result[j][i] for result in results]) for j in range(3))
            assert actual.dtype == eager.dtype
            assert_within_budget(actual, wide, eager, 3.0, name)
        scores = [[], [], []]
        for r in active:
            for h in range(p.heads):
                last = self.positions[r] - 1
                wide = self.exact[r][h].long_range(last)
                for found, held in zip(
                    scores, (p.long_range(self.pages, r, h, last), wide, p.long_range(self.reference, r, h, last)), strict=True
                ):
                    found += [held[t] for t in wide]
        actual, wide, eager = (torch.tensor(x, dtype=d) for x, d in zip(scores, (None, torch.float64, None), strict=True))
        assert len(actual) > 0
        assert_within_budget(actual, wide, eager, 4.0, "score")
        assert torch.equal(self.seen(self.pages), self.seen(self.reference))
        others = torch.ones(p.num_blocks, dtype=torch.bool)
        others[p.table.flatten().long()] = False
        assert (self.pages.raw[others] == 255).all()

    def seen(self, pages):
        rows = self.p.table[:, :, self.p.layout.state_blocks].long()
        return torch.stack([pages.position[rows[:, h], h, 0] for h in range(self.p.heads)])


@pytest.fixture
def cut(monkeypatch):
    """Slots of a head are cut among programs as soon as there are two blocks of them."""
    from kvpop_vllm.kernels.triton import decode_step as module

    monkeypatch.setattr(module, "SPLIT_SLOTS", 16)


class TestDecodeStep(Interpreted):
    @pytest.mark.parametrize("name", SERVED)
    def test_holds_what_the_definition_holds(self, name, cut):
        """Three requests in one batch: at its start, before its budget is full, and after."""
        p = problem(requests=2, **SERVED[name])
        full = int(p.budgets.max())
        Replay(p, (0, full - 2)).check(p.every + 4)

    def test_many_requests_and_uncut(self):
        """More rows than a tile of products has; all of a head's slots in one program."""
        p = problem(case="mlstm", requests=5, every=4, topk=3, size=16)
        Replay(p, (3, 7, 11, 14, 15)).check(1)

    def test_votes_before_and_after_the_prompt(self, cut):
        p = problem(case="votes", requests=2, every=3)
        p.prompts = torch.tensor([25, 22])
        replay = Replay(p, (22, 22))
        replay.check(6)
