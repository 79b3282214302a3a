"""Steps in persistent tensors equal steps built from new tensors, and padding writes nothing."""

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from kernels.served import INTERPRETED

from kvpop_vllm.cache.device_rows import DeviceRows, leading_decodes
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.ranks import Shares
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.cache.step import RequestBlocks, Span, StepPlan, numbers_of, plan_batch
from kvpop_vllm.kernels import ops
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.roles import Retention

IMPL = "triton" if INTERPRETED else "reference"
HEADS, SIZE, MOST, BLOCKS = 2, 32, 6, 600
EQUAL = EqualHeads(HEADS)
KEPT = {
    "every step": Retention(40, 2, 6),
    "no sinks": Retention(48, 0, 9),
    "longer than any": Retention(400, 2, 6),
}
STEPS = [
    ([1, 1, 5], [9, 100, 7]),
    ([1, 1, 1, 1], [1, 40, 41, 300]),
    ([1, 30, 1, 2], [77, 30, 1, 200]),
    ([64, 3], [64, 90]),
]
"""Tokens and length of each request. The third step has a prompt of one token after a longer chunk."""
PROTECTED = [[20, 0, 3], [0, 39, 41, 50], [76, 40, 1, 150], [32, 90]]
"""p of each of these requests: inside a prefix, at its end and after it, in decode rows and in chunks."""
LONGEST = 200


class Compressed(NamedTuple):
    """Numbers of a way in which prompts are compressed, as rows read them."""

    queries: int
    makes_slots: bool
    adaptive_head_budgets: bool


def rows_of(rule, state=0, longest=0, most_tokens=None):
    most_tokens, layout = most_tokens or rule.budget, PageLayout(HEADS, SIZE, torch.float32, 16, state)
    slots = RequestSlots(0, 0, rule.budget, rule.window)
    return DeviceRows(layout, slots, MOST, layout.blocks(most_tokens, most_tokens), None, "cpu", longest)


def engine_tables(rows, lens, seed=0):
    """Return a block table with foreign blocks after a request's own, and the slots of its tokens."""
    g = torch.Generator().manual_seed(seed)
    width = rows.table.shape[1] + rows.prefix_table.shape[1]
    table = 1 + torch.randperm(BLOCKS - 1, generator=g)[: MOST * width].int().view(MOST, -1)
    return table, torch.arange(100, 100 + sum(lens))


def ends(lens):
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def filled(rows, lens, lengths, slots, send):
    """Fill the persistent tensors with the numbers ``send`` of these requests, and return their step."""
    (table, places), d = engine_tables(rows, lens), leading_decodes(lens)
    sent = numbers_of(slots, send)
    if "budget" in sent:
        sent["budget"] = sent["budget"].unsqueeze(1).repeat(1, HEADS)
    rows.receive(sent)
    ops.fill_rows(rows, d, torch.tensor(lengths, dtype=torch.int32), table, places, impl=IMPL)
    starts = [length - count for length, count in zip(lengths, lens, strict=True)]
    spans = [Span(i - d, ends(lens)[i], starts[i], lens[i], slots[i]) for i in range(d, len(lens))]
    widths = rows.table.shape[1], rows.prefix_table.shape[1]
    blocks = RequestBlocks.of_rows(table[d : len(lens)], slots[d:], rows.layout.block_slots, widths=widths)
    plan = StepPlan(rows.layout, spans, blocks, rows=rows.view(d, False, False), checks=False)
    return plan.batch(EQUAL)


def same_chunks(batch, expected, layout):
    """Compare the chunks; chunks of one token are decode rows in the expected step."""
    ours, theirs = batch.chunks, expected.chunks
    long = [i for i, length in enumerate(ours.lengths) if length > 1]
    for name in ("starts", "lengths", "windows", "firsts", "slots"):
        assert [getattr(ours, name)[i] for i in long] == list(getattr(theirs, name)), name
    for i, r in zip(long, range(len(theirs)), strict=True):
        pages = layout.blocks(most_tokens := int(ours.budgets[i].max()), most_tokens)
        assert torch.equal(ours.budgets[i], theirs.budgets[r])
        assert torch.equal(ours.table[i, :, :pages], theirs.table[r, :, :pages])
        if theirs.slots[r].prefix:
            width = ours.prefix.table.shape[1]
            assert torch.equal(ours.prefix.table[i], theirs.prefix.table[r, :width])
            assert int(ours.prefix.tokens[i]) == int(theirs.prefix.tokens[r])


