"""Protected prefixes in serving kernels, apart from what test_prefill_chunk proves of whole requests."""

import pytest
import torch
from kernels.problems import decided, problem
from kernels.served import IMPLS, INTERPRETED, ISAS, Pool, check_roundings, check_same, serve

from kvpop_vllm import _C
from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.kernels import ops


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("biased", [(), (0, 1, 9, 32, 0)], ids=["plain", "biased"])
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "moment-corrected", "gate_scores-threshold", "mlstm", "mlstm-short"]
)
def test_several_requests_in_one_step(case, biased, impl):
    """Requests without a prefix, at its end, below it and after it are right in one step, with a bias and without.

    Each gives the same as alone, to the bit.
    """
    p, exact = decided(case, 0, 1, 17, 32, 21, biased=biased)
    together, alone, requests = Pool(p), Pool(p), range(5)
    for pool in (together, alone):
        for r, start in enumerate((3, 1, 17, 20, 35)):
            pool.chunk(r, start, impl)
    for _ in range(6 if impl == "reference" else 15):
        out, lse = together.decode([*requests], impl)
        for r in requests:
            one, one_lse = alone.decode([r], impl)
            assert torch.equal(out[r : r + 1], one) and torch.equal(lse[r : r + 1], one_lse)
            t = together.lengths[r] - 1
            assert torch.equal(together.retained(r), exact[r].retained[:, t, : t + 1])
            check_roundings(p.dtype, out[r], exact[r].out[t], exact[r].magnitude[t])
    assert torch.equal(together.pages.raw, alone.pages.raw)
    assert (together.pages.raw[p.foreign()] == 255).all() and (together.pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunks", [[0], [40], [11, 3, 0, 20]], ids=str)
def test_any_finite_bias_counts(chunks, impl):
    """Tokens of the least bias have no weight next to others, and equal weights where there are no others."""
    lowest, p = torch.finfo(torch.float32).min, problem("none", 21, biased=(19,), group=3)
    p.biases = [
        torch.tensor([[lowest, lowest, lowest, 0.0, -1e30, -500.0, 30.0], [lowest, 3.0, -1e4, lowest, 0.5, 40.0, 1e5]])
    ]
    p.biases[0] = torch.cat([p.biases[0], torch.full((2, 12), lowest)], 1)
    exact, served = p.exact_run(), serve(p, chunks, impl)
    check_roundings(p.dtype, served.out, exact.out, exact.magnitude)
    usual = exact.lse.abs() < 1e3
    torch.testing.assert_close(served.lse[usual].double(), exact.lse[usual], rtol=0, atol=2e-5)
    torch.testing.assert_close(
        served.lse[~usual].double(), exact.lse[~usual], rtol=1e-6 if impl in ISAS else 0.5, atol=0
    )


@pytest.mark.parametrize("impl", ISAS)
@pytest.mark.parametrize("chunks", [[100], [90, 30]], ids=str)
def test_a_prefix_is_attended_to_in_pieces(chunks, impl, monkeypatch):
    """In some pieces of a prefix all tokens have a bias, in one some, in others none."""
    monkeypatch.setattr("kvpop_vllm.kernels.cpp.prefill_chunk.PIECE", 20)
    p = problem("mlstm", 97, biased=(53,), length=120)
    check_same(serve(p, chunks, impl), serve(p, [0]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect", [0, 17])
@pytest.mark.parametrize(
    "case", ["none", "mass-newest", "gate_scores-threshold", "moment-corrected", "mlstm", "mlstm-immediate"]
)
def test_nothing_is_taken_from_the_bytes_that_lay_there(case, protect, impl):
    """Results do not depend on bytes that lay in the pages before.

    These come from a new pool, one full of NaN, another request in the same blocks, and the request itself,
    stepped back to its prefix's end or below.
    """
    p, chunks = decided(case, protect)[0], [20, 0]
    runs = [Pool(p, byte).serve(chunks, impl) for byte in ((0, 255) if impl == "reference" else (0, 1, 127, 255))]
    used, texts = Pool(p), p.texts
    p.texts = [[x[0].flip(0)] for x in texts]
    used.serve([11], impl)
    p.texts, used.lengths = texts, [0]
    runs.append(used.serve(chunks, impl))
    for out, lse, retained, _ in runs[1:]:
        assert torch.equal(out, runs[0].out) and torch.equal(lse, runs[0].lse)
        assert all(torch.equal(retained[length], tokens) for length, tokens in runs[0].retained.items())
    for back in [protect] if impl == "reference" or not protect else (17, 16, 3):
        again = Pool(p)
        again.serve(chunks, impl)
        again.lengths = [back]
        check_same(again.serve([20 - back, 0], impl), runs[0].after(back))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_prefix_is_written_once_and_never_changes(impl):
    """The prefix's keys and values are exact, and nothing else is written except the tail's blocks."""
    for case in ("mlstm", "gate_scores-threshold", "mass-mean"):
        p = problem(case, 21)
        pool, (_, k, v) = Pool(p), (x[0][:21].transpose(0, 1) for x in p.texts)
        pool.serve([30, 0], impl)
        pages, blocks = pool.pages, p.prefix_table[0].long()
        keys, values = p.prefix(pages, [0]).gather(0, 0, 21)
        assert torch.equal(keys, k) and torch.equal(values, v)
        assert pages.k[blocks[1], :, 5:].isnan().all() and pages.v[blocks[1], :, 5:].isnan().all()
        assert pages.score[blocks].isnan().all() and (pages.position[blocks] == -1).all()
        assert (pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", ["triton"] if INTERPRETED else ["reference", "cpp"])
@pytest.mark.parametrize("case", ["mlstm", "mass-mean"])
@pytest.mark.parametrize("protect, start", [(0, 25), (17, 18), (17, 29), (17, 31)])
def test_a_step_out_of_order_is_refused(impl, case, protect, start):
    """The refusal comes before anything is written; at or below a prefix's end any step may start.

    Triton does not wait for the device to refuse, and returns NaN instead.
    """
    pool = Pool(problem(case, protect, length=51))
    pool.chunk(0, 30, "reference" if INTERPRETED else impl)
    before = pool.pages.raw.clone()
    for step in (lambda: pool.chunk(0, 4, impl), lambda: pool.decode([0], impl)):
        pool.lengths = [start]
        if INTERPRETED:
            assert all(bool(x.isnan().all()) for x in step())
            continue
        with pytest.raises(ops.StepOrderError, match=f"starts at position {start}, but its cache has seen 30"):
            step()
    assert torch.equal(pool.pages.raw, before)


def test_bad_prefixes_are_refused_before_anything_is_written():
    p = problem("mlstm", 17)
    pool, token = Pool(p), [x[0][20:21] for x in p.texts]
    pool.chunk(0, 20, "cpp")
    before, (blocks, right) = pool.pages.raw.clone(), (p.prefix_table, p.tokens)

    def step(prefix, table=p.table):
        place = torch.tensor([20]), p.budgets
        ops.decode_step(*token, pool.pages, table, *place, rule=p.rule, scale=p.scale, prefix=prefix, impl="cpp")

    far = blocks.clone()
    far[0, 1] = len(before)
    for table, tokens, error, message, *biased in (
        (blocks[:, :1], right, IndexError, "its prefix table has 1 entries, 2 are needed"),
        (far, right, IndexError, f"prefix block {len(before)} is not one of"),
        (torch.full_like(blocks, -1), right, IndexError, "prefix block -1 is not one of"),
        (blocks, torch.tensor([-1]), ValueError, "a prefix of -1 tokens is out of range"),
        (blocks, torch.tensor([2**31]), ValueError, "a prefix of 2147483648 tokens is out of range"),
        (blocks[0], right, ValueError, "the prefix table must be"),
        (blocks.long(), right, (TypeError, ValueError), "prefix table"),
        (blocks, right.int(), (TypeError, ValueError), "prefix tokens"),
        (blocks, torch.tensor([17, 17]), ValueError, "prefix tokens"),
        (blocks, right, ValueError, "-1 tokens of a prefix of 17 cannot have a bias", torch.tensor([-1])),
        (blocks, right, ValueError, "18 tokens of a prefix of 17 cannot have a bias", torch.tensor([18])),
        (blocks, right, (TypeError, ValueError), "prefix biases", right.int()),
        (blocks, right, ValueError, "prefix biases", torch.tensor([17, 17])),
    ):
        prefix = Prefix(pool.pages, table, tokens, *biased)
        with pytest.raises(error, match=message):
            step(prefix)
        if int(tokens.max()) == 17 and table.dim() == 2 and table.dtype is torch.int32:
            with pytest.raises(error, match=message):
                ops.begin_tail(pool.pages, p.table, prefix, rule=p.rule, impl="cpp")
    with pytest.raises(IndexError, match="entries"):
        step(p.prefix(pool.pages, [0]), p.table[..., :1])
    assert torch.equal(pool.pages.raw, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_step_below_the_end_needs_the_blocks_up_to_it_only(impl):
    """A prompt in chunks has blocks only as far as it is scheduled, and none of its tail's."""
    p = problem("mlstm", 33)
    pool, expected = Pool(p), serve(p, [17, 0], impl)
    blocks, p.prefix_table = p.prefix_table, p.prefix_table.clone()
    p.prefix_table[0, 2:] = -1
    pool.table = torch.full_like(p.table, -1)
    for count in (17, 0):
        out, _ = pool.chunk(0, count, impl) if count else pool.decode([0], impl)
        torch.testing.assert_close(out, expected.out[pool.lengths[0] - len(out) : pool.lengths[0]], rtol=0, atol=2e-5)
    p.prefix_table, pool.table = blocks, p.table
    check_same(pool.serve([0], impl), expected.after(18))


def test_attention_that_would_overrun_a_prefix_is_refused():
    p = problem("none", 40)
    q, raw, table = torch.zeros(4, 4, 32), Pool(p).pages.raw, p.prefix_table[0]

    def attend(q=q, raw=raw, table=table, first=0, last=40, biased=0, causal=False, slots=16, sinks=None):
        return _C.prefix_attention(q, raw, slots, table, first, last, biased, causal, False, 1.0, sinks)

    attend()
    for options, error in (
        ({"last": 49}, IndexError),
        ({"first": 40}, ValueError),
        ({"first": -1}, ValueError),
        ({"causal": True}, ValueError),
        ({"biased": 41}, ValueError),
        ({"biased": -1}, ValueError),
        ({"table": table + 100}, IndexError),
        ({"table": -table - 1}, IndexError),
        ({"table": table.long()}, TypeError),
        ({"raw": raw[..., :-4]}, ValueError),
        ({"q": q[:, :3]}, ValueError),
        ({"q": q.half()}, TypeError),
        ({"slots": 32}, ValueError),
        ({"sinks": torch.zeros(5)}, ValueError),
    ):
        with pytest.raises(error):
            attend(**options)
