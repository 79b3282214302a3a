"""Triton's kernels behind a protected prefix, interpreted in the process of test_triton_interpreted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernels.behind import Behind
from kernels.factories import given_scores
from kernels.problems import Problem
from kernels.test_triton_serving import F16, Replay, cut, poisoned  # noqa: F401  (fixtures)

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import StepOrderError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.usefixtures("poisoned", "cut")
class Interpreted:
    __test__ = INTERPRETED


class Served(Replay):
    def foreign(self):
        others = super().foreign()
        others[self.p.prefix_blocks.long()] = False
        return others


def problem(case, dtype=torch.float32, **options) -> Behind:
    sizes = dict(heads=1, group=2, size=32, slots=16, sinks=2, window=3, topk=13, beyond=9)
    return Behind(case, **(sizes | dict(dtype=dtype, q_dtype=dtype) | options)).prepare()


SERVED = {
    "recency, unequal heads, window 1": dict(case="none", group=1, window=1, heads=2, unequal=True),
    "key norm": dict(case="key-norm", group=4, size=64, dtype=F16),
    "own decays": dict(case="gate_scores-ages", group=3),
    "threshold, corrected": dict(case="gate_scores-threshold-corrected", dtype=F16),
    "linear, queries wider than the cache": dict(case="linear", sinks=0, dtype=F16, q_dtype=torch.float32),
    "mlp": dict(case="mlp"),
    "mlstm": dict(case="mlstm-norm-skip", group=3, replay=9),
    "mlstm, float16": dict(case="mlstm-softmax-cap", dtype=F16),
    "mlstm read at once": dict(case="mlstm-immediate", replay=16),
    "newest mass": dict(case="mass-newest", group=3),
    "mean mass": dict(case="mass-mean"),
    "moments": dict(case="moment-corrected"),
    "mlstm in several state blocks, corrected": dict(case="mlstm-corrected", size=64, group=1, topk=20),
}


class TestPrefix(Interpreted):
    @pytest.mark.parametrize("name", SERVED)
    def test_holds_what_the_definition_holds(self, name):
        """One batch holds requests at all places relative to their prefixes.

        These are a request with nothing protected and an almost full budget, one at its last protected token
        and then the tail's first, one with an almost full tail behind whole blocks, and one within its
        prefix.
        """
        p = problem(**(SERVED[name] | dict(protected=(0, 18, 16, 33))))
        full = int(p.budgets.max())
        Served(p, (full - 1, 17, 16 + full - p.rule.sinks - 1, 4)).check(3)

    def test_a_prefix_and_its_tail_whatever_lies_there(self):
        """A tail begun again on used pages gives the same as on pages of 0xFF, without its earlier tokens."""
        p = problem("mlstm-corrected", protected=(17,), topk=2)
        served = Served(p, (24,))
        before = served.pages.raw.clone()
        inputs = [p.inputs([0]) for _ in range(4)]
        outputs = []
        for pages in (served.pages, p.layout.view(torch.full_like(before, 255))):
            blocks = p.prefix_blocks.long()
            pages.raw[blocks] = before[blocks]
            outputs.append([p.run(pages, [0], [17 + i], *each, "triton") for i, each in enumerate(inputs)])
        for found, expected in zip(*outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and found[0].isfinite().all()
        assert p.long_range(served.pages, 0, 0, 20).keys() == {17}

    def test_a_wrong_start_and_padding_touch_nothing(self):
        """A replayed request behind a prefix and padding change nothing, and another request is right.

        Padding comes with a prefix and without one, with arbitrary tables.
        """
        p = problem("mlstm-norm-skip", protected=(17, 16, 0, 20), topk=2)
        served = Served(p, (23, 16, 0, 24))
        positions, table = torch.tensor([22, -1, -1, 24]), p.table.clone()
        table[1:3] = 2**30
        expected, inputs = served.pages.raw.clone(), p.inputs(range(4))
        right = p.run(served.reference, [3], [24], *(x[3:] for x in inputs), "reference")
        prefix = p.prefix(served.pages, [0, 1, 2, 3])
        wild = replace(prefix, table=prefix.table.clone())
        wild.table[1:3] = 2**30
        budgets = p.budgets.clone()
        budgets[1:3] = 2**30
        out, lse = ops.decode_step(
            *inputs, served.pages, table, positions, budgets, rule=p.rule, scale=p.scale, prefix=wild, impl="triton"
        )
        assert out[0].isnan().all() and lse[0].isnan().all()
        assert (out[1:3] == 0).all() and (lse[1:3] == -torch.inf).all()
        torch.testing.assert_close((out[3:], lse[3:]), right, rtol=0, atol=1e-5)
        own = p.table[3].flatten().long()
        expected[own] = served.pages.raw[own]
        assert torch.equal(served.pages.raw, expected)

    @pytest.mark.parametrize("longest", [16, 8192])
    def test_programs_share_a_long_prefix(self, longest, monkeypatch):
        """The number of programs grows if none may walk far; one of the requests has no prefix."""
        from kvpop_vllm.kernels.triton import decode_step as module

        monkeypatch.setattr(module, "LONGEST_WALK", longest)
        monkeypatch.setattr(module, "_processors", lambda device: 1)
        p = problem("none", protected=(70, 0, 16))
        Served(p, (74, 8, 20)).check(1)

    def test_a_prefix_that_does_not_fit_is_refused(self):
        p = problem("none", protected=(17, 3))
        pages, inputs = Served(p, ()).pages, p.inputs([0, 1])
        right = p.prefix(pages, [0, 1])
        for changes in (
            {"table": right.table[0]},
            {"table": right.table[:1]},
            {"tokens": right.tokens[:1]},
            {"pages": problem("none", size=64).layout.view(torch.empty(1, 1, 16 * 520, dtype=torch.uint8))},
        ):
            rest = dict(rule=p.rule, scale=p.scale, prefix=replace(right, **changes), impl="triton")
            with pytest.raises(ValueError, match="does not fit 2 requests and their pages"):
                ops.decode_step(*inputs, pages, p.table, torch.tensor([0, 0]), p.budgets, **rest)
        assert (pages.raw == 255).all()

    def test_nobody_protected_is_as_without_a_prefix(self):
        p = problem("mlstm-corrected", protected=(0, 0))
        p.prefix_table = torch.empty(2, 0, dtype=torch.int32)
        served = Served(p, (19, 0))
        (q, k, v), other = p.inputs([0, 1]), p.layout.view(served.pages.raw.clone())
        found = p.run(served.pages, [0, 1], [19, 0], q, k, v, "triton")
        expected = Problem.run(p, other, [0, 1], [19, 0], q, k, v, "triton")
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert torch.equal(served.pages.raw, other.raw)


class TestBeginTail(Interpreted):
    @pytest.mark.parametrize("replay", [0, 5, 70, 1024])
    @pytest.mark.parametrize("case, size", [("mlstm-softmax-cap", 32), ("mlstm-direct-values", 64)])
    def test_equals_the_reference(self, case, size, replay):
        """R is smaller or larger than p and than a chunk; only states behind a prefix change."""
        p = problem(case, heads=2, size=size, protected=(0, 90, 17), replay=replay)
        reference = Served(p, ()).reference
        reference.k[p.prefix_blocks.long()], reference.v[p.prefix_blocks.long()] = (
            torch.randn(len(p.prefix_blocks), 2, p.slots, size, generator=p.generator) for _ in "kv"
        )
        pages = p.layout.view(reference.raw.clone())
        before = reference.raw.clone()
        p.begin(reference, [0, 1, 2], "reference")
        p.begin(pages, [0, 1, 2], "triton")
        states, words = p.table[1:, 0, : p.layout.state_blocks].long(), p.rule.scorer.state_floats
        found, expected = (x.state[states].transpose(1, 2).flatten(2)[..., :words] for x in (pages, reference))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        others = torch.ones(p.num_blocks, dtype=torch.bool)
        others[states.flatten()] = False
        assert torch.equal(pages.raw[others], before[others])

    def test_rules_without_a_state(self):
        p = problem("linear", protected=(17,))
        pages = Served(p, ()).pages
        p.begin(pages, [0], "triton")
        assert (pages.raw == 255).all()


PREFILLED = {
    "recency": dict(case="none", group=1, heads=2, unequal=True),
    "float16": dict(case="linear", dtype=F16, size=64),
    "own decays": dict(case="gate_scores-ages"),
    "mlstm": dict(case="mlstm-norm-skip", replay=9),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "mean mass": dict(case="mass-mean"),
    "threshold": dict(case="gate_scores-threshold-corrected"),
}


class TestPrefillBehindAPrefix(Interpreted):
    @pytest.mark.parametrize("cuts", [(40,), (18, 22), (17, 1, 22), (5, 17, 3, 15), (30, 10)])
    @pytest.mark.parametrize("name", PREFILLED)
    def test_equals_decode_steps(self, name, cuts, monkeypatch):
        """Chunks lie within a prefix of 18 tokens, cross its end, begin at it and lie behind it."""
        from kvpop_vllm.kernels import prefix_attention

        monkeypatch.setattr(prefix_attention, "PIECE", 16)
        p = problem(**(PREFILLED[name] | dict(protected=(18,))))
        served, decoded = Served(p, ()), []
        if p.rule.sequential and len(cuts) > 2:
            cuts = (16, 5, 2)
        q, k, v = p.inputs([0] * sum(cuts))
        for t in range(sum(cuts)):
            decoded.append(p.run(served.reference, [0], [t], *(x[t : t + 1] for x in (q, k, v)), "reference"))
        expected, start, parts = [torch.cat(x) for x in zip(*decoded, strict=True)], 0, []
        for count in cuts:
            part, end = slice(start, start + count), start + count
            p.write(served.pages, [0] * count, range(start, end), k[part], v[part])
            if start <= 18 < end:
                p.begin(served.pages, [0], "triton")
            gate_scores = given_scores(p.rule, k[part])
            parts.append(
                ops.prefill_chunk(
                    q[part],
                    k[part],
                    v[part],
                    served.pages,
                    p.table[0],
                    start,
                    p.budgets[0],
                    rule=p.rule,
                    scale=p.scale,
                    gate_scores=gate_scores,
                    prefix=p.prefix(served.pages, [0]),
                    impl="triton",
                )  # fmt: skip
            )
            start = end
        found = [torch.cat(x) for x in zip(*parts, strict=True)]
        close = 2e-3 if p.dtype == F16 else 2e-5
        torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=close, atol=close)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=2e-4 if p.dtype == F16 else 2e-5)
        for h in range(p.heads):
            held = [p.long_range(pages, 0, h, start - 1) for pages in (served.pages, served.reference)]
            assert held[0].keys() == held[1].keys()
            torch.testing.assert_close(
                *(torch.tensor([x[t] for t in held[1]]) for x in held), rtol=1e-3, atol=1e-3 if p.dtype == F16 else 1e-4
            )
        assert (served.pages.raw[served.foreign()] == 255).all()

    def test_step_order(self):
        p = problem("linear", protected=(18,))
        served = Served(p, (25,))
        before, (q, k, v) = served.pages.raw.clone(), p.inputs([0] * 3)
        own = dict(rule=p.rule, scale=p.scale, prefix=p.prefix(served.pages, [0]), impl="triton")
        with pytest.raises(StepOrderError, match="starts at position 24, but its cache has seen 25"):
            ops.prefill_chunk(q, k, v, served.pages, p.table[0], 24, p.budgets[0], **own)
        assert torch.equal(served.pages.raw, before)


class TestDraws(Interpreted):
    """Random draws follow from integers alone, so retained tokens equal the reference's exactly."""

    @pytest.fixture
    def drawn(self):
        """Two requests under random eviction, the second behind a prefix."""
        p = problem("none", heads=2, protected=(0, 18))
        lanes = (3 << 32) + torch.arange(2)
        p.rule = replace(p.rule, scorer=ops.RandomDraw(lanes), log_gamma=torch.zeros(2, dtype=torch.float64))
        return p

    SEEDS = torch.tensor([-(2**63), 2**63 - 5])

    def run(self, p, pages, r, t, token, impl):
        p.write(pages, [r], [t], *token[1:])
        own = dict(rule=p.rule, scale=p.scale, seeds=self.SEEDS[[r]], prefix=p.prefix(pages, [r]), impl=impl)
        return ops.decode_step(*token, pages, p.table[[r]], torch.tensor([t]), p.budgets[[r]], **own)

    @pytest.mark.parametrize("r", [0, 1])
    def test_steps_and_chunks(self, drawn, r):
        p, count = drawn, 44
        reference, q, k, v = Served(p, ()).reference, *p.inputs([0] * count)
        pages, chunked = (p.layout.view(reference.raw.clone()) for _ in range(2))
        outputs = []
        for t in range(count):
            token = [x[t : t + 1] for x in (q, k, v)]
            outputs.append(self.run(p, reference, r, t, token, "reference"))
            if t == 35:
                pages.raw.copy_(reference.raw)
            if t > 35:
                found = self.run(p, pages, r, t, token, "triton")
                torch.testing.assert_close(found, outputs[-1], rtol=0, atol=1e-5)
        expected = [torch.cat(each) for each in zip(*outputs, strict=True)]
        p.write(chunked, [r] * count, range(count), k, v)
        for part in (slice(0, 30), slice(30, count)):
            own = dict(
                rule=p.rule, scale=p.scale, seed=int(self.SEEDS[r]), prefix=p.prefix(chunked, [r]), impl="triton"
            )
            found = ops.prefill_chunk(q[part], k[part], v[part], chunked, p.table[r], part.start, p.budgets[r], **own)
            torch.testing.assert_close(found, tuple(x[part] for x in expected), rtol=0, atol=2e-5)
        for h in range(2):
            held = [p.long_range(each, r, h, count - 1).keys() for each in (reference, pages, chunked)]
            assert held[0] == held[1] == held[2] and len(held[0]) == 13