def test_decodes_are_the_leading_rows():
    assert leading_decodes([1, 1, 5]) == 2 and leading_decodes([1, 30, 1, 2]) == 1
    assert leading_decodes([1, 1, 0, 0]) == 4, "padding of a captured batch decodes"
    assert leading_decodes([2, 0, 1]) == 0 and leading_decodes([]) == 0
    assert leading_decodes([4, 1, 3, 5, 2], 4) == 3 and leading_decodes([4, 3, 0], 4) == 3, "with three drafts"


def same_protection(batch, expected, table, protected):
    """Compare prefixes of the decode rows, protected tokens of chunks, and tails that begin in this step."""
    d = batch.decodes
    assert batch.prefix.tokens.tolist() == protected[:d]
    assert torch.equal(batch.prefix.table, table[:d, : batch.prefix.table.shape[1]])
    written, of_chunks = (
        [] if step.writes is None else sorted(zip(*(x.tolist() for x in step.writes), strict=True))
        for step in (expected, batch)
    )
    assert of_chunks == [place for place in written if place[0] >= d], "kernels write those of rows"
    in_rows = sum(0 < protected[r] == int(expected.positions[r]) for r in range(d))
    theirs = [] if expected.begun is None else expected.begun.prefix.tokens.tolist()
    ours = [] if batch.begun is None else batch.begun.prefix.tokens.tolist()
    assert ours == theirs[in_rows:]
    if ours:
        state = slice(0, 3)
        assert torch.equal(batch.begun.table[..., state], expected.begun.table[in_rows:, :, state])
        begun = batch.begun.prefix.table
        assert torch.equal(begun, expected.begun.prefix.table[in_rows:, : begun.shape[1]])


@pytest.mark.parametrize("state", [0, 5000])
@pytest.mark.parametrize("kind", ["server's sizes", "protected prompts", "own sizes"])
@pytest.mark.parametrize("name", KEPT)
def test_equal_to_rebuilt_batches(name, kind, state):
    """Steps are equal, also where requests have their own budgets, windows and protection.

    Budgets lie below and above the server's. The next step keeps nothing of them: a second turn runs the same
    steps with the server's budgets and windows.
    """
    rule, own_sizes = KEPT[name], kind == "own sizes"
    longest = 0 if kind == "server's sizes" else LONGEST
    rows = rows_of(rule, state=state, longest=longest, most_tokens=2 * rule.budget if own_sizes else None)
    for turn, (number, (lens, lengths)) in itertools.product(range(1 + own_sizes), enumerate(STEPS)):
        draw, protected = random.Random(number), PROTECTED[number] if longest else [0] * len(lens)
        budgets, windows = [rule.budget] * len(lens), [rule.window] * len(lens)
        if own_sizes and turn == 0:
            budgets = [draw.randint(rule.first_long + 4, 2 * rule.budget) for _ in lens]
            windows = [draw.randint(1, rule.window + 2) for _ in lens]
        slots = [RequestSlots(*numbers) for numbers in zip(protected, [0] * len(lens), budgets, windows, strict=True)]
        send = [*(["prefix"] if longest else []), *(["budget", "window"] if own_sizes else [])]
        batch, d = filled(rows, lens, lengths, slots, send), leading_decodes(lens)
        table = engine_tables(rows, lens)[0][: len(lens)]
        expected = plan_batch(rows.layout, slots, lens, lengths, table).batch(EQUAL)
        assert batch.decodes == d and batch.tokens == slice(0, d) and batch.starts is batch.first_pages is None
        for field in ("positions", "budgets", "windows") if d else ():
            assert torch.equal(getattr(batch, field), getattr(expected, field)[:d]), field
        assert not d or batch.budgets[:, 0].tolist() == budgets[:d] and batch.windows.tolist() == windows[:d]
        for r in range(d):
            tail = lengths[r] - protected[r]
            block_count = replace(rule, budget=budgets[r]).after_prefix(protected[r]).budget
            block_count = rows.layout.blocks(tail, block_count) if tail > 0 else 0
            assert torch.equal(batch.table[r, :, :block_count], expected.table[r, :, :block_count])
            assert (batch.table[r, :, block_count + (longest > 0) :] == 0).all()
            assert block_count > 0 or (batch.table[r] == 0).all()
        same_chunks(batch, expected, rows.layout)
        if longest:
            same_protection(batch, expected, table, protected)


