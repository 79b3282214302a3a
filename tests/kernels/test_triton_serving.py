"""Triton's decode step under its interpreter, in the process that test_triton_interpreted starts."""

from dataclasses import replace

import pytest
import torch
from kernels.factories import poisoned_pages
from kernels.problems import Problem
from kernels.served import INTERPRETED, Lockstep

from kvpop_vllm.kernels import ops

F16 = torch.float16

BIASED = 0, 0, 9, 16, 3
"""Numbers of tokens that have a bias, of the requests of :meth:`TestDecodeStep.test_holds_what_the_definition_holds`."""
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
    "biases, two heads of 80": dict(case="none", heads=2, group=3, size=80, biased=BIASED),
    "biases, float16": dict(case="key-norm", group=4, size=64, dtype=F16, biased=BIASED),
    "biases, mean mass": dict(case="mass-mean", heads=2, biased=BIASED),
    "biases, newest mass, queries wider than the cache": dict(
        case="mass-newest", dtype=F16, q_dtype=torch.float32, biased=BIASED
    ),
    "biases, mlstm whose state begins after them": dict(case="mlstm", biased=BIASED),
    "biases, moments": dict(case="moment-corrected", biased=BIASED),
    "heads of 512": dict(case="mass-newest", dtype=F16, group=4, size=512),
    "sinks, three query heads of 80": dict(case="none", heads=2, group=3, size=80, has_sinks=True),
    "sinks, mean mass, biases": dict(case="mass-mean", heads=2, biased=BIASED, has_sinks=True),
    "sinks, newest mass, float16": dict(case="mass-newest", dtype=F16, group=3, has_sinks=True),
    "sinks, moments": dict(case="moment-corrected", has_sinks=True),
    "sinks, mlstm": dict(case="mlstm", has_sinks=True),
}


def problem(dtype=torch.float32, **options) -> Problem:
    sizes = dict(requests=1, heads=1, window=3, topk=13, beyond=9)
    return Problem(**(sizes | dict(dtype=dtype, q_dtype=dtype) | options)).prepare()


def check(p: Problem, starts: tuple[int, ...], steps: int):
    """Check steps of all requests at once, of which the reference has made ``starts``."""
    followed = Lockstep(p, ["triton"], starts)
    for _ in range(steps):
        assert followed.step(list(range(p.requests))) is None, "another seed: a decision is too close"
    assert followed.check()


def begun(p: Problem, *starts: int):
    """Return pages after these steps of the reference, twice."""
    pages = Lockstep(p, [], starts).pages["reference"]
    return pages, p.layout.view(pages.raw.clone())


