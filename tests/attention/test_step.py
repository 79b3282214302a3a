"""One engine step is split as specified, and a step out of order changes nothing."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from kernels.factories import random_page_table, random_rule, random_scorer
from torch.utils._python_dispatch import TorchDispatchMode

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.cache.step import plan_batch
from kvpop_vllm.kernels.ops import StepOrderError
from kvpop_vllm.requests import RequestSlots

HEADS, GROUP, SIZE, SINKS, WINDOW, BUDGET = 2, 2, 32, 2, 6, 40
SLOTS, EQUAL = RequestSlots(0, 0, BUDGET, WINDOW), EqualHeads(HEADS)


@pytest.fixture
def layer():
    """Return a layer with an mLSTM scorer, its pages, and block-table rows of four requests."""
    g = torch.Generator().manual_seed(0)
    scorer = random_scorer("mlstm", HEADS, SIZE, g)
    layout = PageLayout(HEADS, SIZE, torch.float32, 16, scorer.state_floats)
    attention = FixedBudgetAttention(layout, random_rule(scorer, HEADS, SINKS, WINDOW, g), SIZE**-0.5)
    pages, table = random_page_table(layout, 4, BUDGET, g)
    return attention, pages, table[:, 0]


def batch(layer, query_lens, seq_lens, requests):
    rows = torch.nn.functional.pad(layer[2][requests], (0, 5))  # wider than needed, like vLLM's
    return plan_batch(layer[0].layout, [SLOTS] * len(rows), query_lens, seq_lens, rows).batch(EQUAL)


def chunks_of(step):
    """Return first token, length and first position of each chunk."""
    chunks = step.chunks
    return [*zip(chunks.firsts, chunks.lengths, chunks.starts, strict=True)]


def pages_of(table, layer):
    """Return the columns of a table that the budget needs."""
    return table[..., : layer[0].layout.blocks(BUDGET, BUDGET)]


def run(layer, step, tokens, seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, n, SIZE, generator=g) for n in (HEADS * GROUP, HEADS, HEADS))
    out = torch.full_like(q, float("nan"))
    layer[0].forward(q, k, v, layer[1], step, out)
    return out


def test_decodes_first(layer):
    step = batch(layer, [1, 1, 5], [9, 100, 7], [0, 1, 2])
    assert (step.decodes, step.tokens) == (2, slice(0, 2))
    assert step.positions.tolist() == [8, 99] and step.budgets.tolist() == [[BUDGET] * HEADS] * 2
    assert step.windows.tolist() == [WINDOW] * 2 and step.chunks.windows == [WINDOW]
    assert chunks_of(step) == [(2, 5, 2)] and step.chunks.budgets.tolist() == [[BUDGET] * HEADS]
    assert torch.equal(pages_of(step.table, layer), layer[2][:2].unsqueeze(1).expand(-1, HEADS, -1))
    assert torch.equal(pages_of(step.chunks.table, layer)[0], layer[2][2].expand(HEADS, -1))


def test_one_token_requests_anywhere(layer):
    step = batch(layer, [3, 1, 4, 1], [3, 1, 10, 50], [0, 1, 2, 3])
    assert step.decodes == 2 and step.tokens.tolist() == [3, 8] and step.positions.tolist() == [0, 49]
    assert chunks_of(step) == [(0, 3, 0), (4, 4, 6)] and step.chunks.tokens.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(pages_of(step.table, layer)[:, 0], layer[2][[1, 3]])
    assert step.starts.tolist() == [0, 49, 0, 6] and step.requests == [1, 3, 0, 2], "decode rows first"


def test_only_decodes_only_prefills_and_idle_rows(layer):
    assert len(batch(layer, [1, 1], [4, 5], [0, 1]).chunks) == 0
    assert batch(layer, [2, 9], [2, 9], [0, 1]).decodes == 0
    idle = batch(layer, [1, 0, 2], [4, 0, 2], [0, 1, 2])
    assert idle.decodes == 1 and chunks_of(idle) == [(1, 2, 0)] and idle.chunks.tokens == slice(1, 3)


def test_a_mixed_batch_equals_requests_alone(layer):
    """The outputs of a request do not depend on the order and the other requests of its batch, to the bit."""
    lens = [3, 1, 4, 1]
    together = run(layer, batch(layer, lens, lens, [0, 1, 2, 3]), 9, seed=1)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(9, n, SIZE, generator=g) for n in (HEADS * GROUP, HEADS, HEADS))
    first = 0
    for request, count in enumerate(lens):
        cut, out = slice(first, first + count), torch.empty(count, HEADS * GROUP, SIZE)
        layer[0].forward(q[cut], k[cut], v[cut], layer[1], batch(layer, [count], [count], [request]), out)
        assert torch.equal(out, together[cut])
        first += count


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    "query, seq, message",
    [
        (1, 50, "starts at position 49, but its cache has seen 50"),
        (1, 20, "starts at position 19, but its cache has seen 50"),
        (1, 60, "starts at position 59, but its cache has seen 50"),
        (10, 50, "starts at position 40, but its cache has seen 50"),
    ],
    ids=["replayed", "rewound", "skipped", "replayed chunk"],
)
def test_a_step_out_of_order_raises_and_writes_nothing(layer, impl, query, seq, message):
    layer[0].impl = impl
    run(layer, batch(layer, [50, 3], [50, 3], [0, 1]), 53, seed=2)
    before = layer[1].raw.clone()
    with pytest.raises(StepOrderError, match=message):
        run(layer, batch(layer, [query], [seq], [0]), query, seed=3)
    assert torch.equal(layer[1].raw, before)
    with pytest.raises(StepOrderError, match="request 1"):  # a request with a right start
        run(layer, batch(layer, [1, 1], [4, 50], [1, 0]), 2, seed=4)
    assert torch.equal(layer[1].raw, before)


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@pytest.mark.parametrize("off", [-1, 1])
def test_one_bad_start_in_a_mixed_step_and_nothing_is_written(layer, bad, off):
    """If one of two decodes and two chunks is replayed or skipped, none of the four is written."""
    before = [20, 60, 30, 50]
    run(layer, batch(layer, before, before, [0, 1, 2, 3]), sum(before), seed=7)
    query, seq = [1, 1, 6, 9], [21, 61, 36, 59]
    good = batch(layer, query, seq, [0, 1, 2, 3])
    assert good.starts.tolist() == before
    seq[bad] += off
    content = layer[1].raw.clone()
    message = f"starts at position {before[bad] + off}, but its cache has seen {before[bad]}"
    with pytest.raises(StepOrderError, match=f"request {bad}: step {message}"):
        run(layer, batch(layer, query, seq, [0, 1, 2, 3]), 17, seed=8)
    order = [3, 0, 2, 1]  # requests are numbered as in the batch, where chunks may come first
    with pytest.raises(StepOrderError, match=f"request {order.index(bad)}: step {message}"):
        run(layer, batch(layer, [query[i] for i in order], [seq[i] for i in order], order), 17, seed=8)
    assert torch.equal(layer[1].raw, content)
    run(layer, good, 17, seed=8)
    assert not torch.equal(layer[1].raw, content)


@pytest.mark.parametrize("start, fits", [(19, False), (20, True), (22, True), (23, False)])
def test_a_step_starts_after_drafts_that_are_staged(layer, start, fits):
    """Two of at most three drafts are staged, of a request that is decoded next to a chunk of another."""
    attention = layer[0]
    layout = replace(attention.layout, drafts=3)
    g = torch.Generator().manual_seed(1)
    layer = FixedBudgetAttention(layout, attention.rule, SIZE**-0.5), *random_page_table(layout, 2, BUDGET, g)
    table = torch.nn.functional.pad(layer[2][:, 0], (0, 5))

    def step(counts, lengths, drafts):
        run(layer, plan_batch(layout, [SLOTS] * 2, counts, lengths, table, drafts=drafts).batch(EQUAL), sum(counts), 7)

    step([19, 30], [19, 30], [0, 0])
    step([3, 5], [22, 35], [2, 0])
    content = layer[1].raw.clone()
    message = f"at position {start}, but its cache has seen 20 tokens and holds 2 staged drafts"
    with nullcontext() if fits else pytest.raises(StepOrderError, match=message):
        step([1, 5], [start + 1, 40], [0, 0])
    assert torch.equal(layer[1].raw, content) != fits


def test_a_sequence_may_start_over(layer):
    """Position 0 on used pages restarts a request (preemption), also as a prompt of one token."""
    fresh = run(layer, batch(layer, [20], [20], [0]), 20, seed=5)
    run(layer, batch(layer, [1], [1], [0]), 1, seed=6)
    assert torch.equal(run(layer, batch(layer, [20], [20], [0]), 20, seed=5), fresh)


class CountedOps(TorchDispatchMode):
    """Counts the torch operations that run under it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("protected", [0, 20])
@pytest.mark.parametrize("chunks", [0, 2])
def test_operations_of_a_plan_do_not_depend_on_the_number_of_requests(layer, protected, chunks):
    """Decode rows are described together: as many operations for 3 as for 100, for the plan and for each layer."""
    counts = []
    for requests in (3, 100):
        count, slots = requests + chunks, SLOTS._replace(prefix=protected)
        table, step = torch.zeros(count, 12, dtype=torch.int32), ([1] * requests + [4] * chunks, [90] * count)
        with CountedOps() as planning:
            plan = plan_batch(layer[0].layout, [slots] * count, *step, table)
        with CountedOps() as placing:
            assert plan.batch(EQUAL).decodes == requests
        counts.append((planning.count, placing.count))
    assert counts[0] == counts[1]
