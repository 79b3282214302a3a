"""Triton's decode step under its interpreter, in the process that test_triton_interpreted starts."""

from __future__ import annotations

import os
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernels.factories import given_scores, poisoned_pages
from kernels.problems import CLOSE, CLOSE_MASS, Problem

from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.testing import DisturbedSums, assert_within_budget

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
F16 = torch.float16

SERVED = {
    "recency, unequal heads, no sinks, window 1": dict(case="none", group=1, sinks=0, window=1, heads=2, unequal=True),
    "key norm": dict(case="key-norm", group=4, size=64, dtype=F16),
    "three query heads": dict(case="gate_scores", group=3, step=3, topk=27),
    "own decays": dict(case="gate_scores-ages"),
    "threshold": dict(case="gate_scores-threshold"),
    "threshold, corrected": dict(case="gate_scores-threshold-corrected", dtype=F16),
    "linear, queries wider than the cache": dict(case="linear", sinks=0, dtype=F16, q_dtype=torch.float32),
    "threshold, no sinks, window 2": dict(case="gate_scores-threshold", sinks=0, window=2),
    "mlp": dict(case="mlp"),
    "mlstm": dict(case="mlstm-norm-skip", group=3, sinks=0, window=1),
    "mlstm, float16": dict(case="mlstm-softmax-cap", dtype=F16),
    "mlstm without value weights": dict(case="mlstm-direct-values", sinks=1, window=2),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "mlstm of odd widths": dict(case="mlstm-odd-widths"),
    "mlstm in several state blocks": dict(case="mlstm-corrected", size=64, group=1, topk=20),
    "newest mass": dict(case="mass-newest", group=3),
    "mean mass": dict(case="mass-mean"),
    "moments": dict(case="moment-corrected"),
    "moments, float16": dict(case="moment", dtype=F16),
    "unequal heads, k from 0 on, corrected": dict(
        case="none-corrected", heads=2, unequal=True, topk=3, sinks=0, window=1
    ),
}


@pytest.fixture
def poisoned():
    """Fill tensors of torch.empty with NaN, or with the largest value of an integer type."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
class Interpreted:
    __test__ = INTERPRETED


def problem(dtype=torch.float32, **options) -> Problem:
    sizes = dict(requests=1, heads=1, group=2, size=32, slots=16, sinks=2, window=3, topk=13, beyond=9)
    return Problem(**(sizes | dict(dtype=dtype, q_dtype=dtype) | options)).prepare()


class Replay:
    """Requests that the reference and the float64 loop follow; the kernels' pages begin as theirs."""

    def __init__(self, p: Problem, starts: tuple):
        self.p, self.positions, self.roundings = p, [0] * p.requests, nullcontext()
        self.reference = poisoned_pages(p.layout, p.num_blocks)
        self.exact = [[p.exact(r, h) for h in range(p.heads)] for r in range(p.requests)]
        for r, start in enumerate(starts):
            for _ in range(start):
                self.advance([r])
        self.pages, self.roundings = p.layout.view(self.reference.raw.clone()), DisturbedSums(0)

    def advance(self, active):
        """Return inputs, the reference's and the exact results, and the margins by request and head."""
        p, now = self.p, [self.positions[r] for r in active]
        inputs = p.inputs(active)
        with self.roundings:
            eager = p.run(self.reference, active, now, *inputs, "reference")
        q, k, v = inputs
        gate_scores, rows = given_scores(p.rule, k), [slice(h * p.group, (h + 1) * p.group) for h in range(p.heads)]
        steps = [
            self.exact[r][h].step(
                now[i], q[i, rows[h]], k[i, h], v[i, h], p.scale, None if gate_scores is None else gate_scores[i, h]
            )
            for i, r in enumerate(active)
            for h in range(p.heads)
        ]
        for r in active:
            self.positions[r] += 1
        wide = torch.cat([s[0] for s in steps]).view(q.shape), torch.cat([s[1] for s in steps]).view(q.shape[:2])
        return inputs, eager, wide, [s[3] for s in steps]

    def step(self, active):
        """Advance each request by one token and check that retained tokens are exact.

        Returns:
            Outputs and log-sum-exps of the kernels, of the exact loop and of the reference.
        """
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
        """Check retained tokens at every step, and outputs, log-sum-exps and scores against their budgets."""
        p, active, results = self.p, list(range(self.p.requests)), []
        for _ in range(steps):
            results.append(self.step(active))
        for i, name in enumerate(("out", "lse")):
            actual, wide, eager = (torch.stack([result[j][i] for result in results]) for j in range(3))
            assert actual.dtype == eager.dtype
            assert_within_budget(actual, wide, eager, name=name)
        scores = [[], [], []]
        for r in active:
            for h in range(p.heads):
                last = self.positions[r] - 1
                wide = self.exact[r][h].long_range(last)
                for found, held in zip(
                    scores,
                    (p.long_range(self.pages, r, h, last), wide, p.long_range(self.reference, r, h, last)),
                    strict=True,
                ):
                    found += [held[t] for t in wide]
        actual, wide, eager = (
            torch.tensor(x, dtype=d) for x, d in zip(scores, (None, torch.float64, None), strict=True)
        )
        assert len(actual) > 0
        assert_within_budget(actual, wide, eager, name="score")
        assert torch.equal(self.seen(self.pages), self.seen(self.reference))
        assert (self.pages.raw[self.foreign()] == 255).all()

    def foreign(self):
        """Return the mask ``[blocks]`` of blocks that belong to no request."""
        others = torch.ones(self.p.num_blocks, dtype=torch.bool)
        others[self.p.table.flatten().long()] = False
        return others

    def seen(self, pages):
        rows = self.p.table[:, :, self.p.layout.state_blocks].long()
        return torch.stack([pages.position[rows[:, h], h, 0] for h in range(self.p.heads)])