class TestDecodeStep:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", SERVED)
    def test_holds_what_the_definition_holds(self, name, cut):
        """One batch holds requests at all places relative to their prefixes.

        Two have nothing protected, one of which starts on dirty pages and one has an almost full budget. One
        is at its last protected token and then the tail's first, one has an almost full tail after whole
        blocks, and one is within its prefix.
        """
        p = problem(**SERVED[name], protected=(0, 0, 18, 16, 33), replay=9)
        full = int(p.budgets.max())
        check(p, (0, full - 1, 17, 16 + full - p.rule.sinks - 1, 4), 2)

    def test_many_requests_and_uncut(self):
        """There are more rows than a tile of products has, and one program has all of a head's slots."""
        check(problem(case="mlstm", requests=17, topk=3, size=16), (*range(3, 13), *range(1, 8)), 1)

    @pytest.mark.parametrize("longest", [16, 8192])
    def test_programs_share_a_long_prefix(self, longest, monkeypatch, cut):
        """The number of programs grows if none may walk far; one of the requests has no prefix."""
        from kvpop_vllm.kernels.triton import decode_step as module

        monkeypatch.setattr(module, "LONGEST_WALK", longest)
        monkeypatch.setattr(module, "_processors", lambda device: 1)
        for biased in ((), (50, 0, 16)):
            check(problem(case="none", protected=(70, 0, 16), biased=biased), (74, 8, 20), 1)

    def test_a_tail_whatever_lies_there(self, cut):
        """A tail begun again on used pages gives the same as on pages of 0xFF, without its earlier tokens."""
        p = problem(case="mlstm-corrected", protected=(17,), topk=2)
        pages, before = begun(p, 24)
        inputs, outputs, blocks = [p.inputs([0]) for _ in range(4)], [], p.prefix_blocks.long()
        for filled in (pages, p.layout.view(torch.full_like(before.raw, 255))):
            filled.raw[blocks] = before.raw[blocks]
            outputs.append([p.run(filled, [0], [17 + i], *token, "triton") for i, token in enumerate(inputs)])
        for actual, expected in zip(*outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)) and actual[0].isfinite().all()
        assert p.long_range(pages, 0, 0, 20).keys() == {17}

    @pytest.mark.parametrize("protected", [(), (17, 16, 0, 20)])
    def test_a_wrong_start_and_padding_touch_nothing(self, protected, cut):
        """A replayed request and padding change nothing, and other requests are right.

        Without prefixes, one of these starts over on dirty pages. Padding comes with a prefix and without
        one, with arbitrary tables and budgets.
        """
        p = problem(case="mlstm-norm-skip" if protected else "mlstm-corrected", requests=4, topk=2, protected=protected)
        starts, now = ((23, 16, 0, 24), [22, -1, -1, 24]) if protected else ((6, 0, 12, 12), [5, -1, 12, 0])
        pages, reference = begun(p, *starts)
        (q, k, v), right = p.inputs(range(4)), [3] if protected else [2, 3]
        right_outputs = p.run(reference, right, [now[r] for r in right], q[right], k[right], v[right], "reference")
        expected, table, budgets, prefix = (
            pages.raw.clone(),
            p.table.clone(),
            p.budgets.clone(),
            p.prefix(pages, range(4)),
        )
        padding = [i for i, position in enumerate(now) if position < 0]
        table[padding], budgets[padding] = 2**30, 2**30
        if protected:
            prefix = replace(prefix, table=prefix.table.clone())
            prefix.table[padding] = 2**30
        out, lse = ops.decode_step(
            q, k, v, pages, table, torch.tensor(now), budgets, rule=p.rule, scale=p.scale, prefix=prefix, impl="triton"
        )
        assert out[0].isnan().all() and lse[0].isnan().all()
        assert (out[padding] == 0).all() and (lse[padding] == -torch.inf).all()
        torch.testing.assert_close((out[right], lse[right]), right_outputs, rtol=0, atol=1e-5)
        changed = p.table[right].flatten().long()
        expected[changed] = pages.raw[changed]
        assert torch.equal(pages.raw, expected)

    def test_scores_that_are_no_number_are_kept_out(self):
        """If all long-range scores are NaN, the token leaving the window is evicted, nothing else moves."""
        p = problem(case="gate_scores")
        pages, _ = begun(p, 20)
        pages.score.fill_(torch.nan)
        retained = p.long_range(pages, 0, 0, 19).keys()
        p.run(pages, [0], [20], *p.inputs([0]), "triton")
        assert p.long_range(pages, 0, 0, 20).keys() == retained

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

    def test_a_prefix_that_does_not_fit_is_refused(self):
        p = problem(case="none", protected=(17, 3))
        pages, inputs = poisoned_pages(p.layout, p.num_blocks), p.inputs([0, 1])
        right = p.prefix(pages, [0, 1])
        for changes in (
            {"table": right.table[0]},
            {"table": right.table[:1]},
            {"tokens": right.tokens[:1]},
            {"biased": right.tokens[:1]},
            {"pages": problem(case="none", size=64).layout.view(torch.empty(1, 1, 16 * 520, dtype=torch.uint8))},
        ):
            options = dict(rule=p.rule, scale=p.scale, prefix=replace(right, **changes), impl="triton")
            with pytest.raises(ValueError, match="does not fit 2 requests and their pages"):
                ops.decode_step(*inputs, pages, p.table, torch.tensor([0, 0]), p.budgets, **options)
        assert (pages.raw == 255).all()
