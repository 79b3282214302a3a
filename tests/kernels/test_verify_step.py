"""Verification of drafts: outputs and pages are those of ordinary steps, whatever has been accepted before."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest
import torch
from kernels.problems import SOME_CASES, Problem, decided, problem
from kernels.served import IMPLS, INTERPRETED, ISAS, Pool, Served, check_exact

from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import draws, ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MOST = 4
"""Largest number of drafts in most tests, less than the window."""
ALONE = ["mass-newest", "mass-mean", "moment", "none-corrected"]
"""Cases that Triton does not take: each reads attention or corrects outputs."""


def fork(pool: Pool) -> Pool:
    """Return a pool with the same tokens and a copy of the pages."""
    forked = Pool(pool.p)
    forked.pages.raw.copy_(pool.pages.raw)
    forked.lengths[:] = pool.lengths
    return forked


def ordinary(pool: Pool, r: int, tokens, impl: str):
    """Return outputs and log-sum-exps of ordinary steps of a request, at these tokens."""
    forked, results = fork(pool), []
    texts, start = [list(x) for x in pool.p.texts], pool.lengths[r]
    for text, token in zip(texts, tokens, strict=True):
        text[r] = torch.cat([text[r][:start], token, text[r][start + len(token) :]])
    forked.p = replace_texts(pool.p, texts)
    for _ in range(len(tokens[0])):
        results.append(forked.decode([r], impl))
    return tuple(torch.cat(x) for x in zip(*results, strict=True))


def replace_texts(p: Problem, texts) -> Problem:
    """Return a problem that differs in its texts alone."""
    changed = object.__new__(Problem)
    changed.__dict__.update(p.__dict__ | {"texts": texts})
    return changed


def compare(actual, expected, atol: float) -> None:
    """Compare two tensors, to the bit if ``atol`` is 0."""
    if atol:
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=atol)
    else:
        assert torch.equal(actual, expected)


def check_steps(p: Problem, impl: str, rounds: list[dict[int, tuple[int, int]]], starts: list[int], atol: float = 0):
    """Verify drafts in steps, and compare each with ordinary steps, of the reference if ``impl`` is Triton.

    Args:
        p: the problem.
        impl: implementation.
        rounds: by step and request, the number of drafts and how many of them are right and accepted.
        starts: tokens that each request has seen before.
        atol: tolerance of outputs and of pages' numbers; 0 compares bits.
    """
    expected, actual, base = Pool(p), Pool(p), "reference" if impl == "triton" else impl
    for pool in (expected, actual):
        for r, start in enumerate(starts):
            for _ in range(start):
                pool.decode([r], base)
    staging = torch.stack([actual.staging(r) for r in range(p.requests)]).any(0)
    for step in rounds:
        counts, right = ({r: pair[i] for r, pair in step.items()} for i in (0, 1))
        out, lse, tokens = actual.verify(counts, impl, right)
        first = 0
        for r, count in counts.items():
            cut = slice(first, first + count + 1)
            first += count + 1
            if count < 0:
                continue
            results = ordinary(expected, r, [x[cut] for x in tokens], base)
            compare(out[cut], results[0], atol)
            compare(lse[cut], results[1], atol)
            expected.decode([r], base)
        same_pages(p, actual, expected, staging, atol)
        for r, accepted in right.items():
            for _ in range(accepted):
                expected.decode([r], base)
            actual.accept(r, accepted)
            assert actual.lengths[r] == expected.lengths[r]
    assert actual.untouched()


def same_pages(p: Problem, actual: Pool, expected: Pool, staging: torch.Tensor, atol: float) -> None:
    """Check that all bytes but staged drafts are equal, of requests whose tail has begun; and those of prefixes."""
    if atol:
        for r in range(p.requests):
            if actual.lengths[r] > p.protects(r):
                assert torch.equal(actual.retained(r), expected.retained(r))
        return
    differs = (actual.pages.raw != expected.pages.raw) & ~staging
    for r in range(p.requests):
        if actual.lengths[r] <= p.protects(r):  # only what a step writes at the end of a prefix is read there
            differs[p.table[r].flatten().long()] = False
    if p.protected:
        for r in range(p.requests):  # drafts have been written into prefixes
            cut = torch.arange(min(actual.lengths[r], p.protects(r)), p.protects(r))
            differs[p.prefix_table[r, cut // p.slots].long()] = False
    assert not differs.any(), differs.nonzero()[:5]


ALL_COUNTS = [{0: (MOST, a)} for a in (0, 4, 1, 3, 2, 4, 4, 0)]
"""Steps of one request in which each number of drafts is accepted."""


def verified(case: str, *protected: int, **options) -> Problem:
    return problem(case, *protected, drafts=MOST, length=60, **options)


if not INTERPRETED:

    @pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
    @pytest.mark.parametrize("case", SOME_CASES)
    @pytest.mark.parametrize("isa", ISAS)
    def test_every_number_of_accepted_drafts_equals_ordinary_steps(isa, case, dtypes):
        """Outputs and pages are equal to the bit, while slots fill and when all are in use."""
        p = verified(case, dtype=dtypes[0], q_dtype=dtypes[1])
        check_steps(p, isa, ALL_COUNTS, [7])

    @pytest.mark.parametrize("dtype", [F32, BF16, F16])
    @pytest.mark.parametrize("case", SOME_CASES)
    def test_the_reference_equals_its_ordinary_steps(case, dtype):
        check_steps(verified(case, dtype=dtype), "reference", ALL_COUNTS, [7])

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize(
        "case", ["none", "mass-mean", "mlstm", "mlstm-immediate", "moment-corrected", "gate_scores-threshold"]
    )
    def test_drafts_that_outnumber_the_window_and_a_batch_of_products(case, isa):
        """Drafts leave the window as drafts, are evicted, and go through the scorer in more than one batch."""
        p = problem(case, drafts=9, roles=(1, 2, 5), length=90, slots=16)
        check_steps(p, isa, [{0: (9, a)} for a in (9, 0, 5, 2, 9, 7, 8)], [5])

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("case", ["none", "mlstm-corrected", "mass-mean"])
    @pytest.mark.parametrize("size, group", [(64, 3), (96, 1), (48, 5), (128, 9)])
    def test_many_tiles_and_rows(size, group, case, isa):
        """Drafts write to some of several tiles, and their queries are more rows than one product takes."""
        shape = dict(size=size, group=group, dtype=BF16, roles=(3, 20, 110), slots=80)
        p = problem(case, 70, 0, drafts=7, biased=(33, 0), length=260, **shape)
        rounds = [{0: (7, a), 1: (7, b)} for a, b in ((7, 0), (0, 7), (3, 5), (6, 1), (7, 7))]
        for starts in ([66, 40], [226, 190]):  # some slots are in use, and all
            check_steps(p, isa, rounds, starts)

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("case", ["none", "key-norm", "gate_scores-ages", "mass-newest", "mlstm-corrected"])
    def test_requests_of_any_kind_in_one_call(case, isa):
        """Requests have heads of unequal budgets in blocks of their own, other windows, and other numbers of drafts."""
        p = Problem(case, requests=4, heads=3, group=3, unequal=True, drafts=5, length=60, step=3).prepare()
        rounds = [
            {0: (5, 2), 1: (0, 0), 2: (3, 3), 3: (1, 1)},
            {0: (2, 0), 1: (5, 5), 2: (-1, 0), 3: (4, 0)},
            {1: (2, 2), 2: (5, 1), 3: (-1, 0)},
            {0: (5, 5), 1: (1, 0), 2: (0, 0), 3: (0, 0)},
        ]
        check_steps(p, isa, rounds, [0, 3, 21, 30])

    @pytest.mark.parametrize("isa", ["reference", *ISAS])
    @pytest.mark.parametrize("case", ["none", "mlstm", "mlstm-corrected", "mass-mean", "gate_scores-threshold"])
    @pytest.mark.parametrize("accepted", [(0, 0, 0), (4, 4, 4), (2, 3, 1), (1, 0, 4)], ids=str)
    def test_a_prefix_that_ends_among_the_drafts(accepted, case, isa):
        """Drafts cross the end of a prefix, and are refused there or not; the tail's state begins in time, and once."""
        p = problem(case, 18, 16, 33, drafts=MOST, biased=(0, 16, 5), replay=9)
        rounds = [{r: (MOST, a) for r in range(3)} for a in (*accepted, 2, 4, 0)]
        check_steps(p, isa, rounds, [16, 12, 28])

    @pytest.mark.skipif("amx_bf16" not in ISAS, reason="products take longer than reading elsewhere")
    def test_a_prefix_is_read_once():
        """Five tokens take less than twice the time of one, most of which goes into reading the prefix."""
        protected = 24 * 1024
        p, seconds = problem("none", protected, drafts=MOST, dtype=BF16, size=64, slots=64, heads=1), {}
        pool = Pool(p)
        for _ in range(9):
            for count in (0, MOST):
                pool.lengths[:] = [protected]
                begin = time.thread_time()
                pool.verify({0: count}, "amx_bf16")
                seconds.setdefault(count, []).append(time.thread_time() - begin)
        assert min(seconds[MOST]) < 2 * min(seconds[0])

    @pytest.mark.parametrize("isa", ["reference", ISAS[-1]])
    def test_draws(isa):
        """Random evictions of drafts are taken back; they depend on the position alone."""
        p = verified("none")
        scorer = ops.RandomDraw(draws.head_lanes(3, slice(0, p.heads), p.heads))
        p.rule, p.seeds = replace(p.rule, scorer=scorer), torch.tensor([5])
        check_steps(p, isa, ALL_COUNTS, [7])

    @pytest.mark.parametrize("impl", ["reference", ISAS[-1]])
    @pytest.mark.parametrize("case", ["key-norm", "mlstm", "mass-mean", "moment-corrected"])
    def test_follows_the_definition(case, impl):
        """A request of which all right drafts are accepted is served as the float64 loop serves it."""
        p, (exact,) = decided(case, drafts=MOST)
        pool, rows = Pool(p), []
        while pool.lengths[0] < p.length:
            count = min(MOST, p.length - pool.lengths[0] - 1)
            right = pool.lengths[0] % (count + 1)
            out, lse, _ = pool.verify({0: count}, impl, {0: right})
            rows.append((out[: right + 1], lse[: right + 1]))
            pool.accept(0, right)
        pool.verify({0: -1}, impl)
        out, lse = (torch.cat(x) for x in zip(*rows, strict=True))
        eager = p.lse(exact.retained)
        served = Served(out, lse, {p.length: pool.retained(0)}, torch.zeros(p.length, dtype=torch.bool))
        check_exact(p, exact, eager, served)

    @pytest.mark.parametrize("threads", [2, 5])
    def test_threads_change_nothing(threads):
        p, results = Problem("mlstm", requests=3, heads=2, drafts=MOST, length=40).prepare(), []
        for count in (1, threads):
            torch.set_num_threads(count)
            pool = Pool(p)
            for r in range(3):
                pool.chunk(r, 9 + 7 * r, "cpp")
            for accepted in (3, 0, 4):
                out, lse, _ = pool.verify(dict.fromkeys(range(3), MOST), "cpp", dict.fromkeys(range(3), accepted))
                for r in range(3):
                    pool.accept(r, accepted)
            results.append((out, lse, pool.pages.raw))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize("name", ["mlstm", "gate_scores"])
    def test_a_chunk_goes_on_after_staged_drafts(name):
        """Accepted drafts are committed before the chunk that follows them, and the others are dropped."""
        p = verified(name)
        for accepted in range(MOST + 1):
            pool, other_pool = Pool(p), Pool(p)
            pool.chunk(0, 22, "cpp")
            other_pool.chunk(0, 22, "cpp")
            pool.verify({0: MOST}, "cpp", {0: accepted})
            pool.accept(0, accepted)
            other_pool.decode([0], "cpp")
            for _ in range(accepted):
                other_pool.decode([0], "cpp")
            if accepted:
                with pytest.raises(ops.StepOrderError):
                    fork(pool).chunk(0, 5, "cpp")
            pool.verify({0: -1}, "cpp")
            same_pages(p, pool, other_pool, pool.staging(0), 0)
            assert all(map(torch.equal, pool.chunk(0, 5, "cpp"), other_pool.chunk(0, 5, "cpp")))
            same_pages(p, pool, other_pool, pool.staging(0), 0)

    @pytest.mark.parametrize("impl", ["reference", ISAS[-1]])
    @pytest.mark.parametrize("protected", [0, 16])
    def test_a_step_out_of_order_is_refused(impl, protected):
        """A step must begin at a staged draft or after the last one; nothing is written otherwise."""
        p = problem("mlstm", protected, 0, drafts=MOST)
        pool = Pool(p)
        for r in (0, 1):
            pool.chunk(r, 20, impl)
        pool.verify({0: 2, 1: MOST}, impl)
        before, tokens = pool.pages.raw.clone(), list(pool.lengths)
        for wrong in (-1, 3, 4):
            pool.lengths[:] = [tokens[0] + wrong, tokens[1]]
            with pytest.raises(ops.StepOrderError, match=r"has seen 21 tokens and holds 2 staged drafts"):
                pool.verify({1: 1, 0: 1}, impl)
            assert torch.equal(pool.pages.raw, before)
        pool.lengths[:] = [tokens[0] + 2, tokens[1] + MOST]
        pool.verify({0: 1, 1: 0}, impl)
        pool.lengths[:] = [pool.lengths[0], pool.lengths[1] + 1]
        with pytest.raises(ops.StepOrderError, match="holds 0 staged drafts"):
            pool.verify({0: 0, 1: 0}, impl)

    @pytest.mark.parametrize("impl", ["reference", ISAS[-1]])
    def test_a_new_start_drops_what_is_staged(impl):
        p = verified("none")
        pool = Pool(p)
        pool.verify({0: MOST}, impl)
        pool.lengths[:] = [0]
        pool.verify({0: 0}, impl)
        pool.lengths[:] = [2]
        with pytest.raises(ops.StepOrderError, match="has seen 1 tokens and holds 0 staged drafts"):
            pool.verify({0: 0}, impl)

    @pytest.mark.parametrize("impl", ["reference", ISAS[-1]])
    def test_drafts_that_do_not_fit_are_refused(impl):
        p = verified("none")
        pool = Pool(p)
        for count in (MOST + 1, -2):
            with pytest.raises(
                ValueError, match=f"request 0: {count} drafts after token 0 of .* do not fit: at most {MOST}"
            ):
                pool.verify({0: count}, impl)
        p.layout = replace(p.layout, drafts=0)
        with pytest.raises(ValueError, match="at most 0 can be staged"):
            Pool(p).verify({0: 1}, impl)
        p = verified("mass-mean")
        p.layout = replace(p.layout, draft_query_bytes=4)
        with pytest.raises(ValueError, match="the layout stages 4 bytes of queries, the rule needs 256"):
            Pool(p).verify({0: 1}, impl)