@pytest.mark.parametrize("cause", ["no length", "no slot", "no block"])
def test_rows_of_padding_after_a_prefix(cause):
    """A row after a prefix is padding if it has no length, no slot or no block.

    Rows 1 to 3 lie inside the prefix, at its end and after it. The missing block is that of the token, or
    the first one of the tail.
    """
    rows, protected = rows_of(KEPT["every step"], state=5000, longest=LONGEST), torch.tensor([0, 20, 20, 20, 0, 0])
    (table, slots), lengths = engine_tables(rows, [1] * 4), torch.tensor([30, 18, 21, 60], dtype=torch.int32)
    first = 2 + rows.layout.state_blocks
    if cause == "no length":
        lengths[1:] = 0
    elif cause == "no slot":
        slots[1:] = -1
    else:
        table[1, 1] = table[2, first] = table[3, first] = 0
    rows.receive({"prefix": protected})
    ops.fill_rows(rows, 4, lengths, table, slots, impl=IMPL)
    assert rows.positions[:4].tolist() == [29, -1, -1, -1]
    assert (rows.table[1:4] == 0).all()
    if cause == "no block":
        table[1, 1] = table[3, first] = 7
        ops.fill_rows(rows, 4, lengths, table, slots, impl=IMPL)
        assert rows.positions[:4].tolist() == [29, 17, -1, 59], "blocks of others do not matter"
        assert rows.prefix_table[1, 1] == 7


