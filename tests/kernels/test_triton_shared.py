"""Heads that divide a budget in Triton's decode step, interpreted: against the oracle, from pages of the reference on. Run in the
process that test_triton_interpreted starts."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernels.factories import given_scores, random_rule, random_scorer
from kernels.shared_heads import CASES, GROUP, SIZE, N, Problem, retained

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import HeadRegions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = {"window": 3, "topk": 8, "requests": 1, "length": 30}


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, and the largest of an integer type; slots are searched by 16."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Served:
    """Requests of a problem that the reference has taken to ``start`` and Triton takes on, in pages of their own."""

    def __init__(self, p: Problem, start: int):
        self.p, self.at = p, start
        reference, self.rows = p.pages()
        budgets = torch.full((p.heads,), p.budget, dtype=torch.int32)
        for r in range(p.requests if start else 0):
            q, k, v = (x[r, :start] for x in (p.q, p.k, p.v))
            own = dict(rule=p.rule, scale=SIZE**-0.5, prompt=p.prompt, given=given_scores(p.rule, k), impl="reference")
            ops.prefill_chunk(q, k, v, reference, self.rows[r], 0, budgets, **own)
        self.reference = reference
        self.raw = reference.raw[:, 0].clone()  # every region once
        self.pages = HeadRegions(p.layout, p.budget, p.num_blocks).view(self.raw)

    def step(self, impl="triton"):
        """The next token of all; outputs ``[R, Hq, D]``."""
        p, t = self.p, self.at
        at = torch.full((p.requests,), t)
        valid = torch.full((p.requests, p.heads), p.rule.for_prompt(p.prompt).extent(t, p.budget), dtype=torch.int32)
        budgets = torch.full((p.requests, p.heads), p.budget, dtype=torch.int32)
        more = dict(given=given_scores(p.rule, p.k[:, t]), prompts=torch.full((p.requests,), p.prompt))
        pages = self.pages if impl == "triton" else self.reference
        tokens = (x[:, t] for x in (p.q, p.k, p.v))
        return ops.decode_step(
            *tokens, pages, self.rows, at, valid, budgets, rule=p.rule, scale=SIZE**-0.5, impl=impl, **more
        )[0]

    def held(self, pages=None):
        """What each head of each request holds."""
        return [retained(self.p, pages or self.pages, row, self.at) for row in self.rows]


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    from kvpop_vllm.kernels.triton import decode_step as module

    monkeypatch.setattr(module, "SEARCHED", 16)


class TestSharedHeads:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        "case, start, steps, changes",
        [
            ("votes", 15, 6, {"prompt": 19, "every": 4, "requests": 2, "heads": 2}),
            ("mass-corrected", 14, 7, {"every": 3, "prompt": 20, "seed": 17}),
            ("norm-corrected", 9, 7, {"every": 1, "window": 1, "prompt": 14}),
            ("linear", 18, 5, {"prompt": 20, "every": 5}),
        ],
    )
    def test_equals_the_oracle(self, case, start, steps, changes):
        """Retained sets after every token, and outputs: shares are set for the first time, again, and stay after the prompt."""
        p = Problem(**CASES[case] | SMALL | changes)
        served, known, sizes = Served(p, start), [p.oracle(r) for r in range(p.requests)], set()
        for served.at in range(start, start + steps):
            out = served.step()
            served.at += 1
            for r, (expected, visible, margins) in enumerate(known):
                torch.testing.assert_close(out[r].double(), expected[served.at - 1], rtol=0, atol=1e-4)
                wanted = [visible[h, served.at - 1].nonzero().flatten().tolist() for h in range(p.heads)]
                assert float(margins.min()) > 1e-6 and served.held()[r] == wanted, (r, served.at)
                sizes.add(tuple(map(len, wanted)))
        assert len(sizes) > 2 and len({max(s) - min(s) for s in sizes}) > 1, "shares have hardly changed"

    @pytest.mark.parametrize("kind, options", [("mlstm", {}), ("mlstm", {"delayed": False}), ("given", {"ages": True})])
    def test_other_scores(self, kind, options):
        """What the oracle does not score: as the reference."""
        p = Problem(**SMALL | {"kind": "key-norm", "every": 3, "prompt": 24, "heads": 2, "requests": 1})
        draw = torch.Generator().manual_seed(7)
        rule = random_rule(
            random_scorer(kind, p.heads, SIZE, draw, **options), p.heads, p.sinks, p.window, draw, 1, p.every
        )
        p.rule = replace(rule, share_pages=p.rule.share_pages)
        p.layout = PageLayout(p.heads, SIZE, torch.float32, N, p.rule.state_floats(SIZE))
        width = p.layout.state_blocks + cdiv(p.budget, N) + 1
        p.num_blocks, p.blocks = width + 1, torch.arange(1, width + 1).int().view(1, -1)
        served, uneven = Served(p, 15), False
        for served.at in range(15, 20):
            found, expected = served.step(), served.step("reference")
            served.at += 1
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            assert served.held() == served.held(served.reference)
            uneven |= len({len(head) for head in served.held()[0]}) > 1
        assert uneven, "all shares are equal"

    def test_a_prompt_in_chunks(self):
        """From the start, on dirty pages, and once more on those that have been divided: token by token by the same kernels."""
        sizes = {"sinks": 1, "window": 2, "topk": 2, "length": 10, "prompt": 8, "heads": 2, "every": 2}
        p = Problem(**SMALL | sizes | {"kind": "key-norm"})
        (expected, visible, _), (pages, rows) = p.oracle(), p.pages()
        budgets, tokens = torch.full((p.heads,), p.budget, dtype=torch.int32), [x[0] for x in (p.q, p.k, p.v)]
        for a, b in (0, 9), (9, 10), (0, 10):
            cut, more = (x[a:b] for x in tokens), {"prompt": p.prompt, "impl": "triton"}
            out, _ = ops.prefill_chunk(*cut, pages, rows[0], a, budgets, rule=p.rule, scale=SIZE**-0.5, **more)
            torch.testing.assert_close(out.double(), expected[a:b], rtol=0, atol=1e-4)
            held = [visible[h, b - 1].nonzero().flatten().tolist() for h in range(p.heads)]
            assert retained(p, pages, rows[0], b) == held
        assert len(set(map(len, held))) > 1, "all shares are equal"

    def test_a_wrong_start_and_padding_touch_nothing(self):
        """A request that is replayed, one of padding whose table is anything, and pages that no step has written."""
        p = Problem(
            **SMALL | CASES["votes-corrected"] | {"requests": 3, "topk": 8, "window": 3, "length": 30, "prompt": 22}
        )
        served = Served(p, 18)
        served.rows, budgets = served.rows.clone(), torch.full((3, p.heads), p.budget, dtype=torch.int32)
        served.rows[1] = 2**30
        mine = served.rows[2].flatten().unique().long()
        served.raw[mine] = 255
        before = served.raw.clone()
        q, k, v = (x[:, 17] for x in (p.q, p.k, p.v))
        out, lse = ops.decode_step(
            q, k, v, served.pages, served.rows, torch.tensor([17, -1, 18]), budgets, budgets, rule=p.rule, scale=1.0,
            prompts=torch.full((3,), p.prompt), impl="triton",
        )  # fmt: skip
        assert out[[0, 2]].isnan().all() and lse[[0, 2]].isnan().all()
        assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
        assert torch.equal(served.raw, before)

    def test_a_start_that_is_wrong_in_one_head_divides_nothing(self):
        """That head's pages stay as they are, others go on with the share that they have."""
        p = Problem(**CASES["votes"] | SMALL | {"prompt": 22})
        right, wrong = Served(p, 14), Served(p, 14)
        zero = wrong.rows[0, 1, p.layout.state_blocks]
        wrong.pages.position[zero, 0, 0] = 7
        before, shares = wrong.raw.clone(), []
        right.step()
        out = wrong.step()
        assert out[:, GROUP : 2 * GROUP].isnan().all() and out[:, :GROUP].isfinite().all()
        for each in (before, right.raw, wrong.raw):
            state = HeadRegions(p.layout, p.budget, p.num_blocks).view(each).state
            shares.append(
                [float(state[wrong.rows[0, h, 0], 0, p.layout.state_floats - p.rule.share_floats]) for h in range(3)]
            )
        assert shares[0] == shares[2] != shares[1], "nothing would have been divided"
        own = wrong.rows[0, 1, : p.layout.state_blocks].long()
        assert torch.equal(wrong.raw[own], before[own])

    def test_scores_that_are_no_numbers_break_nothing(self):
        p = Problem(
            **SMALL
            | CASES["norm-corrected"]
            | {"every": 3, "window": 3, "topk": 8, "requests": 1, "length": 30, "prompt": 28}
        )
        p.k[:, 10:], p.v[:, 10:] = torch.nan, torch.nan
        served = Served(p, 17)
        for served.at in range(17, 23):
            served.step()
            served.at += 1
            assert sum(map(len, served.held()[0])) <= p.heads * p.budget

    def test_tables_of_shares_that_are_too_small_are_refused(self):
        p = Problem(**SMALL)
        p.rule = replace(p.rule, share_pages=1)
        with pytest.raises(ValueError, match="do not fit 1 pages a head"):
            p.serve([10], "triton")