def test_places_of_staged_drafts():
    """Staged drafts lie after the state, apart from each other, and each within a block; one more block holds them."""
    for floats, dtype, queries in ((0, BF16, 0), (4161, BF16, 0), (64 * 66, BF16, 4 * 128), (5, F32, 3 * 128)):
        without = PageLayout(2, 64, dtype, 64, floats)
        for drafts in (1, 4, 8):
            layout = replace(without, drafts=drafts, draft_query_bytes=queries)
            assert layout.draft_bytes == 16 * -(-(2 * 64 * dtype.itemsize + 8 + queries) // 16)
            places = layout.draft_places
            begins = [block * layout.region_bytes + byte for block, byte in places]
            assert begins[0] >= 4 * floats and all(
                byte + layout.draft_bytes <= layout.region_bytes for _, byte in places
            )
            assert all(b - a >= layout.draft_bytes for a, b in zip(begins, begins[1:], strict=False))
            assert layout.state_blocks == places[-1][0] + 1 <= without.state_blocks + 1
            assert layout.blocks(1000, 512) - without.blocks(1000, 512) == layout.state_blocks - without.state_blocks
    many = PageLayout(1, 32, F32, 16, 100, drafts=40)
    assert many.state_blocks == 3 and many.draft_places[39][0] == 2
    with pytest.raises(
        ConfigError, match="no room for a draft and its 10000 bytes of queries: raise --block-size to 48,"
    ):
        PageLayout(1, 32, F32, 16, drafts=1, draft_query_bytes=10_000)
    assert PageLayout(1, 32, F32, 48, drafts=1, draft_query_bytes=10_000).state_blocks == 1


TRITON = {
    "recency, unequal heads": dict(case="none", group=1, heads=2, unequal=True, sinks=0),
    "key norm, float16": dict(case="key-norm", group=4, size=64, dtype=F16),
    "three query heads, decay in steps": dict(case="gate_scores", group=3, step=3, topk=27),
    "own decays": dict(case="gate_scores-ages"),
    "threshold": dict(case="gate_scores-threshold"),
    "linear, queries wider than the cache": dict(case="linear", dtype=F16, q_dtype=F32),
    "mlp, sinks": dict(case="mlp", has_sinks=True),
    "mlstm": dict(case="mlstm-norm-skip", group=3),
    "mlstm without value weights, float16": dict(case="mlstm-direct-values", dtype=F16),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "biases": dict(case="mlstm", biased=(0, 5, 0, 7)),
    "no long-range slots, window of m": dict(case="none", topk=0, window=4),
}
if INTERPRETED:

    def check_four_requests(dtype=F32, **options):
        """Requests fill their slots, evict, and cross the end of a prefix; each number of drafts is accepted."""
        sizes = dict(heads=1, window=5, topk=7, length=60, protected=(0, 18, 0, 16), replay=9, drafts=MOST)
        p = Problem(**(sizes | dict(dtype=dtype, q_dtype=dtype) | options)).prepare()
        rounds = [
            {0: (4, 2), 1: (4, 4), 2: (3, 3), 3: (4, 1)},
            {0: (4, 4), 1: (2, 0), 2: (-1, 0), 3: (4, 4)},
            {0: (1, 0), 1: (4, 3), 2: (4, 1), 3: (-1, 0)},
        ]
        check_steps(p, "triton", rounds, [6, 15, 25, 30], 2e-5 if dtype == F32 else 4e-3)

    @pytest.mark.parametrize("name", TRITON)
    def test_equals_steps_of_the_reference(name):
        check_four_requests(**TRITON[name])

    def test_programs_share_slots_and_searches(cut):
        check_four_requests(case="mlstm", topk=30)

    def test_a_step_out_of_order_and_padding_touch_nothing(monkeypatch):
        p = Problem("mlstm", requests=4, heads=1, drafts=MOST, length=40).prepare()
        pool = Pool(p)
        for r in range(4):
            pool.chunk(r, 20, "reference")
        pool.verify(dict.fromkeys(range(4), 2), "triton")
        before = pool.pages.raw.clone()
        pool.lengths[:] = [24, 22, 20, 21]
        table, positions = p.table, torch.tensor([24, 22, 20, -1])
        pool.table = table.clone()
        pool.table[3] = 2**30
        verify = ops.verify_step

        def padded(*arguments, **options):
            return verify(*arguments[:5], positions, *arguments[6:], **options)

        monkeypatch.setattr(ops, "verify_step", padded)
        out, lse, _ = pool.verify({0: 1, 1: 1, 2: 1, 3: 0}, "triton")
        assert out[[0, 1, 4, 5]].isnan().all() and lse[[0, 1, 4, 5]].isnan().all() and out[2:4].isfinite().all()
        assert (out[6] == 0).all() and (lse[6] == -torch.inf).all()
        for r in (0, 2, 3):
            blocks = table[r].flatten().long()
            assert torch.equal(pool.pages.raw[blocks], before[blocks])

    @pytest.mark.parametrize("case", [*ALONE, "rounds"])
    def test_rules_that_read_attention_or_keep_queries_are_refused(case):
        p = verified("none" if case == "rounds" else case)
        if case == "rounds":
            p.rule = replace(p.rule, rounds=ops.Redundancy(p.group))
        with pytest.raises(NotImplementedError, match="takes no rule that reads attention, keeps queries or corrects"):
            Pool(p).verify({0: 1}, "triton")

    def test_more_drafts_than_the_window_are_refused():
        p = problem("none", drafts=9, roles=(1, 5, 5))
        with pytest.raises(ValueError, match="takes 1 to w = 8 drafts, got 9"):  # the rule's window is 3 larger here
            Pool(p).verify({0: 1}, "triton")


@pytest.mark.parametrize("op", ["decode_step", "verify_step"])
@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_are_written_to_a_given_tensor(impl, op, monkeypatch):
    p = problem("mlstm", 0, 0, drafts=MOST)
    call = {"decode_step": lambda pool: pool.decode([0], impl), "verify_step": lambda pool: pool.verify({0: 3}, impl)}[
        op
    ]
    expected = call(Pool(p))[0]
    out = torch.full_like(expected, torch.nan)
    monkeypatch.setattr(ops, op, functools.partial(getattr(ops, op), out=out))
    written = call(Pool(p))[0]
    assert written.data_ptr() == out.data_ptr() and torch.equal(out, expected)


if not INTERPRETED:

    @pytest.mark.parametrize("op", ["decode_step", "verify_step"])
    def test_an_output_that_does_not_fit_is_refused(op, monkeypatch):
        p = problem("mlstm", 0, 0, drafts=MOST)
        call = {
            "decode_step": lambda pool: pool.decode([0], "cpp"),
            "verify_step": lambda pool: pool.verify({0: 3}, "cpp"),
        }[op]
        out, step = torch.empty_like(call(Pool(p))[0]), getattr(ops, op)
        wrong = {
            "out must be contiguous": (ValueError, out.new_empty(*out.shape, 2)[..., 0]),
            "out must have shape": (ValueError, out[:0]),
            "out must be a CPU tensor of Float": (TypeError, out.double()),
        }
        for message, (error, tensor) in wrong.items():
            monkeypatch.setattr(ops, op, functools.partial(step, out=tensor))
            with pytest.raises(error, match=message):
                call(Pool(p))