@pytest.mark.parametrize("protected", [[0] * 5, [20, 40, 41, 30, 50], [16, 38, 41, 60, 49]])
def test_rows_with_drafts(protected):
    """Rows with drafts are those of the host. Requests with chunks have rows of what is staged."""
    layout, sizes = PageLayout(HEADS, SIZE, torch.float32, 16, 500, drafts=3), KEPT["every step"]
    rows = DeviceRows(layout, RequestSlots(0, 0, 40, 6), MOST, layout.blocks(40, 40), None, "cpu", LONGEST)
    counts, lengths, drafts = [4, 2, 1, 9, 30], [20, 42, 41, 64, 80], [3, 1, 0, 0, 0]
    slots = [RequestSlots(prefix, 0, sizes.budget, sizes.window) for prefix in protected]
    (table, places), firsts = engine_tables(rows, counts), torch.tensor(ends(counts), dtype=torch.int32)
    assert leading_decodes(counts, 4) == 3
    rows.receive(numbers_of(slots, ("prefix",)))
    ops.fill_rows(rows, 5, torch.tensor(lengths), table, places, firsts, 3, impl=IMPL)
    of_device = rows.view(5, False, False)
    of_host = plan_batch(layout, slots, counts, lengths, table[:5], drafts=drafts).rows
    resumed = [i for i, prefix in enumerate(protected) if i > 2 and lengths[i] - counts[i] > prefix]
    for i, r in enumerate([0, 1, 2, *resumed]):
        blocks = layout.blocks(tokens, sizes.budget) if (tokens := lengths[r] - protected[r]) > 0 and r < 3 else 0
        for name in ("tokens", "positions", "drafts"):
            if name != "tokens" or r < 3:  # of a row with a chunk no token is read
                assert getattr(of_device, name)[r] == getattr(of_host, name)[i], name
        assert torch.equal(of_device.tails[r, :blocks], of_host.tails[i, :blocks])
    assert (of_device.positions[[r for r in (3, 4) if r not in resumed]] == -1).all()
    written = {
        (first + j, int(table[r, (t := lengths[r] - counts[r] + j) // 16]), t % 16)
        for r, first in enumerate(ends(counts)[:3])
        for j in range(counts[r])
        if lengths[r] - counts[r] + j < protected[r]
    }
    assert {place for place in zip(*(x.tolist() for x in of_device.writes), strict=True) if place[1]} == written
    places[:] = -1
    ops.fill_rows(rows, 5, torch.tensor(lengths), table, places, firsts, 3, impl=IMPL)
    assert (rows.positions[:5] == -1).all() and (rows.drafts[:5] == -1).all()
    assert (rows.table[:5] == 0).all() and (rows.token_blocks == 0).all()


def test_a_narrow_block_table_is_taken_as_it_is():
    rows = rows_of(KEPT["longer than any"])
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    ops.fill_rows(rows, 2, torch.tensor([20, 60], dtype=torch.int32), table, torch.tensor([5, 6]), impl=IMPL)
    assert rows.table[0].count_nonzero() == 2 and rows.table[1, :4].tolist() == [5, 6, 7, 8]


class TestTriton:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("drafts", [0, 1, 3])
    @pytest.mark.parametrize("shares", [None, Shares(((40, 8), (20, 92)))])
    @pytest.mark.parametrize("kind", ["window", "protected", "votes", "made slots"])
    def test_equals_the_reference(self, kind, shares, drafts):
        """Requests, padding among them, and what they hold are drawn; all tensors are equal.

        Prefixes have more blocks than a program has columns. Some requests are at their end, or at the first query that
        votes. Only padding has no token in the flat batch.
        """
        compression = {"votes": Compressed(16, False, True), "made slots": Compressed(9, True, False)}.get(kind)
        layout, slots = PageLayout(HEADS, SIZE, torch.float32, 16, 700, drafts=drafts), RequestSlots(0, 0, 40, 6)
        longest, g, real = 0 if kind == "window" else 2100, torch.Generator().manual_seed(drafts), 0

        def drawn(low, high, *shape):
            return torch.randint(low, high, shape, generator=g, dtype=torch.int32)

        filled_rows = [DeviceRows(layout, slots, MOST, 9, shares, "cpu", longest, compression) for _ in range(2)]
        for _ in range(8):
            counts = drawn(0, 2 + drafts, MOST)
            lengths = counts + drawn(0, 150, MOST) * (counts > 0)
            table = (drawn(0, 30, MOST, 145).clamp_min(3) - 3)[:, :-5]
            places = drawn(-1, 9, max(1, int(counts.sum())) if drafts else MOST).long()
            sent = {"budget": drawn(24, 90, MOST, 1).repeat(1, HEADS)}
            starts = (lengths - (counts if drafts else 1)).clamp_min(0).long()
            if compression:
                sent |= {"shift": starts // 3, "left": lengths.long() // 2}
                starts -= sent["shift"]
            if longest:
                queries = compression.queries if compression else 1
                sent["prefix"] = torch.stack([drawn(0, 2100, MOST).long(), starts, starts + queries])[
                    drawn(0, 3, MOST).long(), torch.arange(MOST)
                ]
            firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)]) if drafts else None
            for rows, impl in zip(filled_rows, ("reference", "triton"), strict=True):
                rows.receive(sent)
                ops.fill_rows(rows, MOST - 1, lengths, table, places, firsts, 4 if drafts else None, impl=impl)
            ours, theirs = (vars(rows) for rows in reversed(filled_rows))
            tensors = [name for name, value in theirs.items() if isinstance(value, torch.Tensor)]
            real += int((theirs["positions"] >= 0).sum())
            for name in tensors:
                assert torch.equal(ours[name], theirs[name]), name
        assert len(tensors) >= 9 and real > 8