@pytest.fixture
def cut(monkeypatch):
    """Cut the slots of a head among programs, and search them, in steps of 16."""
    from kvpop_vllm.kernels.triton import decode_step as module

    monkeypatch.setattr(module, "SPLIT_SLOTS", 16)
    monkeypatch.setattr(module, "SEARCHED", 16)


class TestDecodeStep(Interpreted):
    @pytest.mark.parametrize("name", SERVED)
    def test_holds_what_the_definition_holds(self, name, cut):
        """One batch holds a request that starts on dirty pages and one whose budget is almost full."""
        p = problem(requests=2, **SERVED[name])
        full = int(p.budgets.max())
        Replay(p, (0, full - 1)).check(3)

    def test_many_requests_and_uncut(self):
        """There are more rows than a tile of products has, and one program has all of a head's slots."""
        p = problem(case="mlstm", requests=17, topk=3, size=16)
        Replay(p, (*range(3, 13), *range(1, 8))).check(1)

    def test_a_wrong_start_and_padding_touch_nothing(self, cut):
        """A replayed request and padding change nothing; one that starts over on dirty pages is right.

        The padding has an arbitrary page table.
        """
        p = problem(case="mlstm-corrected", requests=4, topk=2)
        replay = Replay(p, (6, 12, 0, 12))
        replay.positions = [5, 12, -1, 0]
        others = [p.table[r, 0].long() for r in (0, 2)]
        before = [replay.pages.raw[rows].clone() for rows in others]
        q, k, v = p.inputs(range(4))
        right = p.run(replay.reference, [1, 3], [12, 0], q[[1, 3]], k[[1, 3]], v[[1, 3]], "reference")
        p.table = p.table.contiguous()
        p.table[2] = 2**30
        p.budgets = p.budgets.contiguous()
        p.budgets[2] = 2**30
        out, lse = ops.decode_step(
            q, k, v, replay.pages, p.table, torch.tensor(replay.positions), p.budgets, rule=p.rule, scale=p.scale,
            impl="triton",
        )  # fmt: skip
        assert out[0].isnan().all() and lse[0].isnan().all()
        assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()
        torch.testing.assert_close(out[[1, 3]], right[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[[1, 3]], right[1], rtol=0, atol=1e-5)
        for rows, bytes_before in zip(others, before, strict=True):
            assert torch.equal(replay.pages.raw[rows], bytes_before)

    @pytest.mark.parametrize("decay_step", [1, 4])
    def test_victim_far_out_and_ties(self, decay_step, cut):
        """Among equal effective scores at positions beyond 131,072, the older token is evicted."""
        p = problem(case="none", requests=4, heads=3, topk=60, slots=64, step=decay_step)
        p.rule = replace(p.rule, log_gamma=torch.tensor([-0.5, -0.125, 0.0], dtype=torch.float64))
        pages, q0, slots = poisoned_pages(p.layout, p.num_blocks), 200_000, torch.arange(int(p.budgets[0, 0]))
        heads = [(r, h) for r in range(p.requests) for h in range(p.heads)]
        for r, h in heads:
            at = p.table[r, h, slots // p.slots].long(), h, slots % p.slots
            pages.k[at], pages.v[at] = 0.0, 0.0
            pages.score[at] = torch.randint(-2, 3, slots.shape, generator=p.generator).float() / 4
            near = torch.randperm(70, generator=p.generator)[: len(slots)]
            pages.position[at] = (q0 - p.window - 1 - near).int()
            pages.position[p.table[r, h, 0], h, 0] = q0
        before = {head: p.long_range(pages, *head, q0) for head in heads}
        active = list(range(p.requests))
        p.run(pages, active, [q0] * p.requests, *p.inputs(active), "triton")
        for r, h in heads:
            tokens = {**before[r, h], q0 - p.window: 0.0}
            ranked = sorted((s + (q0 - t) // decay_step * float(p.rule.log_gamma[h]), t) for t, s in tokens.items())
            del tokens[ranked[0][1]]
            assert p.long_range(pages, r, h, q0) == tokens

    def test_scores_that_are_no_number_are_kept_out(self):
        """If all long-range scores are NaN, the token leaving the window is evicted, nothing else moves."""
        p = problem(case="gate_scores")
        replay = Replay(p, (20,))
        replay.pages.score.fill_(torch.nan)
        held = p.long_range(replay.pages, 0, 0, 19).keys()
        p.run(replay.pages, [0], [20], *p.inputs([0]), "triton")
        assert p.long_range(replay.pages, 0, 0, 20).keys() == held

    def test_strided_inputs_equal_contiguous_ones(self):
        """Queries and keys are views of one tensor, values of another."""
        p = problem(case="mlstm-direct-values", heads=2, requests=2)
        pages = Replay(p, (19, 20)).pages
        other, (q, k, v) = p.layout.view(pages.raw.clone()), p.inputs([0, 1])
        packed, values = torch.cat([q, k], 1), torch.cat([k, v], 1)
        expected = p.run(pages, [0, 1], [19, 20], q, k, v, "triton")
        found = p.run(other, [0, 1], [19, 20], packed[:, :4], packed[:, 4:], values[:, 2:], "triton")
        assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
        assert torch.equal(pages.raw, other.raw)

    def test_what_it_does_not_take_is_refused(self):
        p = problem(case="none")
        pages, (q, k, v) = poisoned_pages(p.layout, p.num_blocks), p.inputs([0])

        def run(q, k, v, **changes):
            p.rule = replace(p.rule, **changes)
            p.run(pages, [0], [0], q, k, v, "triton")

        for error, message, arguments in (
            (TypeError, "the cache's dtype torch.float32, got torch.float16", (q, k.half(), v.half())),
            (TypeError, "takes float32, float16 and bfloat16, got torch.float64", (q.double(), k, v)),
            (ValueError, "do not fit the pages", (q, k[..., :16], v[..., :16])),
            (ValueError, "last axis", (q, k, torch.cat([v, v], -1)[..., ::2])),
        ):
            with pytest.raises(error, match=message):
                run(*arguments)
        with pytest.raises(ValueError, match="log_gamma must be contiguous torch.float64"):
            run(q, k, v, log_gamma=p.rule.log_gamma.float())
        assert (pages.raw == 255).all()


def test_choice_of_implementation():
    def on(device, dtype, size=64):
        return types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 4, size))

    assert dispatch.select("decode_step", on("cuda", torch.bfloat16)) == "triton"
    assert dispatch.select("decode_step", on("cuda", torch.float16, 80)) == "triton"
    assert dispatch.select("decode_step", on("cuda", torch.float64)) == "reference"
    assert dispatch.select("decode_step", on("cuda", torch.bfloat16, 512)) == "reference"
